"""Room line: which dp rank did the prefill give these rooms to, without asking in a storm.

Edge, decode side. One per address, owned by resolver.py. Open it to change how often a directory is
asked about rooms and how long a question waits there.

    all who ask within a moment        one question names all their rooms
    not known yet, our own server      the question is kept there until it can be answered
    not known yet, SGLang's            asked again after 0.05, 0.1 ... 1 s, all rooms together
    whatever they do                   two questions to one address are `rooms_gap_s` apart
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvplane.runtime import Clock, backoff, cancel
from kvplane.vocabulary import Room

from .client import RoomRanks
from .errors import BootstrapError
from .settings import ResolverSettings

Ask = Callable[[Sequence[Room], float], Awaitable[RoomRanks]]  # rooms, seconds it may wait there
Found = dict[Room, int]
T = TypeVar("T")
KEPT_S = 0.5  # a question that comes back empty before this was not kept, whatever is said


@dataclass(slots=True)
class _Batch:
    """Rooms that the next question names."""

    rooms: set[Room] = field(default_factory=set)
    task: asyncio.Task[RoomRanks] | None = None


class RoomLine:
    """Questions about rooms to one address."""

    def __init__(self, ask: Ask, clock: Clock, settings: ResolverSettings) -> None:
        self._ask, self._clock, self._settings = ask, clock, settings
        self._turns = asyncio.Lock()
        self._one = asyncio.Lock()
        self._next_at = clock.now()
        self._batch: _Batch | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._polls = 0
        self._waits_there: bool | None = None  # does it keep a question? None: not tried
        self._try_again_at = clock.now()
        self._over: BootstrapError | None = None

    async def ranks(self, rooms: Collection[Room], wait_s: float = 0.0) -> Found:
        """Those that are known, after at most `wait_s`; earlier when all are.

        Raises what the address's failure was; the error of `end` at once where that is called.
        """
        self._live()
        if not rooms:
            return {}
        task = self._start(self._until_known(set(rooms), self._clock.now() + wait_s))
        try:
            await asyncio.wait((task,))
        finally:
            if not task.done():
                task.cancel()
        if task.cancelled() and self._over is not None:
            raise copy.copy(self._over)
        found = task.result()
        return {room: found[room] for room in rooms if room in found}

    def end(self, error: BootstrapError) -> None:
        """The life that was asked is over: who waits is told so, and so is who comes."""
        self._over = error
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """End all questions that are out."""
        await cancel(*self._tasks)

    def _live(self) -> None:
        if self._over is not None:
            raise copy.copy(self._over)

    async def _until_known(self, rooms: set[Room], end: float) -> Found:
        found: Found = {}
        waits = backoff(self._settings.rooms_first_s, most_s=self._settings.rooms_most_s)
        while True:
            found |= (await self._together(rooms - found.keys())).ranks
            while rooms - found.keys() and self._may_poll(end):
                found |= (await self._poll(sorted(rooms - found.keys()), end)).ranks
            left = end - self._clock.now()
            if not rooms - found.keys() or left <= 0:
                return found
            await self._clock.sleep(min(self._common(next(waits)), left))

    def _common(self, wait_s: float) -> float:
        """`wait_s` made a little longer, so that many wake at one moment and ask as one."""
        grain, now = self._settings.rooms_first_s, self._clock.now()
        return math.ceil((now + wait_s) / grain) * grain - now

    async def _together(self, rooms: set[Room]) -> RoomRanks:
        """Into the next question; one that leaves stops nobody."""
        batch = self._batch
        if batch is None:
            batch = self._batch = _Batch()
            batch.task = self._start(self._ask_batch(batch))
        batch.rooms |= rooms
        assert batch.task is not None, "a batch has its task from the start"
        return await asyncio.shield(batch.task)

    async def _ask_batch(self, batch: _Batch) -> RoomRanks:
        async with self._one:  # who comes while it is out waits for the next one
            await self._turn()
            self._batch = None
            return await self._ask(sorted(batch.rooms), 0.0)

    def _may_poll(self, end: float) -> bool:
        if end - self._clock.now() < 1.0:  # the wish is in whole seconds
            return False
        if self._waits_there is False and self._clock.now() < self._try_again_at:
            return False
        most = self._settings.most_polls if self._waits_there else 1  # one finds out
        return self._polls < most

    async def _poll(self, rooms: Sequence[Room], end: float) -> RoomRanks:
        self._polls += 1
        try:
            await self._turn()
            sent_at = self._clock.now()
            # The first one only finds out: others go without until it is back.
            most = self._settings.most_poll_s if self._waits_there else 1.0
            wait = max(1.0, min(end - sent_at, most))
            answer = await self._ask(rooms, wait)
        finally:
            self._polls -= 1
        kept = answer.waited and (bool(answer.ranks) or self._clock.now() - sent_at > KEPT_S)
        self._waits_there = kept
        if not kept:
            self._try_again_at = self._clock.now() + self._settings.poll_again_s
        return answer

    async def _turn(self) -> None:
        async with self._turns:
            early = self._next_at - self._clock.now()
            if early > 0:
                await self._clock.sleep(early)
            self._next_at = self._clock.now() + self._settings.rooms_gap_s

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where every waiter has left

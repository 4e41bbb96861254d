"""Polls: questions for rooms that wait until the rooms are told.

Edge: one small set of tasks per waiting question. api.py asks and tells; stopped by whoever runs
the port, so that no answer is held back then. Open it to change how many may wait, or for what.

A decode that asks again and again until its rooms are known sends thousands of calls per second
(sglang#33114); one that says `Prefer: wait=10` sends one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from enum import Enum

from kvplane.runtime import Clock, cancel

MOST_AWAITED = 300_000  # rooms that all questions together wait for


class Outcome(Enum):
    """How a question stopped waiting."""

    TOLD = "told"  # all its rooms are known
    OVER = "over"  # its time was over first
    LEFT = "left"  # its client is gone
    BUSY = "busy"  # too many were waiting: it was answered at once
    CLOSED = "closed"  # we are stopping


class _Poll:
    def __init__(self, missing: Iterable[int]) -> None:
        self.missing = set(missing)
        self.told = asyncio.Event()


class Polls:
    """All questions that wait."""

    def __init__(self, clock: Clock, most: int) -> None:
        self._clock, self._most = clock, most
        self._waiting: dict[int, set[_Poll]] = {}  # room -> who waits for it
        self._polls: set[_Poll] = set()
        self._awaited = 0
        self._open = True

    def __len__(self) -> int:
        return len(self._polls)

    def told(self, room: int) -> None:
        """A room is known from now on."""
        for poll in self._waiting.pop(room, ()):
            self._awaited -= 1
            poll.missing.discard(room)
            if not poll.missing:
                poll.told.set()

    async def wait(
        self, missing: Iterable[int], wait_s: float, left: Callable[[], Awaitable[None]]
    ) -> Outcome:
        """Until all `missing` were told, `wait_s` is over, or `left()` returns."""
        poll = _Poll(missing)
        full = len(self) >= self._most or self._awaited + len(poll.missing) > MOST_AWAITED
        if full or not self._open:
            return Outcome.BUSY if self._open else Outcome.CLOSED
        self._add(poll)
        try:
            return await self._first(poll, wait_s, left)
        finally:
            self._remove(poll)

    async def _first(
        self, poll: _Poll, wait_s: float, left: Callable[[], Awaitable[None]]
    ) -> Outcome:
        told = asyncio.ensure_future(poll.told.wait())
        gone = asyncio.ensure_future(left())
        over = asyncio.ensure_future(self._clock.sleep(wait_s))
        try:
            await asyncio.wait((told, gone, over), return_when=asyncio.FIRST_COMPLETED)
            if told.done():
                return Outcome.CLOSED if poll.missing else Outcome.TOLD
            return Outcome.LEFT if gone.done() else Outcome.OVER
        finally:
            await cancel(told, gone, over)

    def _add(self, poll: _Poll) -> None:
        self._polls.add(poll)
        self._awaited += len(poll.missing)
        for room in poll.missing:
            self._waiting.setdefault(room, set()).add(poll)

    def _remove(self, poll: _Poll) -> None:
        self._polls.discard(poll)
        self._awaited -= len(poll.missing)
        for room in poll.missing:
            others = self._waiting[room]
            others.discard(poll)
            if not others:
                del self._waiting[room]

    async def start(self) -> None:
        """Questions may wait."""
        self._open = True

    async def stop(self) -> None:
        """All that wait are answered now, and nobody waits from now on."""
        self._open = False
        for poll in self._polls:
            poll.told.set()

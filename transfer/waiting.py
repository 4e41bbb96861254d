"""Waiting: for one thing unless another happens, each within its time, each recorded.

Edge. Used by offer.py, delivery.py and pull.py. Every wait of a room goes through `Steps`, so it
has a deadline, a StageRecord and a sentence. Open it to change what a deadline or a record says.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvplane.runtime import Clock
from kvplane.vocabulary import Room, Stage, StageRecord

from .errors import DeadlineExceeded, TransferError
from .regions import Regions

T = TypeVar("T")
INLINE_BYTES = 512 * 1024  # hashed in less time than a thread takes to be asked


async def unless(work: Coroutine[Any, Any, T], *brakes: asyncio.Future[None]) -> T:
    """The result of `work`; a brake that gets its exception first cancels it and is raised."""
    task = asyncio.ensure_future(work)
    both: set[asyncio.Future[Any]] = {task, *brakes}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for brake in brakes:
            if brake.done() and not task.done():
                brake.result()
        return await task
    finally:
        await _ended(task)


async def all_of(*work: Coroutine[Any, Any, T]) -> list[T]:
    """All results in order; the first failure cancels the others and is raised once they ended."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task in done and (task.cancelled() or task.exception())]
        return [task.result() for task in failed or tasks]
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            await _ended(task)


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel it and stay until it is gone, also when we are cancelled meanwhile."""
    again: asyncio.CancelledError | None = None
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            again = error
    if not task.cancelled():
        task.exception()  # seen: another one counts
    if again is not None:
        raise again


async def page_sums(regions: Regions, pages: Sequence[int]) -> tuple[int, ...]:
    """xxh3-64 of each page, off the event loop when it is much."""
    if regions.page_bytes * len(pages) <= INLINE_BYTES:
        return regions.sums(pages)
    return await asyncio.to_thread(regions.sums, tuple(pages))


@dataclass(slots=True)
class Step:
    """The stage that runs now; its facts are filled in as they become known."""

    peer: str
    waiting_for: str
    parts: list[Step] = field(default_factory=list)  # of a stage with several peers
    over: bool = False

    def part(self, peer: str) -> Step:
        """The same stage with one of several peers."""
        self.parts.append(Step(peer, self.waiting_for))
        return self.parts[-1]

    @property
    def late(self) -> Step:
        """Who is waited for: the first part that is not over, or the whole."""
        return next((part for part in self.parts if not part.over), self)


class Steps:
    """The stages of one room, one after the other, under one deadline."""

    def __init__(
        self,
        room: Room,
        deadline_s: float,
        record: Callable[[StageRecord], None],
        clock: Clock,
        by: str,
    ) -> None:
        self._room, self._record, self._clock, self._by = room, record, clock, by
        self._total_s = deadline_s
        self._until = asyncio.get_running_loop().time() + deadline_s

    def left_s(self) -> float:
        """Of the deadline; 0 or more."""
        return max(0.0, self._until - asyncio.get_running_loop().time())

    @asynccontextmanager
    async def stage(
        self,
        stage: Stage,
        peer: str,
        waiting_for: str,
        most_s: float | None = None,
        counts: bool = True,
    ) -> AsyncIterator[Step]:
        """Run a stage; records its outcome. Raises DeadlineExceeded with what was waited for.

        Without `counts` the room's own deadline stands still meanwhile, and `most_s` is the limit.
        """
        started, began = self._clock.now(), asyncio.get_running_loop().time()
        step = Step(peer, waiting_for)
        left = self.left_s() if counts else math.inf
        allowed = left if most_s is None else min(left, most_s)
        try:
            try:
                async with asyncio.timeout(allowed):
                    yield step
            except TimeoutError as error:
                after, late = self._total_s if allowed == left else allowed, step.late
                raise DeadlineExceeded(late.peer, late.waiting_for, after, stage) from error
        except BaseException as error:
            self._tell(stage, started, "failed", _sentence(error, step))
            raise
        if not counts:
            self._until += asyncio.get_running_loop().time() - began
        self._tell(stage, started, "ok", step.peer)

    def _tell(self, stage: Stage, started: float, outcome: str, detail: str) -> None:
        duration = self._clock.now() - started
        at = self._clock.wall()
        self._record(StageRecord(self._room, stage, outcome, duration, detail, self._by, at))


def _sentence(error: BaseException, step: Step) -> str:
    step = step.late
    if isinstance(error, asyncio.CancelledError):
        return f"cancelled while waiting for {step.waiting_for} of {step.peer}"
    if not isinstance(error, TransferError):
        return f"{step.peer}: {type(error).__name__}: {error}"
    text, peer = error.sentence(), error.where or step.peer
    return text if peer in text else f"{peer}: {text}"

"""Waiting: for one thing unless another happens, each within its time, each recorded.

Edge. Used by offer.py, delivery.py and pull.py. Every wait of a room goes through `Steps`, so it
has a deadline, a StageRecord and a sentence. Open it to change what a deadline or a record says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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


async def _ended(task: asyncio.Future[Any]) -> None:
    """Cancel it and stay until it is gone, also when we are cancelled meanwhile."""
    again: asyncio.CancelledError | None = None
    while not task.done():
        task.cancel()
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            again = error
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
        self, stage: Stage, peer: str, waiting_for: str, most_s: float | None = None
    ) -> AsyncIterator[Step]:
        """Run a stage; records its outcome. Raises DeadlineExceeded with what was waited for."""
        started = self._clock.now()
        step = Step(peer, waiting_for)
        left = self.left_s()
        allowed = left if most_s is None else min(left, most_s)
        try:
            try:
                async with asyncio.timeout(allowed):
                    yield step
            except TimeoutError as error:
                after = self._total_s if allowed == left else allowed
                raise DeadlineExceeded(step.peer, step.waiting_for, after, stage) from error
        except BaseException as error:
            self._tell(stage, started, "failed", _sentence(error, step))
            raise
        self._tell(stage, started, "ok", step.peer)

    def _tell(self, stage: Stage, started: float, outcome: str, detail: str) -> None:
        duration = self._clock.now() - started
        at = self._clock.wall()
        self._record(StageRecord(self._room, stage, outcome, duration, detail, self._by, at))


def _sentence(error: BaseException, step: Step) -> str:
    if isinstance(error, asyncio.CancelledError):
        return f"cancelled while waiting for {step.waiting_for} of {step.peer}"
    text = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
    return text if step.peer in text else f"{step.peer}: {text}"

"""Runtime: tasks end when told, also those that lose a cancellation; waits grow and are bounded."""

from __future__ import annotations

import asyncio
import gc
import itertools

import pytest
from kit.clock import FakeClock
from kit.wait import until

from kvplane import runtime
from kvplane.runtime import backoff, cancel, running, supervise


async def test_cancel_ends_tasks_and_swallows_their_errors() -> None:
    async def fails() -> None:
        raise ValueError("not ours")

    hanging = asyncio.create_task(asyncio.Event().wait())
    failing = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await cancel(hanging, None, failing)
    assert hanging.cancelled() and failing.done()


async def test_a_lost_cancellation_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CANCEL_AGAIN_S", 0.01)

    async def deaf() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    task = asyncio.create_task(deaf())
    await asyncio.sleep(0)
    await cancel(task)
    assert task.cancelled()


async def test_supervise_restarts_with_growing_waits_and_ends_when_the_work_does() -> None:
    clock, runs = FakeClock(), itertools.count(1)

    async def work() -> None:
        if next(runs) < 4:
            raise OSError("again")

    task = asyncio.create_task(supervise("test", work, clock))

    def ended() -> bool:
        clock.advance(1.0)
        return task.done()

    await until(ended)
    assert next(runs) == 5


def test_backoff_grows_to_its_limit() -> None:
    waits = list(itertools.islice(backoff(1.0, factor=2.0, most_s=4.0, jitter=0.0), 5))
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]


class Noted:
    """A part that notes its life."""

    def __init__(self, name: str, notes: list[str], fails: bool = False) -> None:
        self.name, self.notes, self.fails = name, notes, fails

    async def start(self) -> None:
        if self.fails:
            raise OSError(self.name)
        self.notes.append(f"+{self.name}")

    async def stop(self) -> None:
        self.notes.append(f"-{self.name}")


async def test_parts_stop_in_reverse_and_only_those_that_started() -> None:
    notes: list[str] = []
    parts = [Noted("a", notes), Noted("b", notes), Noted("c", notes, fails=True)]
    with pytest.raises(OSError, match="c"):
        async with running(parts):
            raise AssertionError("never entered")
    assert notes == ["+a", "+b", "-b", "-a"]


def test_what_was_loaded_is_no_garbage_and_a_hundred_requests_are_no_reason_to_look() -> None:
    before = gc.get_threshold()
    try:
        stays = [[number] for number in range(1000)]
        runtime.spare_garbage_looks()
        assert gc.get_freeze_count() > len(stays)
        looks: list[int] = []
        gc.callbacks.append(note := lambda phase, info: looks.append(info["generation"]))
        try:
            under_way = [[number] for number in range(4000)]
            assert not looks and len(under_way) == 4000
            under_way += [[number] for number in range(4000)]
            assert looks and not any(looks), "the young alone"
        finally:
            gc.callbacks.remove(note)
    finally:
        gc.set_threshold(*before)

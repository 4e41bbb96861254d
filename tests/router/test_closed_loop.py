"""Closed loop: what is compared, when it is judged, what is said then, and when it is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from kit.drifting import P1, Desk
from msgspec import structs

from kvplane.router.suspicions import Cause
from kvplane.vocabulary import Cleared, ClearReason, Epoch, Knowledge


@pytest_asyncio.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    await made.loop.start()
    yield made
    await made.loop.stop()


async def test_what_agrees_is_counted_at_once(desk: Desk) -> None:
    desk.store(1, 1)
    desk.served(1, 96)
    assert desk.counts == {"equal": 1}
    assert desk.loop.errors()[P1] == (0, 0)


async def test_news_on_its_way_is_waited_for(desk: Desk) -> None:
    """Side by side, the second finds what the first stored before the index heard of it."""
    for number in range(8):
        desk.served(number, 96)
        desk.store(number, number + 1)
    assert not desk.counts
    await desk.passes(1.25)
    assert desk.counts == {"equal": 8} and desk.cause is None


async def test_wrong_depths_are_an_alarm_and_right_ones_end_it(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(8):
        desk.store(number, number + 1)
        desk.served(number, 0)
    await desk.passes(1.5)
    assert desk.counts == {"over": 8}
    assert (desk.cause, desk.loop.errors()[P1]) == (Cause.UNKNOWN, (1.0, 0))
    doubt = desk.loop.doubt(P1)
    assert doubt is not None and doubt[0] is Knowledge.PARTIAL
    assert "index says 96 tokens, p1 found 0" in doubt[1]
    await desk.passes(2.0)
    for number in range(5):
        desk.served(number, 96)
    await desk.passes(0.5)
    assert desk.cause is None and desk.loop.doubt(P1) is None
    said = [one.getMessage() for one in caplog.records if "drift" in one.getMessage()]
    assert len(said) == 2, said  # one line per change
    assert "worker=p1" in said[0] and "over" in said[1]


async def test_the_cause_is_tested_and_named(desk: Desk) -> None:
    for number in range(6):
        desk.store(number, number + 1)
        desk.served(number, 96, salt="mine")
    await desk.passes(1.5)
    assert desk.cause is Cause.SALT


async def test_one_reset_heard_late_is_no_alarm(desk: Desk) -> None:
    for number in range(10):
        desk.store(number, number + 1)
        desk.served(number, 96)
    desk.served(3, 0)
    await desk.passes(1.5)
    assert desk.counts["over"] == 1 and desk.cause is None


@pytest.mark.parametrize(
    ("actual", "exact", "outcome"), [(None, True, "untold"), (0, False, "doubted")]
)
async def test_what_cannot_be_compared_is_counted_apart(
    desk: Desk, actual: int | None, exact: bool, outcome: str
) -> None:
    for number in range(8):
        desk.store(number, number + 1)
        desk.served(number, actual, exact)
    await desk.passes(1.5)
    assert desk.counts == {outcome: 8} and desk.cause is None


async def test_another_life_begins_with_an_empty_window(desk: Desk) -> None:
    for number in range(8):
        desk.store(number, number + 1)
        desk.served(number, 0)
    late = desk.routed(1)
    await desk.passes(1.5)
    assert desk.cause
    desk.view.apply(Cleared(P1, Epoch(2), ClearReason.RESTART))
    await desk.passes(0.5)
    assert desk.cause is None and not desk.loop.errors()
    desk.loop.answered(late, 0)  # routed in the life before
    assert not desk.loop.errors()


async def test_a_pod_that_left_is_forgotten(desk: Desk) -> None:
    desk.store(1, 1)
    for _ in range(8):
        desk.served(1, 0)
    await desk.passes(1.5)
    assert desk.cause
    desk.loop.forget(P1.pod)
    assert desk.cause is None and not desk.loop.errors()


async def test_a_flood_of_wrong_ones_is_bounded(desk: Desk) -> None:
    desk.store(1, 1)
    for _ in range(1000):
        desk.served(1, 0)
    assert desk.counts == {"skipped": 1000 - 256}
    await desk.passes(1.5)
    assert desk.counts["over"] == 256 and desk.cause


async def test_one_prompt_longer_than_all_that_may_wait_is_judged(desk: Desk) -> None:
    tokens = list(range(300_000))
    told = structs.replace(desk.routed(1), prompts=(tokens,))
    for _ in range(3):
        desk.loop.answered(told, 96)
    assert desk.counts == {"skipped": 2}
    await desk.passes(1.5)
    assert desk.counts["under"] == 1


async def test_nothing_is_judged_while_the_store_is_away(desk: Desk) -> None:
    desk.store(1, 1)
    for _ in range(8):
        desk.served(1, 0)
    desk.down_s = 0.5
    await desk.passes(1.5)
    assert desk.counts == {"doubted": 8} and desk.loop.doubt(P1) is None
    desk.down_s = 3.0
    assert desk.loop.doubt(P1) == (
        Knowledge.PARTIAL,
        "the index store does not answer since 3 s",
    )


# Silence ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [Knowledge.EXACT, Knowledge.PARTIAL, Knowledge.DARK])
async def test_a_worker_that_serves_a_hundred_requests_in_silence_is_dark(
    desk: Desk, state: Knowledge
) -> None:
    desk.believe(state)
    for number in range(100):
        desk.served(number, 0, state is Knowledge.EXACT)
    await desk.passes(4.5)
    assert desk.cause is None
    await desk.passes(1.0)
    assert desk.cause is Cause.SILENT
    found = desk.loop.verdict(P1)
    assert found is not None and found.state is Knowledge.DARK
    assert "p1 served 100 requests" in found.sentence
    desk.store(100, 1)  # events start
    await desk.passes(0.5)
    assert desk.cause is None


@pytest.mark.parametrize(
    ("heard", "exact", "silent"),
    [(True, True, True), (False, False, True), (True, False, False)],
)
async def test_an_engine_that_tells_no_cached_tokens_owes_what_the_index_is_sure_of(
    desk: Desk, heard: bool, exact: bool, silent: bool
) -> None:
    for number in range(5):
        told = desk.routed(number, exact)
        desk.loop.answered(told if heard else structs.replace(told, last=None), None)
    if not heard:
        desk.view.apply(Cleared(P1, Epoch(2), ClearReason.RESTART))
        desk.believe(Knowledge.DARK, epoch=2)
        for number in range(5):
            desk.served(number, None, exact)
    await desk.passes(5.5)
    assert (desk.cause is Cause.SILENT) is silent


async def test_a_proven_cause_says_more_than_silence_and_silence_more_than_none(
    desk: Desk,
) -> None:
    for number in range(6):
        desk.store(number)
        desk.served(number, 80)  # claims one block too much: wrong, yet little
        desk.served(number + 100, 0)
    await desk.passes(5.5)
    assert desk.cause is Cause.SILENT
    for number in range(6):
        desk.store(number, None)
        desk.served(number, 96, salt="mine")
    await desk.passes(1.5)
    assert desk.cause is Cause.SALT


async def test_a_worker_that_found_everything_owes_nothing(desk: Desk) -> None:
    for number in range(20):
        desk.store(number)
        desk.served(number, 96)
    await desk.passes(20)
    assert desk.cause is None


@pytest.mark.parametrize("why", ["store", "view", "ingest"])
async def test_silence_is_no_fault_of_an_engine_that_nobody_could_hear(
    desk: Desk, why: str
) -> None:
    for number in range(20):
        desk.served(number, 0)
    if why == "store":
        desk.down_s = 0.1
    elif why == "view":
        desk.blind = "the index is still being read"
    else:
        desk.view.living = frozenset({"another"})
    await desk.passes(10)
    assert desk.cause is None
    desk.down_s, desk.blind, desk.view.living = 0.0, "", frozenset({"a"})
    await desk.passes(10)
    assert desk.cause is None  # forgiven: it owes only what it serves from now on


async def test_stopping_ends_the_task_and_may_be_done_twice() -> None:
    desk = Desk()
    await desk.loop.stop()
    await desk.loop.start()
    await desk.loop.stop()
    await desk.loop.stop()
    assert len(asyncio.all_tasks()) == 1

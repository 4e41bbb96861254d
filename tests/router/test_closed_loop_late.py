"""Closed loop and news that comes late: what it makes wrong is no drift; what stays wrong is."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from kit.drifting import P1, SPACE, Desk, prompt
from msgspec import structs

from kvplane.index import chain
from kvplane.router.foretold import Depth
from kvplane.router.suspicions import Cause
from kvplane.vocabulary import Epoch, Knowledge, Pod, Role, Stored, Tier, Worker, WorkerUp


@pytest_asyncio.fixture
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    for number in range(40):
        made.store(number, number + 1)
    await made.loop.start()
    yield made
    await made.loop.stop()


def wrong(desk: Desk, count: int = 6) -> None:
    """The index says 96 of all of them; the engine goes on telling what it stores."""
    for number in range(count):
        desk.served(number, 0)
        facts = desk.view.facts(P1)
        assert facts is not None and facts.last is not None
        desk.view.note(P1, Epoch(1), facts.last + 1, 0.0)


def away(desk: Desk, down_s: float) -> None:
    desk.down_s = down_s


def blind(desk: Desk, why: str) -> None:
    desk.blind = why


def living(desk: Desk, *names: str) -> None:
    desk.view.living = frozenset(names)


TROUBLE: dict[str, tuple[Callable[[Desk], None], Callable[[Desk], None]]] = {
    "store": (lambda desk: away(desk, 0.5), lambda desk: away(desk, 0.0)),
    "view": (lambda desk: blind(desk, "it is still being read"), lambda desk: blind(desk, "")),
    "ingest": (lambda desk: living(desk, "another"), lambda desk: living(desk, "a")),
    "partial": (
        lambda desk: desk.believe(Knowledge.PARTIAL),
        lambda desk: desk.believe(Knowledge.EXACT),
    ),
    "dark": (
        lambda desk: desk.believe(Knowledge.DARK),
        lambda desk: desk.believe(Knowledge.EXACT),
    ),
}
each_trouble = pytest.mark.parametrize("trouble", TROUBLE)


async def troubled(desk: Desk, trouble: str, seconds: float = 0.0) -> None:
    """Seen at one look, for so long, and over at the next."""
    breaks, mends = TROUBLE[trouble]
    breaks(desk)
    await desk.jumps(0.25)
    if seconds:
        await desk.jumps(seconds)
    mends(desk)
    await desk.jumps(0.25)


# When it is judged ------------------------------------------------------------------------------


async def test_it_is_judged_when_the_store_answered_what_was_asked_later(desk: Desk) -> None:
    desk.in_touch_at = desk.clock.now()
    wrong(desk)
    await desk.passes(3.0)
    assert not desk.counts
    desk.in_touch_at += 0.5
    await desk.jumps(0.25)
    assert desk.counts == {"over": 6} and desk.cause is Cause.UNKNOWN


async def test_it_is_not_judged_at_all_where_the_store_answers_too_late(desk: Desk) -> None:
    desk.in_touch_at = desk.clock.now()
    wrong(desk)
    await desk.jumps(4.9)
    assert not desk.counts
    await desk.jumps(0.25)
    assert desk.counts == {"doubted": 6} and desk.cause is None
    assert desk.loop.errors()[P1] == (0, 0)


@each_trouble
async def test_trouble_between_a_request_and_its_judgement_makes_it_no_evidence(
    desk: Desk, trouble: str
) -> None:
    wrong(desk)
    await desk.jumps(0.25)
    await troubled(desk, trouble)
    await desk.jumps(1.0)
    assert desk.counts == {"doubted": 6} and desk.cause is None
    wrong(desk)
    await desk.jumps(1.0)
    assert desk.counts == {"doubted": 6, "over": 6} and desk.cause is Cause.UNKNOWN


@each_trouble
async def test_a_request_that_was_routed_in_trouble_is_no_evidence_however_long_it_took(
    desk: Desk, trouble: str
) -> None:
    desk.served(0, 96)
    told, routed = [desk.routed(number) for number in range(6)], desk.clock.now()
    await desk.jumps(0.25)
    await troubled(desk, trouble)
    await desk.jumps(60)
    for one in told:
        desk.loop.answered(one, 0, routed)
    await desk.jumps(1.0)
    assert desk.counts == {"equal": 1, "doubted": 6} and desk.cause is None


# What was mended --------------------------------------------------------------------------------


@each_trouble
async def test_what_was_wrong_before_trouble_was_seen_is_no_evidence_once_it_is_over(
    desk: Desk, trouble: str
) -> None:
    wrong(desk)
    await desk.jumps(1.0)
    assert desk.cause is Cause.UNKNOWN
    await desk.jumps(7.0)
    await troubled(desk, trouble, 60)
    assert desk.cause is None and desk.counts == {"over": 6}
    wrong(desk, 2)
    await desk.jumps(1.0)
    assert desk.cause is None, "it is judged anew"
    wrong(desk, 3)
    await desk.jumps(1.0)
    assert desk.cause is Cause.UNKNOWN, "and as soon as before"


@each_trouble
async def test_what_was_wrong_long_before_the_trouble_stays(desk: Desk, trouble: str) -> None:
    wrong(desk)
    await desk.jumps(1.0)
    await desk.jumps(11.0)
    await troubled(desk, trouble)
    assert desk.cause is Cause.UNKNOWN


# What is proven ---------------------------------------------------------------------------------


def salted(desk: Desk) -> None:
    for number in range(6):
        desk.served(number, 96, salt="mine")


def resized(desk: Desk) -> None:
    for number in range(6):
        desk.served(number, 40)


def renamed(desk: Desk) -> None:
    up = WorkerUp(P1.pod, "http://p1:1", Role.PREFILL, model="tiny", adapters=("sql",))
    desk.fleet.up(up)
    for number in range(6):
        told = structs.replace(desk.routed(number), depths={}, space=replace(SPACE, adapter="sql"))
        desk.loop.answered(told, 96)


def mixed_up(desk: Desk) -> None:
    """What p1 serves appears at p2."""
    other = Worker(Pod("p2"))
    for number in range(100, 106):
        told = desk.routed(number)
        told = structs.replace(told, depths={**told.depths, other: Depth()})
        hashes = chain(prompt(number), SPACE).blocks
        desk.view.apply(Stored(other, Epoch(1), Tier.GPU, None, hashes, 16))
        desk.loop.answered(told, 48)


@each_trouble
@pytest.mark.parametrize(
    ("broken", "cause"),
    [
        (salted, Cause.SALT),
        (renamed, Cause.ADAPTER),
        (mixed_up, Cause.IDENTITY),
        (resized, Cause.BLOCK_SIZE),
    ],
)
async def test_a_proven_cause_neither_rests_nor_is_mended_by_other_trouble(
    desk: Desk, broken: Callable[[Desk], None], cause: Cause, trouble: str
) -> None:
    broken(desk)
    await desk.jumps(1.0)
    assert desk.cause is cause
    await troubled(desk, trouble)
    assert desk.cause is cause
    await desk.jumps(500)
    assert desk.cause is cause


# What rests -------------------------------------------------------------------------------------


async def test_an_alarm_without_a_cause_rests_where_nothing_confirms_it_and_is_back_at_once(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    wrong(desk)
    await desk.jumps(1.0)
    await desk.jumps(14.5)
    assert desk.cause is Cause.UNKNOWN and desk.loop.doubt(P1)
    await desk.jumps(1.0)
    assert desk.cause is None and desk.loop.doubt(P1) is None
    assert desk.loop.errors()[P1] == (1.0, 0), "what is remembered stays"
    await desk.jumps(100)
    desk.served(30, 96)
    await desk.jumps(2.0)
    assert desk.cause is None
    wrong(desk, 1)
    await desk.jumps(1.0)
    assert desk.cause is Cause.UNKNOWN
    said = [one.getMessage() for one in caplog.records if "drift" in one.getMessage()]
    assert len(said) == 3 and said[1] == "drift rests worker=p1 cause=unknown", said


@each_trouble
async def test_an_alarm_does_not_rest_while_nobody_could_confirm_it(
    desk: Desk, trouble: str
) -> None:
    wrong(desk)
    await desk.jumps(1.0)
    await desk.jumps(12.0)
    breaks, mends = TROUBLE[trouble]
    breaks(desk)
    await desk.jumps(1.0)
    await desk.jumps(60)
    assert desk.cause is Cause.UNKNOWN
    mends(desk)
    await desk.jumps(0.25)
    assert desk.cause is None
    breaks(desk)
    await desk.jumps(1.0)
    assert desk.cause is None, "what rests is not woken by it"


async def test_what_stays_wrong_is_named_within_a_few_requests_though_few_come(desk: Desk) -> None:
    seen = []
    for _ in range(12):
        wrong(desk, 1)
        await desk.jumps(1.0)
        seen.append(desk.cause)
        await desk.jumps(40)
    assert seen == [None] * 4 + [Cause.UNKNOWN] * 8
    assert desk.cause is None


async def test_a_cause_is_named_and_stays_named_though_few_requests_come(desk: Desk) -> None:
    seen = []
    for number in range(8):
        desk.served(number, 96, salt="mine")
        await desk.jumps(1.0)
        await desk.jumps(40)
        seen.append(desk.cause)
    assert seen == [None] * 4 + [Cause.SALT] * 4

"""Evidence: bounded, every stage with its begin and end, and times that add up."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise
from typing import Any

import pytest
from kit.clock import FakeClock

from kvplane.router.errors import GatewayError
from kvplane.router.evidence import MOST_ATTEMPTS, MOST_REFUSED, Ledger, Meeting, stage_records
from kvplane.router.meeting import Trail
from kvplane.router.remembered import Leg, Party, Why
from kvplane.vocabulary import MEETING, Room, Stage, StageRecord


def meeting(*rooms: int, request: str = "r", attempt: int = 1) -> Meeting:
    numbers = tuple(map(Room, rooms))
    return Meeting(request, attempt, "/generate", "tiny", numbers, Party("p1"), Party("d1"), Why())


def record(room: int, stage: Stage, outcome: str = "ok", by: str = "d1") -> StageRecord:
    return StageRecord(Room(room), stage, outcome, 0.1, "", by, 1.0)


def shown(ledger: Ledger, room: int) -> dict[str, Any]:
    found = ledger.room(Room(room))
    assert found is not None
    return found


def test_a_room_shows_its_stages_in_order_and_its_number_as_text() -> None:
    ledger = Ledger(FakeClock())
    ledger.open(meeting(2**63 - 1))
    for stage in (Stage.CONSUME, Stage.REGISTER, Stage.VERIFY):
        assert ledger.record(record(2**63 - 1, stage))
    found = shown(ledger, 2**63 - 1)
    assert found["room"] == "9223372036854775807"
    assert [stage["stage"] for stage in found["stages"]] == ["register", "verify", "consume"]


def walked(clock: FakeClock) -> Trail:
    """A trail whose stages took 1, 2, 3 and 4 seconds."""
    trail = Trail(clock.now)
    for seconds, stage in enumerate(
        (Stage.POOL, Stage.AVAILABILITY, Stage.POLICY_INPUT, Stage.PAIR), start=1
    ):
        trail.begin(stage)
        clock.advance(seconds)
    trail.begin(Stage.FIRST_BYTE)
    return trail


def test_the_gateways_own_stages_follow_one_another_and_add_up_to_the_whole() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    began = clock.wall()
    one = ledger.open(meeting(1), walked(clock))
    clock.advance(5)
    one.began(clock.now())
    clock.advance(6)
    ledger.close(one, "ok")
    found = shown(ledger, 1)
    assert (found["opened_at"], found["first_byte_s"], found["duration_s"]) == (began, 15, 21)
    stages = found["stages"]
    assert [stage["duration_s"] for stage in stages] == [1, 2, 3, 4, 5, 6]
    assert sum(stage["duration_s"] for stage in stages) == found["duration_s"]
    for before, after in pairwise(stages):
        assert before["begin_s"] + before["duration_s"] == after["begin_s"]
    assert {(stage["by"], stage["outcome"]) for stage in stages} == {("gateway", "ok")}
    assert stages[-1]["at"] == began + 21


@pytest.mark.parametrize(
    ("outcome", "last"),
    [("failed", "failed"), ("rejected", "failed"), ("client_gone", "client gone"), ("ok", "ok")],
)
def test_the_stage_an_attempt_ends_in_has_its_outcome_and_why(outcome: str, last: str) -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    one = ledger.open(meeting(1), walked(clock))
    ledger.close(one, outcome, {"message": "prefill p1: cut"})
    stages = shown(ledger, 1)["stages"]
    assert [stage["outcome"] for stage in stages] == ["ok"] * 4 + [last]
    assert (stages[-1]["detail"] == "prefill p1: cut") is (last == "failed")


def test_an_open_attempt_says_where_it_is_since_when_and_whom_it_waits_for() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    ledger.open(meeting(1), walked(clock))
    ledger.record(record(1, Stage.RESOLVE_RANK))
    clock.advance(7)
    found = shown(ledger, 1)
    assert found["current"] == {
        "stage": "first-byte",
        "for_s": 7,
        "waits_for": {"prefill": "p1", "decode": "d1"},
        "last_told": "resolve-rank",
    }
    last = found["stages"][-1]
    assert (last["stage"], last["outcome"], last["duration_s"]) == ("first-byte", "open", 7)


def test_what_no_engine_tells_is_marked_and_never_inferred() -> None:
    ledger = Ledger(FakeClock())
    one = ledger.open(meeting(1))
    one.silent = ("sglang",)
    ledger.close(one, "ok")
    one.collected = True
    stages = shown(ledger, 1)["stages"]
    assert [stage["stage"] for stage in stages] == [stage.value for stage in MEETING]
    assert {stage["outcome"] for stage in stages} == {"not observed"}
    assert {stage["detail"] for stage in stages} == {"sglang tells nothing of it"}
    ledger.record(record(1, Stage.CONNECT))
    told = {stage["stage"]: stage["outcome"] for stage in shown(ledger, 1)["stages"]}
    assert told["connect"] == "ok" and told["resolve-rank"] == told["verify"] == "not observed"


def test_what_can_be_seen_of_both_legs_is_shown_whoever_made_the_engines() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    one = ledger.open(meeting(1))
    clock.advance(2)
    one.prefill_ended = clock.now()
    one.prefill_leg, one.decode_leg = Leg(200, 17, True), Leg(0, 0, False, "no connection")
    legs = shown(ledger, 1)["legs"]
    assert legs["prefill"] == {
        "status": 200, "bytes": 17, "complete": True, "error": None, "end_s": 2,
    }  # fmt: skip
    assert (legs["decode"]["status"], legs["decode"]["error"]) == (None, "no connection")


def test_a_stage_told_twice_is_one_and_an_unknown_room_none() -> None:
    ledger = Ledger(FakeClock())
    ledger.open(meeting(1))
    assert ledger.record(record(1, Stage.VERIFY))
    assert not ledger.record(record(1, Stage.VERIFY))
    assert ledger.record(record(1, Stage.VERIFY, by="p1"))
    assert not ledger.record(record(2, Stage.VERIFY))


def test_the_ring_is_bounded_in_rooms_and_forgets_the_oldest() -> None:
    ledger = Ledger(FakeClock(), most=10)
    for number in range(100):
        ledger.open(meeting(2 * number + 1, 2 * number + 2, request=f"r{number}"))
    assert len(ledger) == 5
    assert ledger.room(Room(1)) is None
    assert ledger.request("r0") is None
    assert ledger.room(Room(200)) is not None
    assert len(ledger._by_room) == 10
    assert len(ledger._by_request) == 5


@pytest.mark.parametrize("seed", range(20))
def test_whoever_asks_in_between_finds_what_one_who_never_asked_would(seed: int) -> None:
    """Names are given when somebody asks: asking more often changes nothing that is found."""
    chance, clock = random.Random(seed), FakeClock()
    asked, unasked = Ledger(clock, most=12), Ledger(clock, most=12)
    for number in range(60):
        name, rooms = f"r{chance.randrange(9)}", chance.sample(range(1, 99), chance.randrange(4))
        clock.advance(1)
        for ledger in (asked, unasked):
            if rooms or number % 3:
                ledger.open(meeting(*rooms, request=name))
            else:
                refusal(ledger, clock, name, GatewayError("no_prefill_available", "none"))
        if chance.random() < 0.4:
            asked.room(Room(chance.randrange(99)))
            asked.request(name)
    for room in range(99):
        assert asked.room(Room(room)) == unasked.room(Room(room))
    for at in range(9):
        assert asked.request(f"r{at}") == unasked.request(f"r{at}")
    assert (asked._by_room, asked._by_request.keys()) == (
        {room: one for one in asked.meetings()[::-1] for room in one.rooms},
        {one.request_id for one in (*asked.meetings(), *asked.refusals())},
    )


def test_what_nobody_asks_for_is_named_nowhere() -> None:
    ledger = Ledger(FakeClock(), most=10)
    for number in range(1, 100):
        ledger.open(meeting(number, request=f"r{number}"))
    assert (ledger._by_room, ledger._by_request) == ({}, {})
    assert shown(ledger, 95)["request_id"] == "r95" and ledger.room(Room(50)) is None
    assert len(ledger._by_room) == len(ledger._by_request) == 10


def refusal(ledger: Ledger, clock: FakeClock, name: str, error: GatewayError) -> None:
    trail = Trail(clock.now)
    trail.begin(Stage.POLICY_INPUT)
    trail.begin(Stage.POOL)
    bare = Meeting(name, 1, "/generate", "tiny", (), None, None, None)
    ledger.refuse(bare, trail, error)


@pytest.mark.parametrize(
    ("error", "outcome", "stage"),
    [
        (GatewayError("no_prefill_available", "none", at=Stage.AVAILABILITY), "failed",
         "availability"),
        (GatewayError("no_prefill_available", "lost", stage="register"), "failed", "register"),
        (GatewayError("no_prefill_available", "empty", at=Stage.POOL), "failed", "worker-pool"),
        (GatewayError("model_not_found", "no model"), "rejected", "worker-pool"),
    ],
)  # fmt: skip
def test_a_request_for_which_nobody_was_chosen_is_remembered_with_the_stage_it_ended_in(
    error: GatewayError, outcome: str, stage: str
) -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    refusal(ledger, clock, "r", error)
    found = ledger.request("r")
    assert found is not None and found["outcome"] == outcome
    (attempt,) = found["attempts"]
    last = attempt["stages"][""][-1]
    assert (last["stage"], last["outcome"], last["detail"]) == (stage, "failed", error.message)
    assert ledger.rooms() == [] and ledger.open_rooms == 0


def test_a_flood_of_refusals_is_bounded_and_pushes_no_room_out() -> None:
    clock = FakeClock()
    ledger = Ledger(clock, most=10)
    ledger.open(meeting(1, request="kept"))
    for number in range(MOST_REFUSED + 100):
        refusal(ledger, clock, f"r{number}", GatewayError("no_prefill_available", "none"))
    assert ledger.room(Room(1)) is not None
    assert len(ledger._by_request) == MOST_REFUSED + 1
    newest = [one.request_id for one in ledger.refusals(2)]
    assert newest == [f"r{MOST_REFUSED + 99}", f"r{MOST_REFUSED + 98}"]


def test_the_first_word_on_the_outcome_stands_and_time_is_counted() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    one = ledger.open(meeting(1))
    heard: list[Meeting] = []
    ledger.on_close.append(heard.append)
    assert ledger.open_rooms == 1
    clock.advance(2)
    ledger.close(one, "failed", {"code": "prefill_failed"})
    ledger.close(one, "ok")
    found = shown(ledger, 1)
    assert (found["outcome"], found["duration_s"]) == ("failed", 2)
    assert ledger.open_rooms == 0 and heard == [one]


def test_rooms_come_newest_first_and_only_the_failed_where_asked() -> None:
    ledger = Ledger(FakeClock())
    for number in range(1, 6):
        one = ledger.open(meeting(number))
        ledger.close(one, "failed" if number % 2 else "ok")
    assert [room["room"] for room in ledger.rooms(2)] == ["5", "4"]
    assert [room["room"] for room in ledger.rooms(9, failed=True)] == ["5", "3", "1"]
    assert [room["room"] for room in ledger.rooms(9, failed=False)] == ["4", "2"]


def test_attempts_come_newest_first_with_those_for_which_nobody_was_chosen() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    for number in range(1, 4):
        clock.advance(1)
        ledger.close(ledger.open(meeting(number, request=f"r{number}")), "ok")
        clock.advance(1)
        refusal(ledger, clock, f"x{number}", GatewayError("no_prefill_available", "none"))
    named = [one["request_id"] for one in ledger.attempts(4)]
    assert named == ["x3", "r3", "x2", "r2"]
    assert [one["request_id"] for one in ledger.attempts(9, failed=True)] == ["x3", "x2", "x1"]
    assert [one["request_id"] for one in ledger.attempts(9, failed=False)] == ["r3", "r2", "r1"]


def test_a_request_shows_all_its_attempts() -> None:
    ledger = Ledger(FakeClock())
    ledger.close(ledger.open(meeting(1, request="r")), "failed")
    ledger.close(ledger.open(meeting(2, request="r", attempt=2)), "ok")
    found = ledger.request("r")
    assert found is not None
    assert (found["outcome"], len(found["attempts"])) == ("ok", 2)
    assert list(found["attempts"][1]["stages"]) == ["2"]


async def test_a_reader_waits_for_what_the_engines_tell_but_not_for_ever() -> None:
    ledger = Ledger(FakeClock())
    one = ledger.open(meeting(1))
    answers, asked = asyncio.Event(), []

    async def ask(about: Meeting) -> None:
        asked.append(about)
        await answers.wait()
        ledger.record(record(1, Stage.CONSUME))
        about.collected = True

    ledger.ask = ask
    ledger.close(one, "ok")
    found = await ledger.settled(Room(1), 0.01)
    assert found is not None and not found["collected"] and found["stages"] == []
    answers.set()
    found = await ledger.settled(Room(1), 60)
    assert found is not None and found["collected"]
    assert [stage["stage"] for stage in found["stages"] if stage["outcome"] == "ok"] == ["consume"]
    await ledger.settled(Room(1), 60)
    assert len(asked) == 2, "what is known is not asked for again"
    assert await ledger.settled(Room(3), 60) is None
    assert await ledger.settled_request("r", 60) is not None
    assert await ledger.settled_request("unknown", 60) is None


async def test_one_id_for_very_many_requests_shows_and_asks_of_the_newest_only() -> None:
    ledger, asked = Ledger(FakeClock()), list[Meeting]()

    async def ask(one: Meeting) -> None:
        asked.append(one)

    ledger.ask = ask
    for number in range(1, 1001):
        ledger.close(ledger.open(meeting(number)), "ok")
    found = await ledger.settled_request("r", 60)
    assert found is not None and len(found["attempts"]) == len(asked) == MOST_ATTEMPTS
    assert found["attempts"][-1]["rooms"] == ["1000"]


def test_what_an_engine_tells_that_is_no_stage_of_a_meeting_is_left_out() -> None:
    good = {"stage": "verify", "outcome": "ok", "duration_s": 0.5, "by": "e", "at": 7}
    told: list[Any] = [
        good,
        {"stage": "dance", "outcome": "ok", "duration_s": 1},
        {"stage": "pair", "outcome": "ok", "duration_s": 1},
        {"stage": []},
        {"stage": "verify"},
        {"stage": "verify", "outcome": "ok", "duration_s": "x"},
        5,
        None,
    ]
    found = list(stage_records(Room(1), told, "d1"))
    assert found == [StageRecord(Room(1), Stage.VERIFY, "ok", 0.5, "", "e", 7.0)]
    assert list(stage_records(Room(1), {"no": "list"}, "d1")) == []


@pytest.mark.parametrize(("off_s", "begin_s"), [(0, 1.0), (3, 4.0), (86400, None), (-86400, 0.0)])
def test_an_engine_whose_clock_is_far_off_began_nothing_after_the_end(
    off_s: float, begin_s: float | None
) -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    one = ledger.open(meeting(1), Trail(clock.now, Stage.FIRST_BYTE, clock.now()))
    clock.advance(2)
    at = one.opened_at + 1.5 + off_s
    ledger.record(StageRecord(Room(1), Stage.VERIFY, "ok", 0.5, "", "d1", at))
    ledger.close(one, "ok")
    told = next(stage for stage in shown(ledger, 1)["stages"] if stage["stage"] == "verify")
    assert (told["begin_s"], told["duration_s"], told["at"]) == (begin_s, 0.5, at)


NO_TIMES = ["nan", "inf", "-inf", "1e300", -0.1, -1e308, 10**400]


@pytest.mark.parametrize("wrong", NO_TIMES, ids=lambda told: str(told)[:8])
@pytest.mark.parametrize("name", ["duration_s", "at"])
def test_what_is_no_time_is_no_stage_and_spoils_no_histogram(name: str, wrong: object) -> None:
    good = {"stage": "verify", "outcome": "ok", "duration_s": 0.5, "at": 7.0}
    found = list(stage_records(Room(1), [good | {name: wrong}, good], "d1"))
    assert found == [StageRecord(Room(1), Stage.VERIFY, "ok", 0.5, "", "d1", 7.0)]

"""Evidence: bounded, merged by stage, and patient for a moment."""

from __future__ import annotations

import asyncio
from typing import Any

from kit.clock import FakeClock

from kvplane.router.evidence import Ledger, Meeting, stage_records
from kvplane.vocabulary import Room, Stage, StageRecord


def meeting(*rooms: int, request: str = "r", attempt: int = 1) -> Meeting:
    side = {"worker": "p1"}
    numbers = tuple(map(Room, rooms))
    return Meeting(request, attempt, "/generate", "tiny", numbers, side, side, {})


def record(room: int, stage: Stage, outcome: str = "ok", by: str = "d1") -> StageRecord:
    return StageRecord(Room(room), stage, outcome, 0.1, "", by, 1.0)


def test_a_room_shows_its_stages_in_order_and_its_number_as_text() -> None:
    ledger = Ledger(FakeClock())
    ledger.open(meeting(2**63 - 1))
    for stage in (Stage.CONSUME, Stage.REGISTER, Stage.VERIFY):
        assert ledger.record(record(2**63 - 1, stage))
    found = ledger.room(Room(2**63 - 1))
    assert found is not None
    assert found["room"] == "9223372036854775807"
    assert [stage["stage"] for stage in found["stages"]] == ["register", "verify", "consume"]


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


def test_the_first_word_on_the_outcome_stands_and_time_is_counted() -> None:
    clock = FakeClock()
    ledger = Ledger(clock)
    one = ledger.open(meeting(1))
    assert ledger.open_rooms == 1
    clock.advance(2)
    ledger.close(one, "failed", {"code": "prefill_failed"})
    ledger.close(one, "ok")
    found = ledger.room(Room(1))
    assert found is not None
    assert (found["outcome"], found["duration_s"]) == ("failed", 2)
    assert ledger.open_rooms == 0


def test_rooms_come_newest_first_and_only_the_failed_where_asked() -> None:
    ledger = Ledger(FakeClock())
    for number in range(1, 6):
        one = ledger.open(meeting(number))
        ledger.close(one, "failed" if number % 2 else "ok")
    assert [room["room"] for room in ledger.rooms(2)] == ["5", "4"]
    assert [room["room"] for room in ledger.rooms(9, failed=True)] == ["5", "3", "1"]
    assert [room["room"] for room in ledger.rooms(9, failed=False)] == ["4", "2"]


def test_a_request_shows_all_its_attempts() -> None:
    ledger = Ledger(FakeClock())
    ledger.close(ledger.open(meeting(1, request="r")), "failed")
    ledger.close(ledger.open(meeting(2, request="r", attempt=2)), "ok")
    found = ledger.request("r")
    assert found is not None
    assert (found["outcome"], len(found["attempts"])) == ("ok", 2)
    assert list(found["attempts"][1]["stages"]) == ["2"]


async def test_a_reader_waits_for_what_is_being_collected_but_not_for_ever() -> None:
    ledger = Ledger(FakeClock())
    one = ledger.open(meeting(1))
    found = await ledger.settled(Room(1), 60)  # still open: nothing to wait for
    assert found is not None
    ledger.close(one, "ok")
    waiting = asyncio.create_task(ledger.settled(Room(1), 60))
    await asyncio.sleep(0)
    ledger.record(record(1, Stage.CONSUME))
    one.collected.set()
    found = await waiting
    assert found is not None
    assert (len(found["stages"]), found["collected"]) == (1, True)
    late = ledger.open(meeting(2))
    ledger.close(late, "ok")
    found = await ledger.settled(Room(2), 0.01)
    assert found is not None
    assert not found["collected"]
    assert await ledger.settled(Room(3), 60) is None


def test_what_an_engine_tells_that_is_no_stage_is_left_out() -> None:
    good = {"stage": "verify", "outcome": "ok", "duration_s": 0.5, "by": "e", "at": 7}
    told: list[Any] = [
        good,
        {"stage": "dance", "outcome": "ok", "duration_s": 1},
        {"stage": "verify"},
        {"stage": "verify", "outcome": "ok", "duration_s": "x"},
        5,
        None,
    ]
    found = list(stage_records(Room(1), told, "d1"))
    assert found == [StageRecord(Room(1), Stage.VERIFY, "ok", 0.5, "", "e", 7.0)]
    assert list(stage_records(Room(1), {"no": "list"}, "d1")) == []

"""Availability: who is left out, and that the last one never is."""

from __future__ import annotations

import pytest

from kvplane.router.availability import AllShut, available, candidates
from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.fleet import Fleet
from kvplane.router.foretold import Depth
from kvplane.router.settings import BreakerSettings, FleetSettings
from kvplane.router.target import Target
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

P1, P2, P3 = (Worker(Pod(name)) for name in ("p1", "p2", "p3"))
SETTINGS = FleetSettings(stuck_requests=2, stuck_s=30, ramp_s=10, ramp_least=0.1)


def fleet_of(*names: str, now: float = 0.0) -> Fleet:
    fleet = Fleet(SETTINGS)
    for name in names:
        fleet.up(WorkerUp(Pod(name), f"http://{name}:1", Role.PREFILL, model="tiny"), now)
    return fleet


def shut(*workers: Worker, **settings: float) -> Breakers:
    breakers = Breakers(BreakerSettings(faults=1, **settings))  # type: ignore[arg-type]
    for worker in workers:
        ticket = breakers.of(worker).admit(0.0)
        assert ticket is not None
        breakers.of(worker).book(ticket, Outcome.FAULT, 0.0)
    return breakers


def asked(fleet: Fleet, breakers: Breakers, now: float, *without: Worker) -> str:
    found = available(fleet.targets(), breakers, SETTINGS, now, without)
    return " ".join(target.name for target in found)


def test_all_of_them_where_nothing_is_wrong() -> None:
    assert asked(fleet_of("p1", "p2"), Breakers(), 0.0) == "p1 p2"


def test_open_circuits_are_left_out() -> None:
    assert asked(fleet_of("p1", "p2", "p3"), shut(P2), 0.0) == "p1 p3"


def test_the_guilty_are_left_out_unless_nobody_else_is_there() -> None:
    fleet = fleet_of("p1", "p2")
    assert asked(fleet, Breakers(), 0.0, P1) == "p2"
    assert asked(fleet, Breakers(), 0.0, P1, P2) == "p1 p2"
    assert asked(fleet, shut(P2), 0.0, P1) == "p1"


def test_where_all_circuits_are_open_the_first_is_tried_after_the_short_pause() -> None:
    fleet, breakers = fleet_of("p1", "p2"), shut(P1, P2, pause_s=60.0)
    with pytest.raises(AllShut) as caught:
        asked(fleet, breakers, 0.25)
    error = caught.value
    assert (error.code, error.status, error.alone) == ("no_prefill_available", 503, False)
    assert error.wait_s == pytest.approx(0.75) and error.retry_after == "1"
    assert asked(fleet, breakers, 1.0) == "p1 p2"


def test_a_short_pause_that_is_over_is_not_waited_for() -> None:
    """Nobody asked while it ran."""
    assert asked(fleet_of("p1"), shut(P1, pause_s=60.0), 5.0) == "p1"


def test_one_alone_says_so() -> None:
    with pytest.raises(AllShut) as caught:
        asked(fleet_of("p1"), shut(P1), 0.0)
    assert caught.value.alone


def test_a_worker_that_is_asked_by_others_keeps_its_long_pause() -> None:
    fleet, breakers = fleet_of("p1", "p2"), shut(P1, pause_s=60.0)
    assert [asked(fleet, breakers, now) for now in (1.0, 59.0, 60.0)] == ["p2", "p2", "p1 p2"]


def loaded(fleet: Fleet, worker: Worker, requests: int) -> Target:
    for _ in range(requests):
        fleet.book(worker, 10)
    target = fleet.target(worker)
    assert target is not None
    return target


def test_a_worker_where_several_wait_and_nothing_happens_is_left_out_until_it_does() -> None:
    fleet = fleet_of("p1", "p2")
    target = loaded(fleet, P1, 2)
    seen = [asked(fleet, Breakers(), now) for now in (100.0, 129.0, 130.0)]
    assert seen == ["p1 p2", "p1 p2", "p2"]
    fleet.answered(target, 131.0)
    assert [asked(fleet, Breakers(), now) for now in (131.0, 160.0)] == ["p1 p2", "p1 p2"]


def test_one_that_asked_to_be_left_alone_is_while_others_serve() -> None:
    fleet = fleet_of("p1", "p2")
    busy = fleet.target(P1)
    assert busy is not None
    busy.busy_until = 5.0
    assert [asked(fleet, Breakers(), now) for now in (4.9, 5.0)] == ["p2", "p1 p2"]
    assert asked(fleet, shut(P2), 4.9) == "p1"


def test_where_all_are_stuck_all_are_asked() -> None:
    fleet = fleet_of("p1", "p2")
    for worker in (P1, P2):
        loaded(fleet, worker, 2)
    assert [asked(fleet, Breakers(), now) for now in (0.0, 500.0)] == ["p1 p2", "p1 p2"]


def test_one_long_prompt_is_no_stuck_worker_and_an_old_silence_does_not_count() -> None:
    fleet = fleet_of("p1", "p2")
    target = loaded(fleet, P1, 1)
    assert [asked(fleet, Breakers(), now) for now in (0.0, 500.0)] == ["p1 p2", "p1 p2"]
    booking = fleet.book(P1, 10)
    asked(fleet, Breakers(), 500.0)
    booking.release()
    assert asked(fleet, Breakers(), 501.0) == "p1 p2"
    loaded(fleet, P1, 1)
    assert asked(fleet, Breakers(), 900.0) == "p1 p2"
    assert target.inflight_requests == 2


def test_a_silence_of_requests_that_left_is_not_held_against_those_that_came() -> None:
    """Nobody was chosen between the first ones' end and the next ones' beginning."""
    fleet = fleet_of("p1", "p2")
    first = [fleet.book(P1, 10) for _ in range(2)]
    assert asked(fleet, Breakers(), 100.0) == "p1 p2"
    for booking in first:
        booking.release()
    loaded(fleet, P1, 2)
    seen = [asked(fleet, Breakers(), now) for now in (131.0, 160.0, 161.0)]
    assert seen == ["p1 p2", "p1 p2", "p2"]


def test_long_answers_that_flow_are_no_stuck_worker() -> None:
    fleet = fleet_of("p1", "p2")
    bookings = [fleet.book(P1, 10) for _ in range(5)]
    for booking in bookings:
        booking.began()
    assert [asked(fleet, Breakers(), now) for now in (0.0, 500.0)] == ["p1 p2", "p1 p2"]
    for booking in bookings:
        booking.release()
    assert [target.waiting_requests for target in fleet.targets()] == [0, 0]


def test_shares_count_beside_somebody_who_has_a_whole_one() -> None:
    fleet = fleet_of("p1", "p2")
    fleet.up(WorkerUp(Pod("p3"), "http://p3:1", Role.PREFILL), 100.0)

    def seen(now: float, targets: tuple[Target, ...]) -> list[float]:
        made = candidates(targets, {P3: Depth(1, 2, 16)}, SETTINGS, now, ramping=True)
        return [round(one.share, 2) for one in made]

    assert seen(105.0, fleet.targets()) == [1, 1, 0.55]
    assert seen(105.0, fleet.targets()[2:]) == [1]
    made = candidates(fleet.targets(), {P3: Depth(1, 2, 16)}, SETTINGS, 105.0)
    assert [(one.share, one.depth_tokens, one.depth_blocks) for one in made][2] == (1.0, 16, 1)


def test_who_may_be_stuck_or_busy_is_looked_at_so_often_that_none_is_asked_too_late() -> None:
    fleet = fleet_of("p1", "p2", "p3")
    waits, busy, uneasy = fleet.book(P1, 10), fleet.target(P2), fleet.uneasy
    assert not uneasy, "one that waits is nothing"
    loaded(fleet, P1, 1)

    def look(now: float) -> tuple[str, bool, float]:
        uneasy.look(now, SETTINGS)
        return " ".join(sorted(target.name for target in uneasy)), uneasy.late, uneasy.again

    assert look(0.0) == look(0.9) == ("p1", False, 1.0)
    assert busy is not None
    uneasy.busy(busy, 5.0)
    assert look(0.9) == ("p1 p2", True, 1.0), "at once"
    assert look(4.9) == look(5.8) == ("p1 p2", True, 5.9)
    assert look(5.9) == ("p1", False, 6.9)
    assert look(29.5) == ("p1", False, 30.0), "not later than it is stuck"
    assert look(30.0) == ("p1", True, 31.0)
    waits.release()
    assert look(31.0) == ("", False, 32.0)
    loaded(fleet, P1, 1)
    assert look(31.5) == ("p1", False, 32.0)
    assert look(32.0) == ("p1", False, 33.0), "the first look since so many wait"
    assert [look(now)[1] for now in (61.9, 62.0)] == [False, True]

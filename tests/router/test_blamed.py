"""Blamed: two things at once, or half a plane: what keeps requests out is told, and once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.rules import held

from kvplane.router.breaker import Breakers
from kvplane.router.diagnosis import Scene, findings
from kvplane.router.discovery import Waiting
from kvplane.router.findings import Finding
from kvplane.router.fleet import Fleet
from kvplane.router.meeting import Meeting
from kvplane.vocabulary import Epoch, Knowledge, Known, Pod, Role, Stage, WorkerUp

EVENTS = ("tcp://p1:5557",)
PREFILL = WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL, model="tiny", events=EVENTS)
DECODE = WorkerUp(Pod("d1"), "http://d1:1", Role.DECODE, model="tiny")
REFUSED = "p1:1 refused the connection"


def plane(*workers: WorkerUp) -> Fleet:
    fleet = Fleet()
    for up in workers:
        fleet.up(up)
    return fleet


def ill(fleet: Fleet, pod: Pod, why: str = "GET /health answered 503") -> None:
    for _ in range(3):
        fleet.mark_health(pod, False, 0.0, why)


def told(fleet: Fleet, **more: Any) -> list[Finding]:
    """What is said, each as its row in the guide has it."""
    whole: dict[str, Any] = {"breakers": Breakers(), "now": 100.0} | more
    whole["known"] = lambda worker: Known(worker, Epoch(1), Knowledge.EXACT, "", 0.0)
    return [held(one) for one in findings(Scene(fleet=fleet, **whole))]


def unchosen(code: str = "no_decode_available") -> Meeting:
    """A request for which nobody could be chosen."""
    made = Meeting("r9", 1, "/generate", "tiny", (), None, None, None, outcome="failed", begun=98.0)
    made.steps, made.ended = [Stage.POOL, 98.0, Stage.AVAILABILITY, 98.5], 99.0
    made.error = {"code": code, "message": "no decode worker can be used"}
    return made


def test_a_side_that_nobody_named_is_told_before_the_other_one_serves() -> None:
    waits = Waiting(replace(PREFILL, model=""), REFUSED)
    found = told(Fleet(), waiting=[waits])
    assert sorted((one.rule, one.culprit, one.sentence) for one in found) == [
        ("connection-refused", "p1", f"prefill p1 does not serve yet: {REFUSED}"),
        ("pool-empty", "decode pool", "no decode worker is named"),
    ]
    both = Waiting(replace(PREFILL, role=Role.BOTH), REFUSED)
    assert [one.rule for one in told(Fleet(), waiting=[both])] == ["connection-refused"]


def test_a_unified_worker_that_is_ill_is_in_need_of_nobody_else() -> None:
    fleet = plane(replace(PREFILL, role=Role.BOTH))
    assert told(fleet) == []
    ill(fleet, Pod("p1"))
    (one,) = told(fleet)
    assert (one.rule, one.culprit, one.blocks) == ("unhealthy", "p1", True)


def test_that_nobody_could_be_chosen_is_one_thing_with_what_keeps_them() -> None:
    fleet = plane(PREFILL, DECODE)
    ill(fleet, Pod("d1"))
    (one,) = told(fleet, refused=[unchosen(), unchosen()])
    assert (one.rule, one.culprit, one.blocks, one.count) == ("unhealthy", "d1", True, 2)

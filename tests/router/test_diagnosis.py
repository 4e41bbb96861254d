"""Diagnosis: one sentence, one culprit, one next step; silence where nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.diagnosis import STAGES, report, room
from kvplane.router.discovery import Waiting
from kvplane.router.drift import Compared
from kvplane.router.fleet import Fleet
from kvplane.router.settings import BreakerSettings
from kvplane.router.target import Lost
from kvplane.router.verdicts import drifted, silent
from kvplane.vocabulary import Epoch, Knowledge, Known, Pod, Role, Stage, Worker, WorkerUp

P1, D1 = Worker(Pod("p1")), Worker(Pod("d1"))
EVENTS = ("tcp://p1:5557",)


def plane() -> Fleet:
    fleet = Fleet()
    up = WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL, model="tiny", events=EVENTS)
    fleet.up(up)
    fleet.up(WorkerUp(Pod("d1"), "http://d1:1", Role.DECODE, model="tiny"))
    return fleet


def knows(state: Knowledge, reason: str = "") -> Any:
    return lambda worker: Known(worker, Epoch(1), state, reason, 0.0)


exact = knows(Knowledge.EXACT)


def told(fleet: Fleet, known: Any = exact, **more: Any) -> list[tuple[str, str, bool]]:
    found = report(fleet, more.pop("breakers", Breakers()), 0.0, known, **more)
    return [(one["sentence"], one["culprit"], one["blocks"]) for one in found["findings"]]


def test_a_healthy_plane_has_nothing_to_say() -> None:
    assert report(plane(), Breakers(), 0.0, exact) == {
        "ok": True,
        "blocked": False,
        "findings": [],
    }


def test_an_empty_plane_is_blocked() -> None:
    found = report(Fleet(), Breakers(), 0.0, exact)
    assert found["blocked"] and found["findings"][0]["sentence"] == "no worker serves"


def test_a_missing_side_is_named() -> None:
    fleet = plane()
    fleet.down(Pod("d1"))
    said = "model 'tiny': no decode worker is registered"
    assert told(fleet) == [(said, "decode pool", True)]


def test_an_unhealthy_worker_is_named_with_its_reason() -> None:
    fleet = plane()
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 0.0, "GET /health answered 503")
    sentences = [sentence for sentence, _, _ in told(fleet)]
    assert "prefill p1 is unhealthy: GET /health answered 503" in sentences


def test_a_prefill_that_cannot_be_found_is_named_with_stage_and_address() -> None:
    fleet = plane()
    fleet.mark_lost(Pod("p1"), Lost(Stage.REGISTER, "no bootstrap server at p1:8998: refused"))
    sentences = [sentence for sentence, _, _ in told(fleet)]
    said = "no decode can find prefill p1: register: no bootstrap server at p1:8998: refused"
    assert said in sentences


def test_an_open_circuit_is_named() -> None:
    breakers = Breakers(BreakerSettings(faults=1))
    ticket = breakers.of(P1).admit(0.0)
    assert ticket is not None
    breakers.of(P1).book(ticket, Outcome.FAULT, 0.0)
    assert told(plane(), breakers=breakers) == [
        ("prefill p1 failed too often: its circuit is open", "p1", True)
    ]


def test_a_drained_worker_is_the_operators_doing_and_its_side_is_missing() -> None:
    fleet = plane()
    fleet.drain(Pod("p1"))
    found = told(fleet)
    assert ("prefill p1 is drained by hand: 0 under way", "operator", False) in found
    assert found[0][2], "what blocks comes first"


@pytest.mark.parametrize(
    ("known", "sentence"),
    [
        (lambda worker: None, "nothing was heard of the KV events of p1"),
        (knows(Knowledge.DARK, "silent for 60 s"), "knowledge of p1 is dark: silent for 60 s"),
        (knows(Knowledge.PARTIAL, "gap 8..10"), "knowledge of p1 is partial: gap 8..10"),
    ],
)
def test_a_stream_that_cannot_be_believed_is_named(known: Any, sentence: str) -> None:
    assert told(plane(), known) == [(sentence, "p1", False)]


def test_a_store_that_does_not_answer_is_named_and_blocks_nothing() -> None:
    said = "the index store does not answer since 4 s"
    assert told(plane(), store_down_s=4.2) == [(said, "index store", False)]
    assert told(plane(), store_down_s=0.9) == []


def test_drift_is_named_with_its_cause_beside_what_ingest_says() -> None:
    wrong = [Compared(0.0, 96, 0, over=96)]
    found = told(plane(), drift=lambda worker: drifted(worker, wrong, wrong))
    assert len(found) == 1
    sentence, culprit, blocks = found[0]
    assert sentence.startswith("unknown: index says 96 tokens, p1 found 0")
    assert (culprit, blocks) == ("p1", False)
    partial = told(plane(), knows(Knowledge.PARTIAL, "gap"), drift=lambda w: drifted(w, wrong, []))
    assert [one[0] for one in partial][1] == "knowledge of p1 is partial: gap"


def test_a_silent_stream_is_one_finding_whatever_ingest_says() -> None:
    for state in Knowledge:
        found = told(plane(), knows(state, "as told"), drift=lambda worker: silent(worker, 100, 9))
        assert [one[1] for one in found] == ["event stream of p1"]
        assert "p1 served 100 requests" in found[0][0]


def test_a_prefill_without_events_is_named() -> None:
    fleet = plane()
    fleet.up(WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL, model="tiny"))
    assert told(fleet)[0][0] == "prefill p1 publishes no KV events: it is chosen by load alone"


def test_a_worker_that_does_not_answer_is_named() -> None:
    one = Waiting(WorkerUp(Pod("p9"), "http://p9:1", Role.PREFILL), "connection refused")
    said = "prefill p9 does not serve yet: connection refused"
    assert told(plane(), waiting=[one]) == [(said, "p9", True)]


# Rooms ------------------------------------------------------------------------------------------


def failed_room(stages: list[dict[str, Any]], **error: Any) -> dict[str, Any]:
    return {
        "room": "71",
        "request_id": "r1",
        "prefill": {"worker": "p2"},
        "decode": {"worker": "d1"},
        "outcome": "failed",
        "error": error or None,
        "stages": stages,
    }


def stage(name: str, outcome: str = "ok", **more: Any) -> dict[str, Any]:
    return {"stage": name, "outcome": outcome, "duration_s": 0.1, "by": "d1", **more}


def test_every_stage_has_a_culprit_and_a_next_step() -> None:
    assert set(STAGES) == set(Stage)
    for name in Stage:
        finding = room(failed_room([stage(name, "failed", detail="boom")]))
        assert finding.sentence == f"room 71: stage {name} failed at d1: boom"
        assert finding.culprit == ("d1" if name is Stage.CONSUME else "p2")
        assert finding.next_step


def test_the_first_failed_stage_is_the_one() -> None:
    stages = [stage("connect"), stage("verify", "failed", detail="a"), stage("consume", "failed")]
    assert "stage verify failed" in room(failed_room(stages)).sentence


def test_without_a_failed_stage_the_leg_that_failed_is_named_and_how_far_it_came() -> None:
    finding = room(failed_room([stage("connect")], message="decode d1: cut", side="decode"))
    assert finding.sentence == "room 71: decode d1: cut (last stage seen: connect)"
    assert finding.culprit == "d1"


def test_a_room_without_any_evidence_says_so() -> None:
    finding = room(failed_room([]))
    assert finding.sentence == "room 71: no reason given (no stage was seen)"
    assert finding.culprit == "unknown"


def test_failed_rooms_are_told_but_do_not_block_the_plane() -> None:
    rooms = [failed_room([]) for _ in range(50)]
    found = report(plane(), Breakers(), 0.0, exact, failed_rooms=rooms)
    assert not found["ok"] and not found["blocked"] and len(found["findings"]) == 20

"""Blamed: two things at once, or half a plane: what keeps requests out is told, and once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.rules import held

from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.diagnosis import Scene, findings
from kvplane.router.discovery import Waiting
from kvplane.router.findings import Finding
from kvplane.router.fleet import Fleet
from kvplane.router.meeting import Meeting
from kvplane.router.remembered import Party
from kvplane.router.settings import BreakerSettings
from kvplane.vocabulary import (
    Epoch,
    Knowledge,
    Known,
    Pod,
    Role,
    Room,
    Stage,
    StageRecord,
    Worker,
    WorkerUp,
)

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


def attempt(number: int, outcome: str = "failed", ended: float = 99.0, **error: Any) -> Meeting:
    """One attempt of p1 and d1; the newest has the largest number."""
    parties = Party("p1", "http://p1:1"), Party("d1", "http://d1:1")
    made = Meeting(
        f"r{number}", 1, "/generate", "tiny", (Room(number),), *parties, None, outcome=outcome,
        begun=98.0, ended=ended, error=error or None, stopped="no attempts left",
    )  # fmt: skip
    made.steps = [Stage.POOL, 98.0, Stage.FIRST_BYTE, 98.5]
    return made


def no(status: int, side: str = "decode") -> dict[str, Any]:
    name = "d1" if side == "decode" else "p1"
    message = f"{side} {name} answered {status}: no"
    return {"code": "invalid_request", "message": message, "side": side, "status": status}


@pytest.mark.parametrize(
    ("status", "side", "rule", "culprit"),
    [
        (404, "decode", "no-such-route", "d1"), (405, "prefill", "no-such-route", "p1"),
        (401, "prefill", "key-refused", "p1"), (403, "decode", "key-refused", "d1"),
        (429, "decode", "full", "d1"),
    ],
)  # fmt: skip
def test_a_worker_that_refuses_all_it_is_asked_is_no_engine_or_wants_a_key(
    status: int, side: str, rule: str, culprit: str
) -> None:
    refused = [attempt(number, "rejected", **no(status, side)) for number in (3, 2, 1)]
    fleet = plane(PREFILL, DECODE)
    (one,) = told(fleet, meetings=refused)
    assert (one.rule, one.culprit, one.blocks, one.count) == (rule, culprit, True, 3)
    assert f"answered {status}: no" in one.sentence and one.rooms == ("3", "2", "1")
    for made in refused:
        made.stopped = ""
    assert not told(fleet, meetings=refused)[0].blocks, "others took them"
    assert told(fleet, meetings=refused[1:]) == [], "two may be two callers' mistakes"
    assert told(fleet, meetings=[attempt(4, "ok"), *refused]) == [], "it answers others"
    assert told(fleet, meetings=[*refused, attempt(0, "ok")]) != [], "it did, and does no more"
    mistakes = [attempt(number, "rejected", **no(400, side)) for number in (3, 2, 1)]
    assert told(fleet, meetings=mistakes) == [], "bad requests are their callers'"


def test_a_worker_away_blocks_nothing_that_a_pair_or_a_unified_worker_does_for_it() -> None:
    both = replace(PREFILL, pod=Pod("u1"), role=Role.BOTH)
    for there, away in (
        ((PREFILL, DECODE), both), ((both,), PREFILL), ((both,), DECODE),
    ):  # fmt: skip
        (one,) = told(plane(*there), waiting=[Waiting(away, REFUSED)])
        assert (one.rule, one.blocks) == ("connection-refused", False)
        fleet = plane(*there, away)
        ill(fleet, away.pod)
        (one,) = told(fleet)
        assert (one.rule, one.culprit, one.blocks) == ("unhealthy", str(away.pod), False)
    (one,) = told(plane(DECODE), waiting=[Waiting(both, REFUSED)])
    assert one.blocks, "a decode alone does nothing"


def test_a_unified_worker_that_was_named_as_a_prefill_keeps_nobody_out() -> None:
    fleet = plane(replace(PREFILL, role=Role.BOTH), DECODE)
    (one,) = told(fleet, declared={Pod("p1"): PREFILL})
    assert (one.rule, one.blocks) == ("wrong-role", False)
    ill(fleet, Pod("p1"))
    assert all(one.blocks for one in told(fleet, declared={Pod("p1"): PREFILL}))


def test_a_prefill_that_waited_for_a_decode_which_never_came_is_not_to_blame() -> None:
    made = attempt(71, code="deadline_exceeded", message="30 s", side="decode", leg="TimedOut")
    detail = "cancelled while waiting for its bind of decode of room 71"
    record = StageRecord(Room(71), Stage.CONNECT, "failed", 9.0, detail, "prefill@p1", 1.0)
    made.stages = {Room(71): [record]}
    (one,) = told(plane(PREFILL, DECODE), meetings=[made])
    assert (one.rule, one.stage, one.culprit) == ("connect-failed", Stage.CONNECT, "d1")
    assert "decode's log" in one.next_step


def test_attempts_that_failed_at_workers_which_are_all_down_are_one_thing_with_that() -> None:
    first = attempt(1, stage="verify", message="m", side="prefill", code="transfer_failed")
    second = attempt(2, stage="consume", message="m", side="decode", code="transfer_failed")
    second.request_id, second.attempt, first.stopped = first.request_id, 2, ""
    fleet = plane(PREFILL, DECODE)
    rules = [one.rule for one in told(fleet, meetings=[second, first])]
    assert sorted(rules) == ["consume-failed", "retries-used-up", "verify-failed"]
    ill(fleet, Pod("p1"))
    ill(fleet, Pod("d1"))
    found = told(fleet, meetings=[second, first])
    assert sorted((one.culprit, one.rule, one.count, one.rooms) for one in found) == [
        ("d1", "unhealthy", 1, ("2",)), ("p1", "unhealthy", 1, ("1",)),
    ]  # fmt: skip


def test_one_whose_circuit_is_open_fails_nobody_while_others_serve() -> None:
    failed = attempt(1, stage="consume", message="m", side="decode", code="transfer_failed")
    breakers = Breakers(BreakerSettings(faults=1))
    ticket = breakers.of(Worker(Pod("d1"))).admit(100.0)
    assert ticket is not None
    breakers.of(Worker(Pod("d1"))).book(ticket, Outcome.FAULT, 100.0)
    other = replace(DECODE, pod=Pod("d2"), url="http://d2:1")
    found = told(plane(PREFILL, DECODE, other), meetings=[failed], breakers=breakers)
    assert sorted((one.rule, one.blocks) for one in found) == [
        ("circuit-open", False), ("consume-failed", False),
    ]  # fmt: skip
    found = told(plane(PREFILL, DECODE), meetings=[failed], breakers=breakers)
    assert all(one.blocks for one in found), "nobody else is there"


def test_a_side_that_nobody_named_is_told_before_the_other_one_serves() -> None:
    waits = Waiting(replace(PREFILL, model=""), REFUSED)
    found = told(Fleet(), waiting=[waits])
    assert sorted((one.rule, one.culprit, one.sentence) for one in found) == [
        ("connection-refused", "p1", f"prefill p1 does not serve yet: {REFUSED}"),
        ("pool-empty", "decode pool", "no decode worker is named"),
    ]
    both = Waiting(replace(PREFILL, role=Role.BOTH), REFUSED)
    assert [one.rule for one in told(Fleet(), waiting=[both])] == ["connection-refused"]


def test_a_worker_that_speaks_no_tls_is_not_told_to_be_started() -> None:
    spoken = Waiting(PREFILL, "p1:1 cannot be reached: TLS: WRONG_VERSION_NUMBER")
    (one,) = told(plane(DECODE), waiting=[spoken])
    assert (one.rule, one.culprit) == ("connection-refused", "p1") and "https only" in one.next_step


def test_sides_that_serve_different_models_are_told_though_all_are_well() -> None:
    found = told(
        plane(PREFILL, replace(DECODE, model="big")),
        declared={Pod("p1"): PREFILL, Pod("d1"): DECODE},
    )
    assert all(one.blocks and one.rule == "pool-empty" for one in found)
    assert sorted((one.culprit, one.sentence) for one in found) == [
        ("decode pool", "model 'tiny': no decode worker is named (decodes that are serve 'big')"),
        (
            "prefill pool",
            "model 'big': no prefill worker is named (prefills that are serve 'tiny')",
        ),
    ]


def test_a_worker_that_tells_no_model_serves_all_of_them() -> None:
    assert told(plane(PREFILL, replace(DECODE, model=""))) == []
    assert told(plane(replace(PREFILL, model=""), replace(DECODE, model=""))) == []


@pytest.mark.parametrize("detail", ["its own checksum does not fit", "body size does not fit"])
def test_a_frame_that_was_damaged_is_no_difference_of_shapes(detail: str) -> None:
    made = attempt(71, code="transfer_failed", message="m", side="decode", stage="verify")
    made.stages = {
        Room(71): [StageRecord(Room(71), Stage.VERIFY, "failed", 0.1, detail, "d1", 1.0)]
    }
    (one,) = told(plane(PREFILL, DECODE), meetings=[made])
    assert (one.rule, one.culprit) == ("verify-failed", "p1")


def test_a_gateway_in_which_requests_wait_for_a_place_is_full() -> None:
    fleet = plane(PREFILL, DECODE)
    assert told(fleet, crowd=(512, 0, 100)) == []
    (one,) = told(fleet, crowd=(512, 7, 100))
    assert (one.rule, one.stage, one.culprit, one.blocks) == (
        "gateway-full", Stage.POOL, "gateway", False,
    )  # fmt: skip
    assert "512 requests are under way" in one.sentence and "7 wait and 93 more may" in one.sentence
    (one,) = told(fleet, crowd=(512, 100, 100))
    assert one.blocks and "the next one is answered 429" in one.sentence


def test_where_no_ingest_lives_no_engine_is_blamed_for_events_that_nobody_hears() -> None:
    fleet = plane(PREFILL, replace(PREFILL, pod=Pod("p2")), DECODE)
    scene = Scene(
        fleet, Breakers(), 100.0, lambda worker: None, ingest_lives=False
    )  # nobody ever spoke
    (one,) = map(held, findings(scene))
    assert (one.rule, one.culprit, one.blocks) == ("no-ingest", "ingest", False)
    assert "what 2 workers hold" in one.sentence
    refused = findings(replace(scene, store_refuses="r:1 is full: 2 bytes of maxmemory 1"))
    (one,) = [held(one) for one in refused if one.culprit in ("ingest", "index store")]
    assert (one.rule, one.culprit, one.blocks) == ("store-refuses", "index store", False)
    assert "r:1 is full" in one.sentence
    heard = findings(replace(scene, ingest_lives=True))
    assert [one.rule for one in heard] == ["stream-silent"] * 2
    assert findings(replace(scene, fleet=plane(replace(PREFILL, events=()), DECODE)))[0].rule == (
        "no-events"
    )


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

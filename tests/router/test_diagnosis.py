"""Diagnosis: stage, culprit, one sentence and one next step; silence where nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kit.rules import held

from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.diagnosis import Scene, findings, report
from kvplane.router.directories import Elsewhere
from kvplane.router.discovery import Waiting
from kvplane.router.drift import Compared
from kvplane.router.findings import STAGES, Finding
from kvplane.router.fleet import Fleet
from kvplane.router.meeting import Meeting
from kvplane.router.plans import REASONS
from kvplane.router.remembered import Party, Why
from kvplane.router.settings import BreakerSettings
from kvplane.router.suspicions import Cause
from kvplane.router.target import Lost
from kvplane.router.verdicts import Verdict, drifted, silent
from kvplane.vocabulary import (
    Epoch,
    Knowledge,
    Known,
    Pod,
    Role,
    Room,
    Shape,
    Stage,
    StageRecord,
    Worker,
    WorkerUp,
)

P1, D1 = Worker(Pod("p1")), Worker(Pod("d1"))
EVENTS = ("tcp://p1:5557",)
PREFILL = WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL, model="tiny", events=EVENTS)
DECODE = WorkerUp(Pod("d1"), "http://d1:1", Role.DECODE, model="tiny")


def plane(*more: WorkerUp) -> Fleet:
    fleet = Fleet()
    for up in (PREFILL, DECODE, *more):
        fleet.up(up)
    return fleet


def knows(state: Knowledge, reason: str = "") -> Any:
    return lambda worker: Known(worker, Epoch(1), state, reason, 0.0)


exact = knows(Knowledge.EXACT)


def scene(fleet: Fleet, known: Any = exact, **more: Any) -> Scene:
    whole: dict[str, Any] = {"breakers": Breakers(), "now": 100.0} | more
    return Scene(fleet=fleet, known=known, **whole)


def told(fleet: Fleet, known: Any = exact, **more: Any) -> list[Finding]:
    return [held(one) for one in findings(scene(fleet, known, **more))]


def only(found: list[Finding]) -> tuple[str, Stage, str, bool]:
    (one,) = found
    assert one.sentence and one.next_step
    return one.rule, one.stage, one.culprit, one.blocks


def test_a_healthy_plane_has_nothing_to_say() -> None:
    said = report(scene(plane()))
    assert said == {"ok": True, "blocked": False, "first": None, "findings": []}


# What stands ------------------------------------------------------------------------------------


def test_an_empty_plane_is_blocked() -> None:
    said = report(scene(Fleet()))
    assert said["blocked"] and said["first"]["sentence"] == "no worker is named"
    assert said["first"]["stage"] == "worker-pool" and said["first"]["rule"] == "pool-empty"


def test_a_missing_side_is_named() -> None:
    fleet = plane()
    fleet.down(Pod("d1"))
    assert only(told(fleet)) == ("pool-empty", Stage.POOL, "decode pool", True)


def test_a_worker_that_is_something_else_explains_the_empty_pool() -> None:
    fleet = Fleet()
    fleet.up(DECODE)
    fleet.up(replace(PREFILL, role=Role.DECODE))
    declared = {Pod("p1"): PREFILL, Pod("d1"): DECODE}
    assert only(told(fleet, declared=declared)) == ("wrong-role", Stage.POOL, "p1", True)
    fleet.up(replace(PREFILL, pod=Pod("p2")))
    (one,) = told(fleet, declared=declared)
    assert not one.blocks, "another prefill serves"


def test_an_unhealthy_worker_is_named_with_its_reason_and_blocks_where_it_is_alone() -> None:
    fleet = plane()
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 0.0, "GET /health answered 503")
    (one,) = found = told(fleet)
    assert only(found) == ("unhealthy", Stage.AVAILABILITY, "p1", True)
    assert one.sentence == "prefill p1 is unhealthy: GET /health answered 503"
    fleet.up(replace(PREFILL, pod=Pod("p2"), url="http://p2:1"))
    (one,) = told(fleet)
    assert not one.blocks


def test_a_worker_where_nobody_listens_is_a_refused_connection() -> None:
    fleet = plane()
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 0.0, "p1:1 refused the connection")
    assert only(told(fleet)) == ("connection-refused", Stage.CONNECT, "p1", True)


def lost(text: str, stage: Stage = Stage.REGISTER, port: int | None = 9) -> Fleet:
    fleet = plane(replace(PREFILL, bootstrap_port=port))
    fleet.mark_lost(Pod("p1"), Lost(stage, text))
    return fleet


def test_who_answers_did_not_refuse_whatever_it_says_of_others() -> None:
    fleet = plane()
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 0.0, "GET /health answered 503: n1 cannot be reached")
    assert only(told(fleet)) == ("unhealthy", Stage.AVAILABILITY, "p1", True)


def test_where_nobody_of_a_side_is_left_that_is_said_first_and_then_each() -> None:
    p2, p3 = (replace(PREFILL, pod=Pod(name), url=f"http://{name}:1") for name in ("p2", "p3"))
    fleet = plane(p2)
    for pod in (Pod("p1"), Pod("p2")):
        for _ in range(3):
            fleet.mark_health(pod, False, 0.0, f"{pod}:1 refused the connection")
    never = Waiting(p3, "p3:1 refused the connection")
    pool, *singles = found = told(fleet, waiting=[never])
    assert only([pool]) == ("pool-down", Stage.POOL, "prefill pool", True)
    assert pool.sentence == (
        "model 'tiny': no prefill of 3 is left: p1 (unhealthy (p1:1 refused the connection)), "
        "p2 (unhealthy (p2:1 refused the connection)), p3 (p3:1 refused the connection)"
    )
    assert sorted((one.culprit, one.rule) for one in singles) == [
        (name, "connection-refused") for name in ("p1", "p2", "p3")
    ]
    refused = meeting(9)
    refused.error = {"code": "no_prefill_available", "message": "no prefill worker can be used"}
    refused.steps = [Stage.AVAILABILITY, 98.5]
    pool, *same = told(fleet, waiting=[never], refused=[refused, refused])
    assert (pool.rule, pool.count, len(same)) == ("pool-down", 2, len(singles)), "said once"
    fleet.up(replace(PREFILL, pod=Pod("p4"), url="http://p4:1"))
    assert not any(one.blocks or one.rule == "pool-down" for one in told(fleet, waiting=[never]))
    assert len(found) == 4


def test_missing_ranks_are_named_as_the_directory_names_them() -> None:
    fleet = lost("bootstrap server p1:9: Prefill server not fully registered yet. Missing tp=2.")
    (one,) = found = told(fleet, told_ports={Pod("p1"): 8998})
    assert only(found) == ("ranks-missing", Stage.REGISTER, "p1", True)
    assert "Missing tp=2" in one.sentence


@pytest.mark.parametrize(("told_port", "hinted"), [(8998, True), (9, False)])
def test_ranks_missing_at_a_port_that_is_not_the_engines_own_may_be_another_directory(
    told_port: int, hinted: bool
) -> None:
    fleet = lost("bootstrap server p1:9: Prefill server not fully registered yet (0 workers).")
    (one,) = told(fleet, told_ports={Pod("p1"): told_port})
    assert one.rule == "ranks-missing"
    assert ("says that its rank directory is at port 8998" in one.sentence) is hinted
    assert ("name it with --prefill http://p1:1 8998" in one.next_step) is hinted


def test_a_bootstrap_port_that_the_engine_does_not_have_is_named_with_the_right_one() -> None:
    (one,) = found = told(lost("no bootstrap server at p1:9"), told_ports={Pod("p1"): 8998})
    culprit = "bootstrap port of p1"
    assert only(found) == ("wrong-bootstrap-port", Stage.REGISTER, culprit, True)
    assert one.next_step == "name it with --prefill http://p1:1 8998"


def test_the_directory_of_another_prefill_is_a_wrong_port_and_said_once() -> None:
    why = str(Elsewhere("p1:9", 8998))
    (one,) = found = told(lost(why, Stage.RESOLVE_TOPOLOGY), told_ports={Pod("p1"): 8998})
    culprit = "bootstrap port of p1"
    assert only(found) == ("wrong-bootstrap-port", Stage.RESOLVE_TOPOLOGY, culprit, True)
    assert one.sentence == f"no decode can find prefill p1: resolve-topology: {why}"
    assert "port 9," in one.sentence and one.sentence.count("8998") == 1


@pytest.mark.parametrize("ports", [{}, {Pod("p1"): 9}])
def test_a_directory_that_does_not_answer_is_its_prefills_fault(ports: dict[Pod, int]) -> None:
    fleet = lost("bootstrap server p1:9: no answer", Stage.RESOLVE_TOPOLOGY)
    found = told(fleet, told_ports=ports)
    assert only(found) == ("directory-away", Stage.RESOLVE_TOPOLOGY, "p1", True)


def test_an_open_circuit_is_named() -> None:
    breakers = Breakers(BreakerSettings(faults=1))
    ticket = breakers.of(P1).admit(100.0)
    assert ticket is not None
    breakers.of(P1).book(ticket, Outcome.FAULT, 100.0)
    found = told(plane(), breakers=breakers)
    assert only(found) == ("circuit-open", Stage.AVAILABILITY, "p1", True)


def test_a_drained_worker_is_the_operators_doing() -> None:
    fleet = plane()
    fleet.drain(Pod("p1"))
    assert only(told(fleet)) == ("drained", Stage.AVAILABILITY, "operator", True)


@pytest.mark.parametrize(
    ("known", "rule", "sentence"),
    [
        (lambda worker: None, "stream-silent", "the KV events of p1 are not heard: nothing was"),
        (knows(Knowledge.DARK, "not connected"), "stream-silent", "not heard: not connected"),
        (knows(Knowledge.PARTIAL, "gap 8..10"), "stream-partial", "p1 is partial: gap 8..10"),
    ],
)
def test_a_stream_that_cannot_be_believed_is_named(known: Any, rule: str, sentence: str) -> None:
    (one,) = told(plane(), known)
    assert (one.rule, one.stage, one.blocks) == (rule, Stage.POLICY_INPUT, False)
    assert sentence in one.sentence


def test_a_store_that_does_not_answer_or_evicts_is_named_and_blocks_nothing() -> None:
    away = told(plane(), store_down_s=4.2)
    assert only(away) == ("store-away", Stage.POLICY_INPUT, "index store", False)
    assert told(plane(), store_down_s=0.9) == []
    unfit = told(plane(), store_unfit="store r:1: maxmemory-policy is allkeys-lru")
    assert only(unfit) == ("store-evicts", Stage.POLICY_INPUT, "index store", False)


def test_drift_is_named_with_its_cause_beside_what_ingest_says() -> None:
    wrong = [Compared(0.0, 96, 0, over=96)]
    (one,) = told(plane(), drift=lambda worker: drifted(worker, wrong, wrong))
    assert one.sentence.startswith("unknown: index says 96 tokens, p1 found 0")
    assert (one.rule, one.culprit, one.blocks) == ("drift", "p1", False)
    partial = told(plane(), knows(Knowledge.PARTIAL, "gap"), drift=lambda w: drifted(w, wrong, []))
    assert [one.rule for one in partial] == ["drift", "stream-partial"]


def test_a_silent_stream_is_one_finding_whatever_ingest_says() -> None:
    for state in Knowledge:
        (one,) = told(plane(), knows(state, "as told"), drift=lambda worker: silent(worker, 100, 9))
        assert (one.rule, one.culprit) == ("stream-silent", "event stream of p1")
        assert "p1 served 100 requests" in one.sentence


def test_another_tokenizer_is_named_by_the_check_that_proved_it() -> None:
    why = "tokens of the gateway are not those of p1: text: token 0 is 257 there, 256 here"
    proven = Verdict(
        Cause.TOKENS,
        "",
        Knowledge.DARK,
        why,
        "tokenizer of p1 at the gateway",
        "give it the folder",
    )
    found = told(plane(), drift=lambda worker: proven)
    culprit = "tokenizer of p1 at the gateway"
    assert only(found) == ("tokenizer-differs", Stage.POLICY_INPUT, culprit, False)


def test_a_prefill_without_events_is_named() -> None:
    fleet = plane(replace(PREFILL, events=()))
    assert only(told(fleet)) == ("no-events", Stage.POLICY_INPUT, "p1", False)


def test_a_worker_that_does_not_answer_is_named_and_blocks_where_nobody_else_serves() -> None:
    one = Waiting(replace(PREFILL, pod=Pod("p9"), url="http://p9:1"), "connection refused")
    assert only(told(plane(), waiting=[one])) == ("connection-refused", Stage.CONNECT, "p9", False)
    fleet = plane()
    fleet.down(Pod("p1"))
    assert only(told(fleet, waiting=[one])) == ("connection-refused", Stage.CONNECT, "p9", True)
    waits = Waiting(PREFILL, "rank tp=1 is missing", "register")
    fleet = Fleet()
    fleet.up(DECODE)
    assert only(told(fleet, waiting=[waits])) == ("ranks-missing", Stage.REGISTER, "p1", True)


def test_pairs_that_do_not_fit_are_named_with_both_values() -> None:
    sixteen = replace(DECODE, shape=Shape(page_size=16, kv_dtype="float16"))
    other = replace(PREFILL, shape=Shape(page_size=64, kv_dtype="fp8"))
    (one,) = found = told(plane(other, sixteen))
    assert only(found) == ("shapes-differ", Stage.PAIR, "p1 and d1", True)
    assert "page_size: prefill 64, decode 16; kv_dtype: prefill fp8, decode float16" in one.sentence
    fits = replace(PREFILL, pod=Pod("p2"), url="http://p2:1", shape=Shape(page_size=16))
    (one,) = told(plane(other, sixteen, fits))
    assert not one.blocks


# What happened ----------------------------------------------------------------------------------


def meeting(number: int = 71, outcome: str = "failed", ended: float | None = 99.0) -> Meeting:
    made = Meeting(
        f"r{number}", 1, "/generate", "tiny", (Room(number),), Party("p1"), Party("d1"),
        Why(), directory=("h", 8998), outcome=outcome, begun=98.0, ended=ended,
        stopped="no attempts left",
    )  # fmt: skip
    made.steps = [Stage.POOL, 98.0, Stage.FIRST_BYTE, 98.5]
    if outcome == "ok":
        made.first_byte, made.stopped = ended, ""
    return made


def broken(stage: Stage, detail: str, error: dict[str, Any] | None = None, at: float = 1.0) -> Any:
    made = meeting()
    record = StageRecord(Room(71), stage, "failed", 0.1, detail, "d1", at)
    made.stages = {Room(71): [record]}
    made.error = error or {"code": "transfer_failed", "message": "m", "stage": stage.value}
    return made


def said(*meetings: Meeting, fleet: Fleet | None = None, **more: Any) -> list[Finding]:
    return told(fleet or plane(), meetings=list(meetings), **more)


def test_every_stage_has_a_culprit_and_a_next_step() -> None:
    assert set(STAGES) == set(Stage)
    assert all(culprit and step for culprit, step in STAGES.values())


@pytest.mark.parametrize(
    ("stage", "detail", "rule", "culprit"),
    [
        (Stage.REGISTER, "dp rank 0 is not registered", "ranks-missing", "p1"),
        (Stage.RESOLVE_TOPOLOGY, "503", "resolve-topology-failed", "p1"),
        (Stage.RESOLVE_RANK, "Bootstrap info not found", "resolve-rank-failed", "p1"),
        (Stage.CONNECT, "1.2.3.4:5 is gone: Connection refused", "stale-rank",
         "rank directory h:8998 of p1"),
        (Stage.CONNECT, "prefill: generation 'b', expected 'a'", "stale-rank",
         "rank directory h:8998 of p1"),
        (Stage.CONNECT, "x does not fit: page_size: prefill 64", "shapes-differ", "p1 and d1"),
        (Stage.CONNECT, "x refused: full", "connect-failed", "p1"),
        (Stage.VERIFY, "room mismatch (1 != 2)", "room-mismatch", "p1"),
        (Stage.VERIFY, "x: the prefill's commit not within 60 s", "kv-never-came", "p1"),
        (Stage.VERIFY, "checksum mismatch in 1 pages", "verify-failed", "p1"),
        (Stage.CONSUME, "no free page", "consume-failed", "d1"),
    ],
)  # fmt: skip
def test_each_failed_stage_has_its_rule_and_its_culprit(
    stage: Stage, detail: str, rule: str, culprit: str
) -> None:
    (one,) = found = said(broken(stage, detail))
    assert only(found) == (rule, stage, culprit, True)
    assert one.sentence == f"room 71: stage {stage} failed at d1: {detail}"
    assert one.rooms == ("71",)


def test_a_rank_that_is_refused_with_its_prefill_is_a_refused_connection() -> None:
    fleet = plane()
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 0.0, "p1:1 refused the connection")
    (one,) = said(broken(Stage.CONNECT, "p1:5 is gone: Connection refused"), fleet=fleet)
    assert (one.rule, one.culprit) == ("connection-refused", "p1")


def test_what_failed_at_a_worker_that_is_down_is_one_thing_with_that() -> None:
    fleet = plane()
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 0.0, "p1:1 refused the connection")
    gone = broken(Stage.RESOLVE_TOPOLOGY, "no bootstrap server at h:8998: connection refused")
    (one,) = found = said(gone, fleet=fleet)
    assert only(found) == ("connection-refused", Stage.CONNECT, "p1", True)
    assert one.rooms == ("71",) and one.sentence.startswith("prefill p1 is unhealthy")
    (one,) = said(gone)
    assert (one.rule, one.stage) == ("directory-away", Stage.RESOLVE_TOPOLOGY)


def test_the_first_failed_stage_is_the_one() -> None:
    made = broken(Stage.CONSUME, "b")
    made.error = {}
    verify = StageRecord(Room(71), Stage.VERIFY, "failed", 0.1, "a", "d1", 9.0)
    made.stages[Room(71)].append(verify)
    (one,) = said(made)
    assert one.stage is Stage.VERIFY


@pytest.mark.parametrize(
    "given_up",
    [
        "cancelled while waiting for the prefill's commit of p1",
        "prefill p1 gave up room 7: prefill itself gave up room 7: the request was cancelled",
    ],
)
def test_a_stage_that_was_only_given_up_says_nothing_unless_time_was_over(given_up: str) -> None:
    refused = {"code": "prefill_failed", "message": "no connection", "side": "prefill"}
    (one,) = said(broken(Stage.VERIFY, given_up, refused | {"leg": "Refused"}))
    assert (one.rule, one.stage, one.culprit) == ("connection-refused", Stage.CONNECT, "p1")
    for leg, rule in (("Refused", "connection-refused"), ("TimedOut", "connect-failed")):
        failed = {"code": "decode_failed", "message": "no", "side": "decode", "leg": leg}
        (one,) = said(broken(Stage.VERIFY, "its peer is gone", failed | {"stage": "connect"}))
        assert (one.rule, one.stage, one.culprit) == (rule, Stage.CONNECT, "d1")
        assert one.next_step == "start it, or see that its port is open from here"
    late = {"code": "deadline_exceeded", "message": "30 s", "side": "decode", "leg": "TimedOut"}
    (one,) = said(broken(Stage.VERIFY, given_up, late))
    assert (one.rule, one.stage, one.culprit) == ("kv-never-came", Stage.VERIFY, "p1")


@pytest.mark.parametrize("maker", ["sglang", ""])
def test_without_a_failed_stage_the_leg_that_failed_is_named_and_how_far_it_came(
    maker: str,
) -> None:
    made = meeting()
    made.error = {"message": "decode d1: cut", "side": "decode", "leg": "Cut"}
    made.silent = (maker,) if maker else ()
    (one,) = said(made)
    assert (one.stage, one.culprit, one.rule) == (Stage.FIRST_BYTE, "d1", "first-byte-failed")
    how_far = "sglang tells no stages" if maker else "no engine told a stage"
    assert one.sentence == f"room 71: decode d1: cut ({how_far})"
    made.first_byte = 98.9
    (one,) = said(made)
    assert (one.stage, one.rule) == (Stage.END, "end-failed")
    made.first_byte, made.error["leg"] = None, "TimedOut"
    (one,) = said(made)
    assert (one.stage, one.rule) == (Stage.FIRST_BYTE, "no-answer")
    assert "queues in the metrics of d1" in one.next_step


def test_a_stage_an_engine_only_named_in_its_answer_counts_too() -> None:
    made = meeting()
    made.error = {"message": "room mismatch (1 != 2)", "stage": "verify", "side": "prefill"}
    assert only(said(made)) == ("room-mismatch", Stage.VERIFY, "p1", True)


def test_alike_failures_are_one_finding_that_is_over_when_the_same_workers_answer() -> None:
    many = [broken(Stage.VERIFY, "checksum mismatch") for _ in range(50)]
    (one,) = said(*many)
    assert one.blocks and one.count == 50 and "(50 attempts, given up" in one.sentence
    assert len(one.shown()["rooms"]) == 5
    (one,) = said(meeting(72, "ok", ended=99.5), *many)
    assert not one.blocks and "answered since" in one.sentence
    (one,) = said(*many, meeting(70, "ok", ended=98.9))
    assert one.blocks, "that was before"


def test_an_answer_of_workers_with_alike_names_shows_nothing() -> None:
    well = meeting(72, "ok", ended=99.5)
    well.prefill, well.decode = Party("p10"), Party("d1")
    (one,) = said(well, broken(Stage.VERIFY, "checksum mismatch"))
    assert one.blocks
    stale = broken(Stage.CONNECT, "1.2.3.4:5 is gone: Connection refused")
    (one,) = said(well, stale)
    assert one.blocks
    (one,) = said(meeting(73, "ok", ended=99.5), stale)
    assert not one.blocks, "the same pair met"


def test_a_failure_that_another_attempt_made_good_does_not_block() -> None:
    made = broken(Stage.VERIFY, "checksum mismatch")
    made.stopped = ""
    assert not said(made)[0].blocks


def test_what_is_long_over_is_not_told() -> None:
    assert said(broken(Stage.VERIFY, "x"), now=99.0 + 301) == []


def test_attempts_that_failed_at_different_workers_are_told_as_one_request_too() -> None:
    first, second = broken(Stage.VERIFY, "checksum mismatch"), broken(Stage.CONSUME, "no page")
    first.stopped, second.attempt = "", 2
    rules = {one.rule: one for one in said(second, first)}
    one = rules["retries-used-up"]
    assert (one.stage, one.culprit, one.blocks) == (Stage.CONSUME, "p1 and d1", True)
    assert "verify at p1; consume at d1" in one.sentence and "no attempts left" in one.sentence


def test_a_request_is_told_of_by_its_own_attempts_though_others_had_its_id() -> None:
    def failing(attempt: int, name: str) -> Meeting:
        one = meeting(71)
        one.attempt, one.stopped = attempt, "no attempts left" if attempt == 2 else ""
        one.error = {"side": name, "message": "m"}
        return one

    pairs = [(failing(2, "decode"), failing(1, "prefill")) for _ in range(50)]
    found = said(*(one for pair in pairs for one in pair))
    one = next(one for one in found if one.rule == "retries-used-up")
    assert "failed 2 times" in one.sentence and len(one.sentence) < 200
    assert one.count == 50 and len(one.rooms) == 2


def test_a_request_for_which_nobody_was_chosen_is_told_and_blocks_nothing_by_itself() -> None:
    made = Meeting("r9", 1, "/generate", "tiny", (), None, None, None, outcome="failed", begun=99.0)
    made.steps, made.ended = [Stage.POOL, 99.0, Stage.AVAILABILITY, 99.0], 99.0
    made.error = {"code": "no_decode_available", "message": "no decode worker of 1 can be used"}
    found = told(plane(), refused=[made])
    assert only(found) == ("nobody-chosen", Stage.AVAILABILITY, "decode pool", False)


def test_who_was_turned_away_for_want_of_a_decode_is_told_with_the_missing_decode() -> None:
    """And not with the first thing that is wrong: here, what another model lacks."""
    fleet = Fleet()
    for up in (PREFILL, replace(DECODE, model="other")):
        fleet.up(up)
    made = Meeting("r9", 1, "/generate", "tiny", (), None, None, None, outcome="failed", begun=99.0)
    made.steps, made.ended = [Stage.POOL, 99.0], 99.0
    made.error = {"code": "no_decode_available", "message": "no decode worker is registered"}
    first, second = told(fleet, refused=[made, made])
    assert (first.culprit, first.count, second.culprit) == ("decode pool", 2, "prefill pool")
    assert "model 'tiny'" in first.sentence


@pytest.mark.parametrize("asked", ["tiny", "tuned", "other", ""])
def test_who_was_turned_away_is_told_with_what_its_own_model_lacks(asked: str) -> None:
    """The one has a decode, which is ill; the other has none, which comes first."""
    fleet = Fleet()
    another = replace(PREFILL, pod=Pod("a1"), url="http://a1:1", model="other")
    for up in (replace(PREFILL, adapters=("tuned",)), DECODE, another):
        fleet.up(up)
    for _ in range(5):
        fleet.mark_health(DECODE.pod, False, 1.0, "refused")
    made = Meeting("r9", 1, "/generate", asked, (), None, None, None, outcome="failed", begun=99.0)
    made.steps, made.ended = [Stage.POOL, 99.0], 99.0
    made.error = {"code": "no_decode_available", "message": "no decode can be used"}
    found = {one.culprit: one.count for one in told(fleet, refused=[made, made])}
    ill = asked in ("tiny", "tuned")
    assert found == {"decode pool": 1 if ill else 2, "d1": 2 if ill else 1}


@pytest.mark.parametrize("reason", ["no_tokenizer", "broken_tokenizer", "engine_silent"])
def test_requests_without_tokens_are_counted_until_there_are_some(reason: Any) -> None:
    blind = [meeting(number, "ok") for number in range(3)]
    for one in blind:
        one.why = Why(reason=REASONS[reason])
    found = said(*blind)
    assert only(found) == ("no-tokens", Stage.POLICY_INPUT, "tokenizer of the gateway", False)
    assert "3 of 3 requests" in found[0].sentence and "--tokenizer" in found[0].next_step
    seeing = meeting(9, "ok")
    seeing.why = Why(prompt_tokens=12)
    assert said(seeing, *blind) == []


def test_a_prompt_that_is_no_text_is_nobodys_fault() -> None:
    picture = meeting(1, "ok")
    picture.why = Why(reason=REASONS["multimodal"])
    assert said(picture) == []


def test_a_failed_attempt_never_breaks_the_rules_whatever_it_holds() -> None:
    bare = Meeting("r", 1, "/generate", "", (), None, None, None, outcome="failed", ended=99.0)
    (one,) = said(bare)
    assert one.sentence and one.culprit == "unknown"

"""Diagnosis of attempts: at which stage did each stop, whose fault was it, and is it over?

Pure. Rules of diagnosis.py over what was remembered of requests. What an engine told of its own
stages says more than how its answer looked from here; a stage that was given up because the other
side had failed says nothing. Open it to tell one more kind of failure apart.

    failed attempts --> Failure(stage, rule, culprit) each --> one Finding for all that are alike
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.vocabulary import Stage, StageRecord

from .findings import FAILED, MOST_NAMED, STAGES, Finding, Rule
from .fleet import Fleet
from .meeting import ORDER, Meeting
from .plans import REASONS, Reason

GIVEN_UP = (  # we, or the peer, ended it
    "cancelled while waiting", "its request was cancelled", "the request was cancelled",
    "the decode gave up",
)  # fmt: skip
MISFIT = " does not fit: "  # and which fields; a frame's own checksum may not fit either
BIND = "its bind"  # what a prefill waits for: the decode's first word
NOBODY = "connection refused"  # at the address that a directory told
MISSING = (
    "--tokenizer PATH, or tokenizer of the [[workers]] tables, for model {model!r}; or engines "
    "that answer POST /tokenize"
)
BUSY = "give the gateway more CPU, or run more of them"
# why a request had no tokens -> from which share of requests on that is wrong, and the next step
TOKENLESS: dict[Reason, tuple[float, str]] = {
    "no_tokenizer": (0.0, MISSING),
    "broken_tokenizer": (0.0, MISSING),
    "no_route": (0.0, MISSING),
    "engine_silent": (0.0, MISSING),
    "engine_refused": (0.5, MISSING),
    "mixed_engines": (0.0, "let one kind of engine serve model {model!r}"),
    "busy": (0.1, BUSY),
    "slow": (0.1, BUSY),
}


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one attempt failed."""

    stage: Stage
    rule: Rule
    culprit: str
    sentence: str
    step: str
    at: float  # monotonic, when it ended
    rooms: tuple[str, ...]
    pair: frozenset[str]  # its workers
    final: str  # why there was no other attempt: then the client was told; "" = there was one
    model: str = ""  # whose workers could not be chosen; "" where some were


def attempts(
    meetings: Sequence[Meeting], refusals: Sequence[Meeting], fleet: Fleet
) -> Iterable[Finding]:
    """What failed lately, alike failures together. Requests fail by it as long as nobody with the
    same workers succeeded since."""
    failures = [failure(one, fleet) for one in meetings if one.outcome == "failed"]
    failures += [_refusal(one, fleet) for one in refusals if one.outcome == "failed"]
    groups: dict[tuple[Rule, str, str], list[Failure]] = {}
    for one in failures:
        groups.setdefault((one.rule, one.culprit, one.model), []).append(one)
    for alike in groups.values():
        newest = max(alike, key=lambda one: one.at)
        over = any(_shows(meeting, newest) for meeting in meetings)
        blocks = not over and any(one.final for one in alike)
        rooms = tuple(room for one in alike for room in one.rooms)[:MOST_NAMED]
        stopped = f", given up: {newest.final}" if newest.final else ""
        many = f" ({len(alike)} attempts{stopped})" if len(alike) > 1 else ""
        many += "; the same workers answered since" if over else ""
        yield Finding(
            f"room {rooms[0]}" if rooms else "plane",
            blocks,
            newest.sentence + many,
            newest.culprit,
            newest.step,
            newest.stage,
            newest.rule,
            rooms,
            len(alike),
            newest.model,
        )
    yield from _exhausted(meetings, fleet)


def _shows(meeting: Meeting, failure: Failure) -> bool:
    """Did an attempt that ended later show that it is over?"""
    if meeting.outcome != "ok" or (meeting.ended or 0.0) <= failure.at:
        return False
    names = _pair(meeting)
    if failure.culprit in failure.pair:
        return failure.culprit in names
    return names == failure.pair or not failure.pair  # both, or something between them


def _exhausted(meetings: Sequence[Meeting], fleet: Fleet) -> Iterable[Finding]:
    """Requests that were tried again and again and failed all the same."""
    given_up = [
        one for one in meetings if one.outcome == "failed" and one.attempt > 1 and one.stopped
    ]
    if not given_up:
        return
    last = given_up[0]
    same = _attempts(last, meetings)
    each = [failure(one, fleet) for one in same if one.outcome == "failed"]
    culprits = list(dict.fromkeys(one.culprit for one in each))
    if len(culprits) < 2:
        return  # the failure itself says as much
    said = "; ".join(f"{one.stage.value} at {one.culprit}" for one in each)
    gave_up = f"failed {len(each)} times and was given up, {last.stopped}"
    sentence = f"request {last.request_id} {gave_up}: {said}"
    step = f"GET /requests/{last.request_id} tells each attempt; heal what failed first"
    over = any(one.outcome == "ok" and (one.ended or 0) > (last.ended or 0) for one in meetings)
    rooms = tuple(str(room) for one in same for room in one.rooms)
    yield Finding(
        f"request {last.request_id}", not over, sentence, " and ".join(culprits), step,
        each[-1].stage, "retries-used-up", rooms, max(len(each), len(given_up)),
    )  # fmt: skip


def _attempts(last: Meeting, meetings: Sequence[Meeting]) -> list[Meeting]:
    """Of one request, oldest first, its last one known; `meetings` newest first. A client may have
    asked other things under the same id."""
    found = [last]
    for one in meetings[meetings.index(last) + 1 :]:
        if one.request_id == last.request_id and one.attempt == found[-1].attempt - 1:
            found.append(one)
    return found[::-1]


def _refusal(meeting: Meeting, fleet: Fleet) -> Failure:
    """Nobody was chosen: it blocks as long as a finding about the workers says so."""
    error = meeting.error or {}
    stage = meeting.trail[-1][0] if meeting.trail else Stage.POOL
    code = str(error.get("code") or "")
    rule: Rule = "shapes-differ" if code == "no_compatible_pair" else "nobody-chosen"
    side = "decode" if code == "no_decode_available" else "prefill"
    culprit = "plane" if rule == "shapes-differ" else f"{side} pool"
    sentence = f"request {meeting.request_id}: {error.get('message') or 'nobody could be chosen'}"
    model = fleet.asked_for(meeting.model)[0] if rule == "nobody-chosen" else ""
    return Failure(
        stage, rule, culprit, sentence, STAGES[stage][1], meeting.ended or 0.0, (), frozenset(), "",
        model,
    )  # fmt: skip


def failure(meeting: Meeting, fleet: Fleet) -> Failure:
    """Why one attempt failed, as its evidence has it."""
    error = meeting.error or {}
    record = None if _unreached(error) else _broken(meeting, error)
    room = str(record.room) if record is not None else next(map(str, meeting.rooms), "")
    name = f"room {room}" if room else f"request {meeting.request_id}"
    if record is None:
        stage, rule, culprit, why, step = _leg(meeting, error)
        sentence = f"{name}: {why} ({_how_far(meeting)})"
    else:
        stage = record.stage
        rule, culprit, step = _meeting(meeting, record, fleet)
        by = f" at {record.by}" if record.by else ""
        detail = record.detail or error.get("message") or "no reason given"
        sentence = f"{name}: stage {stage} failed{by}: {detail}"
    rooms = (room,) if room else ()
    ended = meeting.ended or 0.0
    final = meeting.stopped or ("committed" if meeting.first_byte is not None else "")
    pair = _pair(meeting)
    return Failure(stage, rule, culprit, sentence, step, ended, rooms, pair, final)


def _broken(meeting: Meeting, error: dict[str, Any]) -> StageRecord | None:
    """The stage of the engines' meeting that failed first. One that was only given up counts where
    our own time was over: then it tells what was waited for."""
    records = [one for told in meeting.stages.values() for one in told if one.outcome != "ok"]
    real = [one for one in records if not any(word in one.detail for word in GIVEN_UP)]
    late = error.get("code") == "deadline_exceeded"
    found = real or (records if late else [])
    named = error.get("stage")
    found = [one for one in found if one.stage == named] or found
    return min(found, key=lambda one: (ORDER[one.stage], one.at), default=None)


def _meeting(meeting: Meeting, record: StageRecord, fleet: Fleet) -> tuple[Rule, str, str]:
    """Rule, culprit and next step of a failed stage of two engines."""
    side, step = STAGES[record.stage]
    rule, detail = _rule(record), record.detail
    if rule == "shapes-differ":
        both = f"{_named(meeting, 'prefill')} and {_named(meeting, 'decode')}"
        return rule, both, "start both sides with the same page size, KV dtype and layout"
    if rule == "stale-rank":
        host, port = meeting.directory or (None, None)
        where = f"{host}:{port}"
        if NOBODY in detail.lower() and not _lives(meeting, fleet):
            return "connection-refused", _named(meeting, side), "start the prefill again"
        told = (
            f"GET http://{where}/ranks shows the addresses it tells; let the ranks register again"
        )
        return rule, f"rank directory {where} of {_named(meeting, 'prefill')}", told
    if rule == "connect-failed" and BIND in detail:
        came = (
            "look at the decode's log: it did not come to the prefill's rank, and told of no reason"
        )
        return rule, _named(meeting, "decode"), came
    return rule, _named(meeting, side), step


def _rule(record: StageRecord) -> Rule:
    """Which kind of failure an engine's own words tell of."""
    stage, detail = record.stage, record.detail.lower()
    if MISFIT in detail:
        return "shapes-differ"
    if "no bootstrap server" in detail:
        return "directory-away"
    if stage is Stage.REGISTER or "not fully registered" in detail:
        return "ranks-missing"
    if stage is Stage.CONNECT and (NOBODY in detail or "generation" in detail):
        return "stale-rank"
    if stage is Stage.VERIFY and "room mismatch" in detail:
        return "room-mismatch"
    waited = ("not within", "stalled", "lease expired", *GIVEN_UP)
    if stage is Stage.VERIFY and any(word in detail for word in waited):
        return "kv-never-came"
    return FAILED.get(stage, "first-byte-failed")  # an engine may name any stage as its own


def _lives(meeting: Meeting, fleet: Fleet) -> bool:
    """Is the prefill itself well, as far as its health goes?"""
    name = _named(meeting, "prefill")
    return any(str(one.worker) == name and one.healthy for one in fleet.targets())


def _leg(meeting: Meeting, error: dict[str, Any]) -> tuple[Stage, Rule, str, str, str]:
    """Stage, rule, culprit, why and next step where no stage was told: the leg that failed."""
    side = str(error.get("side") or "")
    culprit, why = _named(meeting, side), str(error.get("message") or "no reason given")
    if _unreached(error):
        rule: Rule = "connection-refused" if error["leg"] == "Refused" else "connect-failed"
        return Stage.CONNECT, rule, culprit, why, "start it, or see that its port is open from here"
    if named := error.get("stage"):
        stage = Stage(named)
        made = StageRecord(meeting.rooms[0] if meeting.rooms else 0, stage, "failed", 0.0, why)  # type: ignore[arg-type]
        return stage, _rule(made), culprit, why, STAGES[stage][1]
    begun = Stage.END if meeting.first_byte is not None else Stage.FIRST_BYTE
    if error.get("leg") == "TimedOut" and meeting.rooms and meeting.prefill_ended is None:
        step = f"no engine told what it waits for; look at the queues in the metrics of {culprit}"
        return begun, "no-answer", culprit, why, step
    return begun, FAILED[begun], culprit, why, STAGES[begun][1]


def _unreached(error: dict[str, Any]) -> bool:
    """Did the gateway itself not get through? Then nothing that engines met with explains it."""
    leg = error.get("leg")
    return leg == "Refused" or (leg is not None and error.get("stage") == Stage.CONNECT)


def _how_far(meeting: Meeting) -> str:
    told = [one for some in meeting.stages.values() for one in some if one.outcome == "ok"]
    if told:
        return f"last stage told: {max(told, key=lambda one: ORDER[one.stage]).stage}"
    if meeting.silent:
        return f"{' and '.join(meeting.silent)} tells no stages"
    return "no engine told a stage"


def _pair(meeting: Meeting) -> frozenset[str]:
    return frozenset(party.worker for party in meeting.parties)


def _named(meeting: Meeting, side: str) -> str:
    """The worker of a side in this attempt."""
    found = {"prefill": meeting.prefill, "decode": meeting.decode}.get(side)
    return found.worker if found is not None else side or "unknown"


def no_tokens(meetings: Sequence[Meeting]) -> Iterable[Finding]:
    """Requests placed by load because the gateway had no tokens of them, by a fault of ours."""
    placed = [one for one in meetings if one.why is not None]
    for reason, (share, step) in TOKENLESS.items():
        met = [one for one in placed if one.why and one.why.reason == REASONS[reason]]
        if not met or len(met) < share * len(placed):
            continue
        newest = next(one for one in placed if one.model == met[0].model)
        if not share and newest.why and newest.why.prompt_tokens:
            continue  # it was wrong, and is no longer
        without = f"{len(met)} of {len(placed)} requests were placed without tokens"
        sentence, step = f"{without}: {REASONS[reason]}", step.format(model=met[0].model)
        rooms = tuple(str(room) for one in met[:MOST_NAMED] for room in one.rooms)
        yield Finding(
            "plane", False, sentence, "tokenizer of the gateway", step, Stage.POLICY_INPUT,
            "no-tokens", rooms, len(met),
        )  # fmt: skip

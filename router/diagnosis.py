"""Diagnosis: what is wrong, whose fault is it, and what should a person do next?

Pure: rules over the fleet, its circuits, what the index knows, and the evidence of failed rooms.
admin.py shows it as GET /diagnosis. Open it to add a rule, or the sentence of a new stage. Says
nothing where nothing is wrong.

    room 71: stage verify failed at d1: expected room 71, metadata says 12
             culprit p2    next step ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvplane.vocabulary import Knowledge, Known, Role, Stage, Worker

from .breaker import Breakers, State
from .fleet import Fleet, Waited
from .suspicions import Cause
from .target import Target
from .verdicts import Verdict

MOST_ROOMS = 20  # failed rooms told of, newest first


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    about: str  # plane | worker NAME | room NUMBER
    blocks: bool  # do requests fail by it, or are they only served worse?
    sentence: str
    culprit: str
    next_step: str


# Who is to blame for a failed stage, and what to do, as long as nobody says it better.
STAGES: dict[Stage, tuple[str, str]] = {
    Stage.REGISTER: (
        "prefill",
        "GET /ranks at the prefill's bootstrap port names the missing coordinates; look at their "
        "processes",
    ),
    Stage.RESOLVE_TOPOLOGY: (
        "prefill",
        "see that the prefill's bootstrap port answers GET /health from the decode's machine and "
        "that all its ranks have registered",
    ),
    Stage.RESOLVE_RANK: (
        "prefill",
        "GET /ranks at the prefill's bootstrap port: the wanted rank must be there under the "
        "present generation",
    ),
    Stage.CONNECT: (
        "prefill",
        "see that the rank's port is open from the decode's machine and that both sides store KV "
        "alike",
    ),
    Stage.VERIFY: (
        "prefill",
        "nothing was consumed; where it repeats, take this prefill out (PUT /workers/ID) and look "
        "at its memory and network",
    ),
    Stage.CONSUME: ("decode", "look at the decode's log and its free pages"),
}


def report(
    fleet: Fleet,
    breakers: Breakers,
    now: float,
    known: Callable[[Worker], Known | None],
    waiting: Iterable[Waited] = (),
    failed_rooms: Sequence[Mapping[str, Any]] = (),
    drift: Callable[[Worker], Verdict | None] = lambda worker: None,
    store_down_s: float = 0.0,
) -> dict[str, Any]:
    """Everything that is wrong, ready for JSON; what blocks comes first. `failed_rooms` as
    Ledger.rooms(failed=True) gives them."""
    findings = [
        *_plane(fleet),
        *_store(store_down_s),
        *(_not_serving(one) for one in waiting),
        *(found for target in fleet.targets() for found in _worker(target, breakers, now)),
        *(
            found
            for target in fleet.targets()
            if target.healthy
            for found in _knowledge(target, known(target.worker), drift(target.worker))
        ),
        *(room(shown) for shown in failed_rooms[:MOST_ROOMS]),
    ]
    findings.sort(key=lambda finding: not finding.blocks)
    blocked = any(finding.blocks for finding in findings if not finding.about.startswith("room"))
    return {"ok": not findings, "blocked": blocked, "findings": [asdict(f) for f in findings]}


def _plane(fleet: Fleet) -> Iterable[Finding]:
    """Can each model be served by a pair, or by a unified worker?"""
    if not fleet.pods():
        step = "start engines, or name them with --prefill and --decode"
        yield Finding("plane", True, "no worker serves", "configuration or engines", step)
    for model in sorted({up.model for up in fleet.pods()}):
        if fleet.selectable(Role.BOTH, model):
            continue
        for side in (Role.PREFILL, Role.DECODE):
            if not fleet.selectable(side, model):
                error = fleet.lack(side, model)
                sentence = error.message if error else f"no {side} worker"
                step = f"start a {side} of model {model!r}, or heal those there are"
                yield Finding("plane", True, f"model {model!r}: {sentence}", f"{side} pool", step)


def _store(down_s: float) -> Iterable[Finding]:
    """What was known is still used, and believed in part at most."""
    if down_s > 1:
        sentence = f"the index store does not answer since {down_s:.0f} s"
        step = "see that --redis can be reached from here; what was known is used meanwhile"
        yield Finding("plane", False, sentence, "index store", step)


def _not_serving(one: Waited) -> Finding:
    pod, url = one.declared.pod, one.declared.url
    return Finding(
        f"worker {pod}",
        True,
        f"{one.declared.role} {pod} does not serve yet: {one.reason}",
        str(pod),
        f"start it, or see that {url}/health answers 200 from here",
    )


def _worker(target: Target, breakers: Breakers, now: float) -> Iterable[Finding]:
    name, about = str(target.worker), f"worker {target.worker}"
    if not target.healthy:
        sentence = f"{target.role} {name} is unhealthy: {target.pulse.reason}"
        yield Finding(about, True, sentence, name, f"look at {target.url}/health and its log")
        return
    if target.pulse.lost is not None:
        sentence = f"no decode can find {target.role} {name}: {target.pulse.lost}"
        yield Finding(about, True, sentence, name, STAGES[target.pulse.lost.stage][1])
    if target.draining:
        sentence = f"{target.role} {name} is drained by hand: {target.inflight_requests} under way"
        yield Finding(about, False, sentence, "operator", "PUT /workers/ID {draining: false}")
    state = breakers.states(now).get(target.worker, State.CLOSED)
    if state is not State.CLOSED:
        wait = breakers.wait_s([target.worker], now)
        sentence = f"{target.role} {name} failed too often: its circuit is {state}"
        step = f"tried again in {wait:.0f} s by itself; GET /rooms?failed=1 tells what failed"
        yield Finding(about, True, sentence, name, step)


def _knowledge(target: Target, fact: Known | None, drift: Verdict | None) -> Iterable[Finding]:
    """Is what the index says about this worker to be believed? Decodes are chosen by load."""
    if target.role is Role.DECODE:
        return
    name, about = str(target.worker), f"worker {target.worker}"
    if not target.up.events:
        sentence = f"{target.role} {name} publishes no KV events: it is chosen by load alone"
        step = "switch its KV events on, or name them with --events"
        yield Finding(about, False, sentence, name, step)
        return
    if drift is not None:
        yield Finding(about, False, drift.sentence, drift.culprit, drift.next_step)
        if drift.cause is Cause.SILENT:
            return  # says more than ingest can
    if fact is None:
        sentence = f"nothing was heard of the KV events of {name}"
        step = f"see that {target.up.events[0]} can be reached from ingest, and that ingest runs"
        yield Finding(about, False, sentence, name, step)
    elif fact.state is not Knowledge.EXACT:
        sentence = f"knowledge of {name} is {fact.state}: {fact.reason}"
        step = "it ends by itself once an ingest follows the whole stream; if not, look at its log"
        yield Finding(about, False, sentence, name, step)


def room(shown: Mapping[str, Any]) -> Finding:
    """The first stage that failed in a failed room, or else the leg that did."""
    error = shown.get("error") or {}
    stages = shown.get("stages") or []
    broken = next((stage for stage in stages if stage["outcome"] != "ok"), None)
    name = f"room {shown.get('room')}"
    if broken is not None:
        side, step = STAGES[Stage(broken["stage"])]
        by = f" at {broken['by']}" if broken.get("by") else ""
        detail = broken.get("detail") or error.get("message") or "no reason given"
        sentence = f"{name}: stage {broken['stage']} failed{by}: {detail}"
        return Finding(name, True, sentence, _named(shown, side), step)
    side = str(error.get("side") or "")
    seen = f"last stage seen: {stages[-1]['stage']}" if stages else "no stage was seen"
    message = error.get("message") or "no reason given"
    step = f"look at the log of this worker at that time; request {shown.get('request_id')}"
    return Finding(name, True, f"{name}: {message} ({seen})", _named(shown, side), step)


def _named(shown: Mapping[str, Any], side: str) -> str:
    """The worker of a side in this room."""
    return str((shown.get(side) or {}).get("worker") or side or "unknown")

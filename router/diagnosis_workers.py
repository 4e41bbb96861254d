"""Diagnosis of workers: what keeps each of them from being used, or from being believed?

Pure. Rules of diagnosis.py about one worker. Open it to add what can be wrong with a worker that
nobody has to ask first.

    named as something else -> does not serve -> unhealthy -> cannot be found -> circuit -> unknown
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvplane.vocabulary import Knowledge, Known, Pod, Role, Stage, Worker, WorkerUp

from .breaker import Breakers, State
from .findings import STAGES, Finding, Rule
from .fleet import Fleet, Waited
from .suspicions import Cause
from .target import Target
from .verdicts import Verdict

REFUSED = ("refused", "cannot be reached")  # as sockets say it, and discovery's probe
RULES: dict[Cause, Rule] = {Cause.SILENT: "stream-silent", Cause.TOKENS: "tokenizer-differs"}
PORTS = Mapping[Pod, int]


def refused(reason: str) -> bool:
    """Does a reason say that nobody listens there?"""
    low = reason.lower()
    return "answered" not in low and any(word in low for word in REFUSED)


def named(fleet: Fleet, declared: Mapping[Pod, WorkerUp]) -> Iterable[Finding]:
    """Is each worker what it was named as? The engine knows better, so it is used as what it is."""
    for up in fleet.pods():
        told = declared.get(up.pod)
        if told is None or told.role is up.role:
            continue
        blocks = not _served(fleet, told.role, up.model) and told.role is not Role.BOTH
        what = "unified" if up.role is Role.BOTH else f"a {up.role}"
        sentence = f"{up.pod} was named as {told.role} and says that it is {what}"
        step = f"name it with --{up.role}, or start it as a {told.role}"
        if up.role is Role.BOTH:
            step = f"start it as a {told.role} (SGLang: --disaggregation-mode {told.role})"
        yield Finding(
            f"worker {up.pod}", blocks, sentence, str(up.pod), step, Stage.POOL, "wrong-role"
        )


def not_serving(fleet: Fleet, waiting: Sequence[Waited], ports: PORTS) -> Iterable[Finding]:
    """Workers that never answered, or not yet."""
    for one in waiting:
        up = one.declared
        blocks = not _served(fleet, up.role, up.model)
        pod, about = str(up.pod), f"worker {up.pod}"
        sentence = f"{up.role} {pod} does not serve yet: {one.reason}"
        if one.stage is not None:
            yield _unfound(about, blocks, up, Stage(one.stage), sentence, one.reason, ports)
            continue
        step = f"start it, or see that {up.url}/health answers 200 from here"
        yield _dead(about, blocks, sentence, pod, step, one.reason)


def _dead(about: str, blocks: bool, sentence: str, pod: str, step: str, reason: str) -> Finding:
    """Nobody listens there, or whoever does is not well."""
    if "TLS" in reason:
        step = "see that its URL says https only where it speaks TLS, and whose certificate it has"
    if refused(reason):
        return Finding(about, blocks, sentence, pod, step, Stage.CONNECT, "connection-refused")
    return Finding(about, blocks, sentence, pod, step, Stage.AVAILABILITY, "unhealthy")


def _unfound(
    about: str,
    blocks: bool,
    up: WorkerUp,
    stage: Stage,
    sentence: str,
    reason: str,
    ports: PORTS,
) -> Finding:
    """No decode can find this prefill: its ranks are missing, or its directory is elsewhere."""
    told = ports.get(up.pod)
    missing = "missing" in reason.lower() or "not fully registered" in reason
    differs = told is not None and up.bootstrap_port not in (None, told)
    own = f"name it with --prefill {up.url} {told}"
    if differs and f" {told}" not in reason:
        sentence += f"; the engine itself says that its rank directory is at port {told}"
    if differs and not missing:
        culprit = f"bootstrap port of {up.pod}"
        return Finding(about, blocks, sentence, culprit, own, stage, "wrong-bootstrap-port")
    rule: Rule = "ranks-missing" if missing else "directory-away"
    step = STAGES[stage][1] + (f"; where that directory is not its own, {own}" if differs else "")
    return Finding(about, blocks, sentence, str(up.pod), step, stage, rule)


def workers(
    fleet: Fleet,
    breakers: Breakers,
    now: float,
    known: Callable[[Worker], Known | None],
    drift: Callable[[Worker], Verdict | None],
    ports: PORTS,
) -> Iterable[Finding]:
    """All of the fleet, one after the other."""
    states = breakers.states(now)
    for target in fleet.targets():
        alone = not _others(fleet, target, states)
        if target.healthy:
            yield from _well(target, alone, ports)
            yield from _circuit(target, alone, breakers, states, now)
            yield from _knowledge(target, known(target.worker), drift(target.worker))
        elif target.worker.dp_rank == 0:  # health is the pod's
            name, reason = str(target.worker), target.pulse.reason
            sentence = f"{target.role} {name} is unhealthy: {reason}"
            step = f"look at {target.url}/health and its log"
            yield _dead(f"worker {name}", alone, sentence, name, step, reason)


def _others(fleet: Fleet, target: Target, states: Mapping[Worker, State]) -> bool:
    """Can somebody else do what this one does?"""

    def able(other: Target) -> bool:
        return other is not target and states.get(other.worker, State.CLOSED) is State.CLOSED

    return _served(fleet, target.role, target.model, able)


def _served(
    fleet: Fleet, role: Role, model: str, able: Callable[[Target], bool] = lambda other: True
) -> bool:
    """Is what a worker of this role does done by somebody? A unified one is in need of nobody, and
    a pair does what it does."""

    def anybody(one: Role) -> bool:
        return any(map(able, fleet.selectable(one, model)))

    if anybody(role) or anybody(Role.BOTH):
        return True
    return role is Role.BOTH and anybody(Role.PREFILL) and anybody(Role.DECODE)


def _well(target: Target, alone: bool, ports: PORTS) -> Iterable[Finding]:
    name, about = str(target.worker), f"worker {target.worker}"
    lost = target.pulse.lost
    if lost is not None:
        sentence = f"no decode can find {target.role} {name}: {lost}"
        yield _unfound(about, alone, target.up, lost.stage, sentence, lost.reason, ports)
    if target.draining:
        under_way = f"{target.inflight_requests} under way"
        sentence = f"{target.role} {name} is drained by hand: {under_way}"
        step = "PUT /workers/ID {draining: false} takes it back in"
        yield Finding(about, alone, sentence, "operator", step, Stage.AVAILABILITY, "drained")


def _circuit(
    target: Target, alone: bool, breakers: Breakers, states: Mapping[Worker, State], now: float
) -> Iterable[Finding]:
    state = states.get(target.worker, State.CLOSED)
    if state is State.CLOSED:
        return
    name, wait = str(target.worker), breakers.wait_s([target.worker], now)
    sentence = f"{target.role} {name} failed too often: its circuit is {state}"
    step = f"tried again in {wait:.0f} s by itself; GET /rooms?failed=1 tells what failed"
    about = f"worker {name}"
    yield Finding(about, alone, sentence, name, step, Stage.AVAILABILITY, "circuit-open")


def _knowledge(target: Target, fact: Known | None, drift: Verdict | None) -> Iterable[Finding]:
    """Is what the index says about this worker to be believed? Decodes are chosen by load."""
    if target.role is Role.DECODE:
        return
    name, about = str(target.worker), f"worker {target.worker}"

    def finding(sentence: str, culprit: str, step: str, rule: Rule) -> Finding:
        return Finding(about, False, sentence, culprit, step, Stage.POLICY_INPUT, rule)

    if not target.up.events:
        sentence = f"{target.role} {name} publishes no KV events: it is chosen by load alone"
        yield finding(
            sentence, name, "switch its KV events on, or name them with --events", "no-events"
        )
        return
    if drift is not None:
        rule = RULES.get(drift.cause, "drift")
        yield finding(drift.sentence, drift.culprit, drift.next_step, rule)
        if drift.cause is Cause.SILENT:
            return  # says more than ingest can
    if fact is None or fact.state is Knowledge.DARK:
        why = "nothing was heard of them" if fact is None else fact.reason
        sentence = f"the KV events of {name} are not heard: {why}"
        step = f"see that {target.up.events[0]} can be reached from ingest, and that ingest runs"
        yield finding(sentence, f"event stream of {name}", step, "stream-silent")
    elif fact.state is not Knowledge.EXACT:
        sentence = f"knowledge of {name} is {fact.state}: {fact.reason}"
        step = "it ends by itself once an ingest follows the whole stream; if not, look at its log"
        yield finding(sentence, name, step, "stream-partial")

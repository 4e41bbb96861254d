"""Lines: one worker as the page shows it: role, load, circuit, knowledge, blocks, foresight.

Edge: looks at fleet, circuits, view and our own checks, and changes none; time is an argument.
picture.py asks. Open it to show something more of a worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.registry import Collector

from kvplane.vocabulary import Knowledge, Tier, Worker

from ..belief import WORSE
from ..breaker import State
from ..fleet import Waited
from ..gateway import Gateway
from ..target import Target

TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)  # as the view counts them
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Counted:
    """Counters of all workers, by name, read once for all lines."""

    predicted: Mapping[str, float]
    actual: Mapping[str, float]
    circuits: Mapping[Worker, State]
    errors: Mapping[Worker, tuple[float, float]]


def workers(gateway: Gateway, waiting: Iterable[Waited], now: float, wall: float) -> list[Json]:
    """All that serve, by role and name, then those that do not serve yet."""
    counted = Counted(
        {labels["worker"]: value for labels, value in samples(gateway.metrics.predicted)},
        {labels["worker"]: value for labels, value in samples(gateway.metrics.actual)},
        gateway.breakers.states(now),
        gateway.loop.errors(),
    )
    found = [_line(gateway, target, counted, now, wall) for target in gateway.fleet.targets()]
    pods = {up.pod for up in gateway.fleet.pods()}
    found += [_waiting(one) for one in waiting if one.declared.pod not in pods]
    order = {"prefill": 0, "both": 1, "decode": 2}
    return sorted(found, key=lambda line: (order.get(line["role"], 3), line["worker"]))


def _line(gateway: Gateway, target: Target, counted: Counted, now: float, wall: float) -> Json:
    name, worker = str(target.worker), target.worker
    known, reason = believed(gateway, target)
    verdict = gateway.loop.verdict(worker)
    over, under = counted.errors.get(worker, (0.0, 0.0))
    circuit = counted.circuits.get(worker, State.CLOSED)
    return {
        "worker": name,
        "role": str(target.role),
        "url": target.url,
        "engine": target.up.engine,
        "model": target.model,
        "state": health(target),
        "trouble": trouble(target),
        "since_s": round(max(0.0, now - target.pulse.since), 1),
        "inflight_tokens": target.inflight_tokens,
        "inflight_requests": target.inflight_requests,
        "circuit": str(circuit),
        "circuit_wait_s": _wait_s(gateway, worker, circuit, now),
        "knowledge": str(known),
        "reason": reason,
        "predicted_tokens": int(counted.predicted.get(name, 0)),
        "actual_tokens": int(counted.actual.get(name, 0)),
        "error_share": round(over + under, 4),
        "drift": verdict.sentence if verdict else "",
        **_held(gateway, worker, wall),
    }


def _held(gateway: Gateway, worker: Worker, wall: float) -> Json:
    """What the index says it holds."""
    facts = gateway.view.facts(worker)
    counts = facts.counts if facts else [0] * len(TIERS)
    heard = facts.heard if facts else None
    return {
        "epoch": facts.epoch if facts else None,
        "block_size": facts.block_size if facts else None,
        "blocks": {tier.value: count for tier, count in zip(TIERS, counts, strict=True)},
        "last_event_age_s": None if heard is None else round(max(0.0, wall - heard), 1),
        "gaps": facts.gaps if facts else 0,
    }


def health(target: Target) -> str:
    """One word: serving, draining, unhealthy, lost."""
    if target.pulse.draining:
        return "draining"
    if not target.pulse.healthy:
        return "unhealthy"
    return "lost" if target.pulse.lost else "serving"


def trouble(target: Target) -> str:
    """Why it is not serving, beside that word."""
    if target.pulse.draining:
        return f"{target.inflight_requests} under way"
    if not target.pulse.healthy:
        return target.pulse.reason
    return str(target.pulse.lost or "")


def believed(gateway: Gateway, target: Target) -> tuple[Knowledge, str]:
    """How far the index may be believed here: the worse of what ingest says and our own checks."""
    if not target.up.events:
        return Knowledge.OFF, "its events are not configured"
    known, doubt = gateway.view.known(target.worker), gateway.loop.doubt(target.worker)
    told = (known.state, known.reason) if known else (Knowledge.DARK, "nothing heard of it yet")
    if doubt is not None and WORSE.index(doubt[0]) >= WORSE.index(told[0]):
        return doubt
    return told


def _wait_s(gateway: Gateway, worker: Worker, circuit: State, now: float) -> float:
    return 0.0 if circuit is State.CLOSED else round(gateway.breakers.wait_s([worker], now), 1)


def _waiting(one: Waited) -> Json:
    up = one.declared
    return {
        "worker": str(up.pod),
        "role": str(up.role),
        "url": up.url,
        "engine": up.engine,
        "model": up.model,
        "state": "waiting",
        "trouble": one.reason,
    }


def samples(counter: Collector) -> list[tuple[dict[str, str], float]]:
    """What a counter stands at, by its labels; asking makes no new one."""
    found = [sample for family in counter.collect() for sample in family.samples]
    return [(sample.labels, sample.value) for sample in found if sample.name.endswith("_total")]

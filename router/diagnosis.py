"""Diagnosis: what is wrong, whose fault is it, and what should a person do next?

Pure: rules over the fleet, its circuits, what the index knows, and the evidence of attempts.
diagnosing.py brings the facts. The rules are in diagnosis_plane.py, diagnosis_workers.py,
diagnosis_rooms.py and patterns.py. Open it to change what is looked at, or what comes first. Says
nothing where nothing is wrong.

    plane    pool empty, shapes differ, store away or evicting       worker   wrong role, unhealthy,
    room     the first stage that failed, and why                             circuit, ranks, events
    pattern  nothing ends, clients leave, one culprit in most failures
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvplane.bootstrap import compatible
from kvplane.vocabulary import Known, Pod, Shape, Worker, WorkerUp

from .breaker import Breakers
from .diagnosis_plane import crowd, ingest, plane, store
from .diagnosis_rooms import attempts, no_tokens
from .diagnosis_workers import named, not_serving, workers
from .findings import Finding, ordered
from .fleet import Fleet, Waited
from .meeting import Meeting
from .patterns import patterns
from .verdicts import Verdict

DOWN = ("connection-refused", "unhealthy", "pool-down")
RECENT_S = 300.0  # evidence that is older says nothing about now
MOST_ATTEMPTS = 2000  # of those, the newest


@dataclass(frozen=True, slots=True)
class Scene:
    """All that the rules look at."""

    fleet: Fleet
    breakers: Breakers
    now: float  # monotonic
    known: Callable[[Worker], Known | None]
    drift: Callable[[Worker], Verdict | None] = lambda worker: None
    waiting: Sequence[Waited] = ()
    declared: Mapping[Pod, WorkerUp] = field(default_factory=dict)  # as a person named them
    told_ports: Mapping[Pod, int] = field(default_factory=dict)  # bootstrap ports engines tell
    meetings: Sequence[Meeting] = ()  # newest first
    refused: Sequence[Meeting] = ()  # for whom nobody was chosen, newest first
    queues: Mapping[str, str] = field(default_factory=dict)  # of stuck workers, as they say
    crowd: tuple[int, int, int] = (0, 0, 0)  # requests under way, that wait, that may wait
    ingest_lives: bool = True
    store_refuses: str = ""  # why the index store takes no ingest's word
    store_down_s: float = 0.0
    store_unfit: str = ""  # why the index store may throw parts of the index away
    compatible: Callable[[Shape, Shape], Sequence[str]] = compatible


def findings(scene: Scene) -> list[Finding]:
    """Everything that is wrong; what blocks comes first."""
    standing = list(_standing(scene))
    return ordered(_once(_followed(standing, list(_happened(scene)))))


def report(scene: Scene) -> dict[str, Any]:
    """The same, ready for JSON."""
    found = findings(scene)
    first = next((one for one in found if one.blocks), None)
    return {
        "ok": not found,
        "blocked": first is not None,
        "first": None if first is None else first.shown(),
        "findings": [one.shown() for one in found],
    }


def _standing(scene: Scene) -> Iterable[Finding]:
    """What is wrong whether somebody asks or not."""
    yield from plane(scene.fleet, scene.waiting, scene.declared, scene.compatible)
    yield from crowd(*scene.crowd)
    yield from store(scene.store_down_s, scene.store_unfit)
    yield from named(scene.fleet, scene.declared)
    yield from not_serving(scene.fleet, scene.waiting, scene.told_ports)
    yield from ingest(scene.fleet, scene.ingest_lives, scene.store_refuses)
    for one in workers(
        scene.fleet, scene.breakers, scene.now, scene.known, scene.drift, scene.told_ports
    ):
        if scene.ingest_lives or one.rule != "stream-silent":
            yield one


def _happened(scene: Scene) -> Iterable[Finding]:
    """What requests ran into lately."""
    since = scene.now - RECENT_S
    recent = [one for one in scene.meetings[:MOST_ATTEMPTS] if _last(one, scene.now) >= since]
    refused = [one for one in scene.refused if one.begun >= since]
    yield from attempts(recent, refused, scene.fleet)
    yield from no_tokens(recent)
    yield from patterns(recent, scene.now, scene.queues)


def _last(meeting: Meeting, now: float) -> float:
    return now if meeting.ended is None else meeting.ended


def _followed(standing: Sequence[Finding], happened: Sequence[Finding]) -> Iterable[Finding]:
    """Whatever failed at a worker that is dead or ill is one thing with that; that nobody could be
    chosen is one with what is wrong with that pool of its model, or else with the first thing that
    keeps it from being served. Whose circuit is open while others serve fails nobody now."""
    worst = [one for one in ordered(standing) if one.blocks]
    first = next(iter(worst), None)
    keepers = {id(one): _keeper(one, worst) for one in happened if one.rule == "nobody-chosen"}
    down = {one.culprit for one in standing if one.rule in DOWN}
    told: set[int] = set()
    for one in standing:
        same = [
            other
            for other in happened
            if (one.rule in DOWN and other.culprit == one.culprit)
            or (one is first and other.rule == "retries-used-up" and _all_of(other, down))
            or one is keepers.get(id(other))
        ]
        told.update(map(id, same))
        alone = [other for other in same if other.rule != "retries-used-up"]  # is made of others
        rooms = tuple(room for other in alone for room in other.rooms)
        count = sum(other.count for other in alone) or one.count
        yield replace(one, rooms=rooms, count=count) if same else one
    aside = {one.culprit for one in standing if one.rule == "circuit-open" and not one.blocks}
    for one in happened:
        if id(one) not in told:
            yield replace(one, blocks=one.blocks and not _all_of(one, aside))


def _keeper(refused: Finding, worst: Iterable[Finding]) -> Finding | None:
    """What kept these from being served; another model's lack did not."""
    may = [one for one in worst if "" in (one.model, refused.model) or one.model == refused.model]
    pool = (one for one in may if one.culprit == refused.culprit)
    return next(pool, next(iter(may), None))


def _all_of(finding: Finding, culprits: Collection[str]) -> bool:
    return all(name in culprits for name in finding.culprit.split(" and "))


def _once(found: Iterable[Finding]) -> list[Finding]:
    """One finding for each culprit and rule: the standing one says it better than the rooms."""
    kept: dict[tuple[str, str, str], Finding] = {}
    for one in found:
        about = one.about if one.rule == "drift" else one.model
        kept.setdefault((one.rule, one.culprit, about), one)
    return list(kept.values())

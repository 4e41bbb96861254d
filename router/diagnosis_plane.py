"""Diagnosis of the plane: is there anybody, do they fit, and does the index store keep all?

Pure. Rules of diagnosis.py about no single worker. Open it to change when a model counts as not
served, or what is said of a pair that cannot meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvplane.vocabulary import Pod, Role, Shape, Stage, WorkerUp

from .findings import MOST_NAMED, STAGES, Finding
from .fleet import Fleet, Waited
from .pairing import misfit
from .policies import Candidate

Compatible = Callable[[Shape, Shape], Sequence[str]]
DOWN_S = 1.0  # shorter absences of the store are nobody's business


def plane(
    fleet: Fleet,
    waiting: Sequence[Waited],
    declared: Mapping[Pod, WorkerUp],
    compatible: Compatible,
) -> Iterable[Finding]:
    """Can each model be served by a pair, or by a unified worker? Where there are workers that
    cannot be used, or are something else than they were named as, each says so itself."""
    told = [(declared.get(up.pod, up).role, up) for up in fleet.pods()]
    mistaken = {role for role, up in told if role is not up.role}  # each says so itself
    if not fleet.pods() and not waiting:
        yield _empty("no worker is named", "plane", STAGES[Stage.POOL][1])
    found = {up.model for up in fleet.pods()} or {one.declared.model for one in waiting}
    for model in sorted(found - {""} or found):  # who tells no model serves all of them
        if fleet.selectable(Role.BOTH, model):
            continue
        for side in (Role.PREFILL, Role.DECODE):
            if side not in mistaken and not _any(fleet, waiting, side, model):
                yield _unnamed(fleet, side, model)
            yield from _all_gone(fleet, waiting, side, model)
        yield from _misfits(fleet, model, compatible)


def _all_gone(fleet: Fleet, waiting: Sequence[Waited], side: Role, model: str) -> Iterable[Finding]:
    """Several are named and none of them is left. One alone says so itself."""
    if fleet.selectable(side, model):
        return
    here = [one for one in fleet.targets(side) if one.serves(model) and not one.worker.dp_rank]
    names = [f"{one.worker.pod} ({one.trouble or 'not used'})" for one in here]
    names += [f"{one.declared.pod} ({one.reason})" for one in _coming(waiting, side, model)]
    if len(names) < 2:
        return
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    sentence = f"model {model!r}: no {side} of {len(names)} is left: "
    sentence += ", ".join(names[:MOST_NAMED]) + more
    step = f"bring one {side} back, or name another with --{side}; what keeps each is said below"
    yield Finding(
        "plane", True, sentence, f"{side} pool", step, Stage.POOL, "pool-down", model=model
    )


def _unnamed(fleet: Fleet, side: Role, model: str) -> Finding:
    """Nobody of this side is there for a model; maybe somebody is for another one."""
    others = sorted({one.model for one in fleet.targets(side)})
    but = f" ({side}s that are serve {', '.join(map(repr, others))})" if others else ""
    of = f" of model {model!r}" if model else ""
    said = f"{of[4:]}: no" if model else "no"
    step = f"start a {side}{of}, or name one with --{side}"
    return _empty(f"{said} {side} worker is named{but}", f"{side} pool", step, model)


def _empty(sentence: str, culprit: str, step: str, model: str = "") -> Finding:
    return Finding("plane", True, sentence, culprit, step, Stage.POOL, "pool-empty", model=model)


def _any(fleet: Fleet, waiting: Sequence[Waited], side: Role, model: str) -> bool:
    """Is there somebody who could, well or not? A unified worker is in need of nobody else."""
    return any(
        any(target.serves(model) for target in fleet.targets(role))
        or bool(_coming(waiting, role, model))
        for role in (side, Role.BOTH)
    )


def _coming(waiting: Sequence[Waited], role: Role, model: str) -> list[Waited]:
    found = (one for one in waiting if one.declared.role is role)
    return [one for one in found if one.declared.model in ("", model)]


def _misfits(fleet: Fleet, model: str, compatible: Compatible) -> Iterable[Finding]:
    """Workers that could be used and fit nobody of the other side."""
    prefills, decodes = fleet.selectable(Role.PREFILL, model), fleet.selectable(Role.DECODE, model)
    if not prefills or not decodes:
        return
    fits = {
        one.worker: [
            other for other in decodes if not misfit(Candidate(one), Candidate(other), compatible)
        ]
        for one in prefills
    }
    blocks = not any(fits.values())
    for one in prefills:
        if fits[one.worker]:
            continue
        why = "; ".join(misfit(Candidate(one), Candidate(decodes[0]), compatible))
        sentence = f"prefill {one.worker} fits no decode; {decodes[0].worker} differs in {why}"
        step = (
            "start both sides with the same page size, KV dtype and layout, and sizes that divide"
        )
        culprit = f"{one.worker} and {decodes[0].worker}"
        about = f"worker {one.worker}"
        yield Finding(about, blocks, sentence, culprit, step, Stage.PAIR, "shapes-differ")


def crowd(running: int, waiting: int, queue: int) -> Iterable[Finding]:
    """As many are let in as may be, and others wait for a place."""
    if not waiting:
        return
    full = waiting >= queue
    then = "the next one is answered 429" if full else f"{queue - waiting} more may"
    sentence = f"{running} requests are under way, as many as are let in, {waiting} wait and {then}"
    step = "more workers; or, where these have room, more --max-concurrent-requests"
    yield Finding("plane", full, sentence, "gateway", step, Stage.POOL, "gateway-full")


def ingest(fleet: Fleet, lives: bool, refuses: str = "") -> Iterable[Finding]:
    """Without anybody who follows events no engine is to blame that they are not heard; nor an
    ingest where its word is not taken."""
    followed = [one for one in fleet.targets() if one.up.events and one.role is not Role.DECODE]
    if lives or not followed:
        return
    who = "what one worker holds" if len(followed) == 1 else f"what {len(followed)} workers hold"
    sentence = f"no ingest lives: nothing is known of {who}, load alone decides"
    if refuses:
        sentence = f"the index store takes no writes, and no ingest's sign of life: {refuses}"
        step = "give it the memory it needs (maxmemory); or name its master with --redis everywhere"
        yield Finding(
            "plane", False, sentence, "index store", step, Stage.POLICY_INPUT, "store-refuses"
        )
        return
    step = "start kvplane ingest with the same --redis and workers; its log says why it ended"
    yield Finding("plane", False, sentence, "ingest", step, Stage.POLICY_INPUT, "no-ingest")


def store(down_s: float, unfit: str) -> Iterable[Finding]:
    """What was known is still used, and believed in part at most."""
    if down_s > DOWN_S:
        sentence = f"the index store does not answer since {down_s:.0f} s"
        step = "see that --redis can be reached from here; what was known is used meanwhile"
        yield Finding(
            "plane", False, sentence, "index store", step, Stage.POLICY_INPUT, "store-away"
        )
    if unfit:
        step = "CONFIG SET maxmemory-policy noeviction, and give it the memory it needs"
        yield Finding(
            "plane", False, unfit, "index store", step, Stage.POLICY_INPUT, "store-evicts"
        )

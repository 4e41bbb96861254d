"""Answers: how does what we know look to people and programs?

Pure: view, fleet and time in, plain dicts out; api.py makes JSON of them, and lines.py of what
POST /rank says of a worker. Open it to add a fact to an answer of interface.md section 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvplane.vocabulary import (
    BlockHash,
    Group,
    Knowledge,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

from .facts import Facts
from .hashing import to_hex
from .view import TIERS, View

SHOWN_TIERS = (Tier.GPU, Tier.CPU, Tier.DISK)  # always shown; remote only where there is some
Fleet = Mapping[Worker, WorkerUp]
Doubts = Mapping[Worker, tuple[Knowledge, str]]
WORSE = list(Knowledge)  # worst last


def fleet_of(ups: Sequence[WorkerUp]) -> dict[Worker, WorkerUp]:
    """Every dp rank of every pod that discovery knows."""
    return {Worker(up.pod, rank): up for up in ups for rank in range(up.dp_size)}


def everybody(view: View, fleet: Fleet) -> list[Worker]:
    """Workers that discovery or events told us of."""
    return sorted({*view.workers(), *fleet})


def trust(
    view: View, fleet: Fleet, worker: Worker, away_s: float, doubts: Doubts | None = None
) -> tuple[Knowledge, str]:
    """How far to believe what we say of a worker, and why not further. `doubts`: what others who
    look at it hold against it; the worse word counts.

    A block size that is not the configured one is said, not punished: each worker is judged on
    the size that its events have.
    """
    state, reason = _believed(view, fleet, worker, away_s)
    doubt = doubts.get(worker) if doubts else None
    if doubt is not None and WORSE.index(doubt[0]) >= WORSE.index(state):
        state, reason = doubt
    size, configured = view.block_size(worker), _configured(view, fleet, worker)
    if configured is None:
        return state, reason
    sizes = f"block size {size} by its events, {configured} by configuration"
    return state, f"{reason}; {sizes}" if reason else sizes


def _believed(view: View, fleet: Fleet, worker: Worker, away_s: float) -> tuple[Knowledge, str]:
    known, up = view.known(worker), fleet.get(worker)
    if known is None and up is not None and not up.events:
        return Knowledge.OFF, "events are not configured for this worker"
    if known is None:
        return Knowledge.DARK, "nothing heard of this worker yet"
    if known.state is Knowledge.EXACT and away_s > 1:
        return Knowledge.PARTIAL, f"the index store does not answer since {away_s:.0f} s"
    return known.state, known.reason


def _configured(view: View, fleet: Fleet, worker: Worker) -> int | None:
    """The block size that discovery tells, where events tell another."""
    size, up = view.block_size(worker), fleet.get(worker)
    told = up.block_size if up else None
    return told if size and told and size != told else None


def worker(
    view: View,
    fleet: Fleet,
    one: Worker,
    now: float,
    away_s: float,
    doubts: Doubts | None = None,
) -> dict[str, Any]:
    """One element of GET /workers; `now` is the wall clock."""
    state, reason = trust(view, fleet, one, away_s, doubts)
    facts, up = view.facts(one), fleet.get(one)
    facts = facts or Facts(one, None)  # type: ignore[arg-type]
    heard = facts.heard
    return {
        **who(fleet, one),
        "role": up.role if up else None,
        "epoch": facts.epoch,
        "sequence": facts.last,
        "block_size": block_size(view, fleet, one),
        "blocks": shown_tiers(dict(zip(TIERS, facts.counts, strict=True))),
        "last_event_age_s": None if heard is None else round(max(0.0, now - heard), 3),
        "gaps": facts.gaps,
        "knowledge": state,
        "reason": reason,
        **odd_size(view, fleet, one),
        **_groups(facts),
    }


def _groups(facts: Facts) -> dict[str, Any]:
    """Only where there are some: cache groups of a hybrid model, beside the counted one."""
    rules = [further.rule for _, further in sorted(facts.groups.items())]
    shown = [{"group": r.number, "kind": r.kind, "tokens": r.tokens} for r in rules]
    return {"groups": shown} if shown else {}


def odd_size(view: View, fleet: Fleet, one: Worker) -> dict[str, Any]:
    """The configured block size, where events tell another."""
    configured = _configured(view, fleet, one)
    return {} if configured is None else {"configured_block_size": configured}


def block_size(view: View, fleet: Fleet, one: Worker) -> int | None:
    """As its events tell; before the first of them as discovery does."""
    up = fleet.get(one)
    return view.block_size(one) or (up.block_size if up else None)


def who(fleet: Fleet, one: Worker) -> dict[str, Any]:
    """Its name, where it is reached, and which rank it is."""
    up = fleet.get(one)
    return {"worker": str(one), "url": up.url if up else None, "dp_rank": one.dp_rank}


def shown_tiers(counts: Mapping[Tier, int]) -> dict[str, int]:
    """Blocks by tier; remote only where there are some."""
    shown = {tier.value: counts.get(tier, 0) for tier in SHOWN_TIERS}
    if counts.get(Tier.REMOTE):
        shown[Tier.REMOTE.value] = counts[Tier.REMOTE]
    return shown


def block(view: View, fleet: Fleet, one: BlockHash) -> dict[str, Any]:
    """The answer of GET /blocks/{hash}."""
    holders = [
        {**who(fleet, holder), "epoch": view.epoch(holder), "tiers": list(tiers)}
        for holder, tiers in sorted(view.holders(one).items())
    ]
    return {"block": to_hex(one), "holders": holders}


def stats(view: View) -> dict[str, Any]:
    """The answer of GET /stats, cursor and lag excepted."""
    size = view.size()
    every = [facts for one in view.workers() if (facts := view.facts(one))]
    counts = {tier: sum(facts.counts[at] for facts in every) for at, tier in enumerate(TIERS)}
    return {
        "workers": size.workers,
        "blocks": size.blocks,
        "holdings": size.holdings,
        "tiers": shown_tiers(counts),
        "runs": size.runs,
        "bytes": size.bytes,
        "block_sizes": list(view.block_sizes()),
    }


def snapshot(view: View, one: Worker, cursor: str, text: bool) -> Iterator[dict[str, Any]]:
    """A head that says where it is true, then stretches of chained blocks; hex where text.

    The view is read before this returns, in one step, so that the cursor fits; what is returned may
    be consumed later and in another thread.
    """
    facts = view.facts(one)
    assert facts is not None, "asked only for workers the view knows"
    stretches = [*view.held(one), *_further(facts)]
    head = {
        "version": 1,
        "worker": str(one),
        "epoch": facts.epoch,
        "sequence": facts.last,
        "block_size": facts.block_size,
        "cursor": cursor,
        "stretches": len(stretches),
    }
    return _lines(head, stretches, text)


def _lines(
    head: dict[str, Any], stretches: Sequence[Stored], text: bool
) -> Iterator[dict[str, Any]]:
    yield head
    for held in stretches:
        shown: list[Any] = [to_hex(b) for b in held.blocks] if text else list(held.blocks)
        parent: Any = held.parent
        if text and parent is not None:
            parent = to_hex(parent)
        line = {"tier": held.tier, "parent": parent, "blocks": shown}
        yield line if held.group is None else {**line, "group": _rule(held.group)}


def _further(facts: Facts) -> Iterator[Stored]:
    """What further cache groups hold; one that holds nothing is shown to be there."""
    for _, further in sorted(facts.groups.items()):
        for tier, blocks in zip(TIERS, further.held, strict=True):
            if blocks or (tier is Tier.GPU and not any(further.held)):
                named, size = tuple(map(BlockHash, sorted(blocks))), facts.block_size or 0
                rule = further.rule
                yield Stored(facts.worker, facts.epoch, tier, None, named, size, rule)


def _rule(of: Group) -> dict[str, Any]:
    """As in the records of the change stream."""
    shown = {"number": of.number, "kind": of.kind, "tokens": of.tokens}
    return {**shown, "block_size": of.block_size}

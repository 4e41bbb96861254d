"""View: what do we know of every worker, and how deep does each hold a prompt?

Pure: the whole index in memory; time comes with the changes. follower.py feeds it, ranking.py and
api.py ask it; forest.py below it keeps the blocks. Open it to change what a Change means to a
reader.

    Stored, Removed   bits of the worker's ordinal          Known     its words are kept
    Cleared           a new ordinal, so the old bits are void at once; GONE forgets the worker

A fact of an older epoch is void and ignored; one of a newer epoch begins that life first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Known,
    Removed,
    Stored,
    Tier,
    Worker,
)

from .forest import Forest, Step
from .runs import TIERS as TIER_COUNT
from .stores.rows import Row, decode, group_of

if TYPE_CHECKING:
    from .stores.base import Snapshot

TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)  # order of counts and of slots
_NUMBER = {tier: number for number, tier in enumerate(TIERS)}
_SWEEP_RUNS = 64  # wiped beside each change while anything is dead


@dataclass(slots=True)
class Facts:
    """What is known of one worker beside its blocks. Read it; only the view writes."""

    worker: Worker
    epoch: Epoch
    ordinal: int | None = None  # None until it stores something
    counts: list[int] = field(default_factory=lambda: [0] * TIER_COUNT)  # blocks per tier
    last: int | None = None  # number of the last batch applied
    heard: float | None = None  # wall clock of that, seconds
    block_size: int | None = None  # tokens
    known: Known | None = None
    gaps: int = 0  # gaps that stayed open, in all lives seen


@dataclass(frozen=True, slots=True)
class Size:
    """How big the view is."""

    workers: int
    blocks: int  # distinct
    holdings: int  # a block once per worker and tier
    runs: int
    bytes: int  # estimated


class View:
    """Who holds which block, now."""

    def __init__(self) -> None:
        self._forest = Forest()
        self._facts: dict[Worker, Facts] = {}
        self._owner: dict[int, Facts] = {}  # by ordinal

    # -- being told --------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Take over one change."""
        facts = self._meet(change)
        if facts is None:
            return
        if isinstance(change, Stored):
            self._stored(facts, change)
        elif isinstance(change, Removed):
            self._removed(facts, change)
        elif isinstance(change, Cleared):
            self._cleared(facts, change)
        else:
            facts.known = change
        self._forest.sweep(_SWEEP_RUNS)

    def _meet(self, change: Change) -> Facts | None:
        facts = self._facts.get(change.worker)
        if facts is None:
            facts = self._facts[change.worker] = Facts(change.worker, change.epoch)
        elif change.epoch < facts.epoch:
            return None
        elif change.epoch > facts.epoch:
            self._void(facts)
            facts.epoch, facts.last, facts.known = change.epoch, None, None
        return facts

    def _stored(self, facts: Facts, change: Stored) -> None:
        if facts.ordinal is None:
            facts.ordinal = self._forest.take()
            self._owner[facts.ordinal] = facts
        facts.block_size = change.block_size
        tier = _NUMBER[change.tier]
        slot = facts.ordinal << 2 | tier
        facts.counts[tier] += self._forest.store(slot, change.parent, change.blocks)

    def _removed(self, facts: Facts, change: Removed) -> None:
        if facts.ordinal is not None:
            tier = _NUMBER[change.tier]
            facts.counts[tier] -= self._forest.remove(facts.ordinal << 2 | tier, change.blocks)

    def _cleared(self, facts: Facts, change: Cleared) -> None:
        if change.reason is ClearReason.GAP:
            facts.gaps += 1
        if change.reason is ClearReason.GONE:
            self._void(facts)
            del self._facts[facts.worker]
        elif change.tier is None:
            self._void(facts)
        elif facts.ordinal is not None and facts.counts[_NUMBER[change.tier]]:
            self._forest.drop_slot(facts.ordinal << 2 | _NUMBER[change.tier])
            facts.counts[_NUMBER[change.tier]] = 0

    def _void(self, facts: Facts) -> None:
        if facts.ordinal is not None:
            self._forest.retire(facts.ordinal)
            del self._owner[facts.ordinal]
            facts.ordinal, facts.counts = None, [0] * TIER_COUNT

    def note(self, worker: Worker, epoch: Epoch, last: int | None, at: float) -> None:
        """A batch of this worker is applied: its number and when the store took it (wall clock)."""
        facts = self._facts.get(worker)
        if facts is not None and facts.epoch == epoch and last is not None:
            facts.last, facts.heard = last, at

    def load(self, snapshot: Snapshot) -> None:
        """Begin again from a snapshot."""
        self.become(View())
        for state in snapshot.workers:
            facts = self._facts[state.worker] = Facts(state.worker, state.epoch, last=state.last)
            facts.known = state.known[-1] if state.known else None
            values = [decode(value) for key, value in state.table.items() if group_of(key) is None]
            for tier in TIERS:
                rows = [v for v in values if isinstance(v, Row) and v.copies[_NUMBER[tier]]]
                for parent, blocks in _chains(rows):
                    size = rows[0].block_size
                    stored = Stored(state.worker, state.epoch, tier, parent, blocks, size)
                    self._stored(facts, stored)

    def become(self, other: View) -> None:
        """Take over another view whole, in one step; `other` is not to be used after."""
        self.__dict__.update(other.__dict__)

    def sweep(self, most_runs: int = 1024) -> bool:
        """Wipe some of what is void; True while there is more. Never needed for right answers."""
        return self._forest.sweep(most_runs)

    # -- being asked -------------------------------------------------------------------------

    def depths(
        self, blocks: Sequence[BlockHash], workers: Collection[Worker] | None = None, size: int = 0
    ) -> dict[Worker, tuple[int, dict[Tier, int]]]:
        """Depth in blocks, and how many of them lie best in each tier; holders of none left out.

        Only of `workers`, and of those with this block size (0 = any).
        """
        found, path = self._forest.depths(blocks, self._mask(workers, size))
        depths: dict[Worker, tuple[int, dict[Tier, int]]] = {}
        for mask, depth in found:
            while mask and depth:
                low = mask & -mask
                mask ^= low
                facts = self._owner[low.bit_length() - 1]
                depths[facts.worker] = depth, self._tiers(facts, path, depth)
        return depths

    def _tiers(self, facts: Facts, path: Sequence[Step], depth: int) -> dict[Tier, int]:
        if not any(facts.counts[1:]):
            return {Tier.GPU: depth}
        assert facts.ordinal is not None, "a worker with blocks has an ordinal"
        best = self._forest.tiers(path, facts.ordinal, depth)
        return {tier: count for tier, count in zip(TIERS, best, strict=True) if count}

    def _mask(self, workers: Collection[Worker] | None, size: int) -> int:
        if workers is None and not size:
            return self._forest.alive
        mask = 0
        for worker in self._facts if workers is None else workers:
            facts = self._facts.get(worker)
            if facts is None or facts.ordinal is None:
                continue
            if not size or facts.block_size == size:
                mask |= 1 << facts.ordinal
        return mask

    def holders(self, block: BlockHash) -> dict[Worker, tuple[Tier, ...]]:
        """Who holds one block, and where, best tier first."""
        found = self._forest.holders(block)
        return {self._owner[o].worker: tuple(TIERS[t] for t in found[o]) for o in sorted(found)}

    def held(self, worker: Worker) -> Iterator[Stored]:
        """All a worker holds, as changes that would build it. Looks at every run."""
        facts = self._facts.get(worker)
        if facts is None or facts.ordinal is None or facts.block_size is None:
            return
        for tier, parent, blocks in self._forest.held(facts.ordinal):
            above = None if parent is None else BlockHash(parent)
            named = tuple(map(BlockHash, blocks))
            yield Stored(worker, facts.epoch, TIERS[tier], above, named, facts.block_size)

    def workers(self) -> tuple[Worker, ...]:
        """All that live, in order."""
        return tuple(sorted(self._facts))

    def facts(self, worker: Worker) -> Facts | None:
        """None for a worker never heard of, or gone."""
        return self._facts.get(worker)

    def known(self, worker: Worker) -> Known | None:
        """How far we may be believed about a worker, as ingest wrote it."""
        facts = self._facts.get(worker)
        return facts.known if facts else None

    def epoch(self, worker: Worker) -> Epoch | None:
        """The life this view is in."""
        facts = self._facts.get(worker)
        return facts.epoch if facts else None

    def block_size(self, worker: Worker) -> int | None:
        """Tokens; None until the worker stored something."""
        facts = self._facts.get(worker)
        return facts.block_size if facts else None

    def block_sizes(self) -> tuple[int, ...]:
        """All block sizes in use, ascending."""
        return tuple(sorted({f.block_size for f in self._facts.values() if f.block_size}))

    def size(self) -> Size:
        """Totals; looks at every run."""
        holdings = sum(sum(facts.counts) for facts in self._facts.values())
        forest = self._forest
        return Size(len(self._facts), len(forest), holdings, forest.runs, forest.bytes())


def _chains(rows: list[Row]) -> Iterator[tuple[BlockHash | None, tuple[BlockHash, ...]]]:
    """(parent, blocks) of unbroken chains that hold every block of the rows once."""
    parent_of = {row.block: row.parent for row in rows}
    children: dict[BlockHash | None, list[BlockHash]] = {}
    for block, parent in parent_of.items():
        children.setdefault(parent, []).append(block)
    heads = [block for block, parent in parent_of.items() if parent not in parent_of]
    while heads:
        block = heads.pop()
        parent, chain = parent_of[block], [block]
        while followers := children.get(chain[-1]):
            heads.extend(followers[1:])
            chain.append(followers[0])
        yield parent, tuple(chain)

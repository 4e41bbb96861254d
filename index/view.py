"""View: what do we know of every worker, and how deep does each hold a prompt?

Pure: the whole index in memory; time comes with the changes. follower.py feeds it, ranking.py and
api.py ask it; forest.py below it keeps the blocks, facts.py the rest. Open it to change what a
Change means to a reader.

    Stored, Removed   bits of the worker's ordinal; of a further group: sets of its own, not counted
    Cleared           a new ordinal, so the old bits are void at once; GONE forgets the worker
    Known             the words of each ingest are kept

A fact of an older epoch is void and ignored; one of a newer epoch begins that life first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    Known,
    Removed,
    Stored,
    Tier,
    Worker,
)

from .facts import Facts, Further, Size, believed, is_gap
from .forest import Forest
from .loading import Chains, Sheet, pieces, read
from .owners import Owners
from .runs import TIERS as TIER_COUNT
from .steps import Step, tiers

if TYPE_CHECKING:
    from .stores.base import Entry, Snapshot, WorkerState

TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)  # order of counts and of slots
_number = TIERS.index  # a dict would ask a Tier for its hash, which is slow
_SWEEP_RUNS = 64  # wiped beside each change while anything is dead


class View:
    """Who holds which block, now."""

    living: frozenset[str] | None  # ingests that may be believed; None = nobody told yet, then all
    cut_off: frozenset[Worker]  # whose part of the store does not answer, while others do

    def __init__(self, forest: Forest | None = None) -> None:
        self.living, self.cut_off = None, frozenset()
        self._forest = Forest() if forest is None else forest  # shared with drafts of this view
        self._facts: dict[Worker, Facts] = {}
        self._owners = Owners()
        self.turn = 0  # another number whenever workers, lives, sizes or words may have changed
        self._listed: tuple[int, tuple[Worker, ...], tuple[int, ...]] = (-1, (), ())

    # -- being told --------------------------------------------------------------------------

    def apply(self, change: Change) -> None:
        """Take over one change."""
        facts = self._facts.get(change.worker)
        if facts is None or change.epoch != facts.epoch:
            facts = self._meet(facts, change)
            if facts is None:
                return
        if isinstance(change, Stored):
            if change.group is None:
                if facts.block_size != change.block_size:
                    facts.block_size, self.turn = change.block_size, self.turn + 1
                self._put(facts, _number(change.tier), change.parent, change.blocks)
            else:
                self._grouped(facts, change.group, change)
        elif isinstance(change, Removed):
            self._removed(facts, change)
        elif isinstance(change, Cleared):
            self._cleared(facts, change)
        else:
            facts.told(change, self.living)
            self.turn += 1
        if self._forest.untidy:
            self._forest.sweep(_SWEEP_RUNS)

    def take(self, entry: Entry) -> None:
        """Take over one step of the stream: its changes, its number and when the store took it.
        One that a snapshot holds already is safe to take again; its gap is counted there."""
        facts = self._facts.get(entry.worker)
        if facts is not None and facts.epoch == entry.epoch and facts.last is not None:
            again = entry.last is not None and entry.last <= facts.last
            facts.gaps -= sum(map(is_gap, entry.changes)) if again else 0
        for change in entry.changes:
            self.apply(change)
        self.note(entry.worker, entry.epoch, entry.last, entry.at)

    def _meet(self, facts: Facts | None, change: Change) -> Facts | None:
        self.turn += 1
        if facts is None:
            facts = self._facts[change.worker] = Facts(change.worker, change.epoch)
        elif change.epoch < facts.epoch:
            return None
        else:
            self._void(facts)
            facts.epoch, facts.last, facts.known, facts.groups = change.epoch, None, {}, {}
        return facts

    def _grouped(self, facts: Facts, group: Group, change: Stored) -> None:
        self._owners.hybrid = True
        further = facts.groups.setdefault(group.number, Further(group))
        further.rule = group
        further.held[_number(change.tier)].update(change.blocks)

    def _put(self, facts: Facts, tier: int, parent: int | None, blocks: Sequence[int]) -> None:
        if facts.ordinal is None:
            facts.ordinal = self._forest.take()
            self._owners.add(facts.ordinal, facts)
        if tier:
            self._owners.lower = True
        facts.counts[tier] += self._forest.store(facts.ordinal << 2 | tier, parent, blocks)

    def _removed(self, facts: Facts, change: Removed) -> None:
        tier = _number(change.tier)
        if change.group is not None:
            if further := facts.groups.get(change.group):
                further.held[tier].difference_update(change.blocks)
        elif facts.ordinal is not None:
            facts.counts[tier] -= self._forest.remove(facts.ordinal << 2 | tier, change.blocks)

    def _cleared(self, facts: Facts, change: Cleared) -> None:
        facts.gaps += is_gap(change)
        if change.reason is ClearReason.GONE:
            self._void(facts)
            del self._facts[facts.worker]
            self.turn += 1
        elif change.tier is None:
            self._void(facts)
        else:
            tier = _number(change.tier)
            for further in facts.groups.values():
                further.clear(tier)
            if facts.ordinal is not None and facts.counts[tier]:
                self._forest.drop_slot(facts.ordinal << 2 | tier)
                facts.counts[tier] = 0

    def _void(self, facts: Facts) -> None:
        for further in facts.groups.values():
            further.clear()
        if facts.ordinal is not None:
            self._forest.retire(facts.ordinal)
            self._owners.drop(facts.ordinal)
            facts.ordinal, facts.counts = None, [0] * TIER_COUNT

    def note(self, worker: Worker, epoch: Epoch, last: int | None, at: float) -> None:
        """A batch of this worker is applied: its number and when the store took it (wall clock)."""
        facts = self._facts.get(worker)
        if facts is not None and facts.epoch == epoch and last is not None:
            facts.last, facts.heard = max(last, facts.last or 0), at

    # -- beginning again ---------------------------------------------------------------------

    def draft(self) -> View:
        """A view that is filled while this one answers, over the same forest; then `adopt` it."""
        return View(self._forest)

    def build(self, state: WorkerState, sheet: Sheet, chains: Chains) -> Iterator[None]:
        """Take over what a snapshot says of one worker, a slice at each step."""
        facts = self._facts[state.worker] = Facts(state.worker, state.epoch, last=state.last)
        facts.heard, facts.gaps = state.heard, state.gaps
        facts.known = {known.by: known for known in state.known}
        facts.block_size, facts.groups = sheet.block_size, sheet.groups()
        self._owners.hybrid = self._owners.hybrid or bool(facts.groups)
        for piece in pieces(chains):
            if piece is None:
                yield
            else:
                self._put(facts, *piece)

    def adopt(self, draft: View, instead: Iterable[Worker]) -> None:
        """Take over a draft's workers in one step; those it is drawn `instead` of are forgotten."""
        for worker in {*instead, *draft._facts}:
            if facts := self._facts.pop(worker, None):
                self._void(facts)
        self._facts.update(draft._facts)
        self.turn += 1
        self._owners.join(draft._owners)

    def drop(self, forest: Forest | None = None) -> None:
        """Forget everybody; a draft that nobody will adopt gives back what it took, but not to what
        may be broken: `forest` is to go on with instead of the one that all drafts share."""
        if forest is not None:
            self._facts, self._forest, self._owners = {}, forest, Owners()
        for facts in self._facts.values():
            self._void(facts)
        self._facts, self.turn = {}, self.turn + 1

    def load(self, snapshot: Snapshot) -> None:
        """Begin again from a snapshot, in one go; a follower does the same in slices."""
        draft = self.draft()
        for state in snapshot.workers:
            sheet = read(state.table)
            for _ in draft.build(state, sheet, sheet.plan()):
                pass
        self.adopt(draft, self.workers())

    def sweep(self, most_runs: int = 256) -> bool:
        """Wipe some of what is void; True while there is more. Never needed for right answers."""
        return self._forest.sweep(most_runs)

    # -- being asked -------------------------------------------------------------------------

    def depths(
        self, blocks: Sequence[BlockHash], workers: Collection[Worker] | None = None, size: int = 0
    ) -> dict[Worker, tuple[int, dict[Tier, int]]]:
        """Depth in blocks, and how many of them lie best in each tier, of each of `workers` (None:
        all) that has this block size (0: any); holders of none left out."""
        found, path = self._forest.depths(blocks, self._owners.mask(self._facts, workers, size))
        reached = self._owners.reached(found, blocks).items()
        return {one: (depth, self._tiers(self._facts[one], path, depth)) for one, depth in reached}

    def prefixes(
        self, blocks: Sequence[BlockHash], workers: Collection[Worker] | None = None, size: int = 0
    ) -> dict[Worker, int]:
        """Depth in blocks alone, which is cheaper; else as `depths`."""
        found, _ = self._forest.depths(blocks, self._owners.mask(self._facts, workers, size))
        return self._owners.reached(found, blocks)

    def together(self, blocks: Sequence[BlockHash]) -> list[tuple[tuple[Worker, ...], int]]:
        """Of all workers, those of one depth together: nothing is done for each of many."""
        found, _ = self._forest.depths(blocks, self._owners.all)
        return self._owners.together(found, blocks)

    def _tiers(self, facts: Facts, path: Sequence[Step], depth: int) -> dict[Tier, int]:
        if not any(facts.counts[1:]):
            return {Tier.GPU: depth}
        assert facts.ordinal is not None, "who holds blocks has an ordinal"
        best = tiers(path, facts.ordinal, depth)
        return {tier: count for tier, count in zip(TIERS, best, strict=True) if count}

    def holders(self, block: BlockHash) -> dict[Worker, tuple[Tier, ...]]:
        """Who holds one block, and where, best tier first."""
        found = self._forest.holders(block)
        mine = sorted(ordinal for ordinal in found if ordinal in self._owners)
        return {self._owners[o].worker: tuple(TIERS[t] for t in found[o]) for o in mine}

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
        return self._list()[1]

    def block_sizes(self) -> tuple[int, ...]:
        """All block sizes in use, ascending."""
        return self._list()[2]

    def _list(self) -> tuple[int, tuple[Worker, ...], tuple[int, ...]]:
        if self._listed[0] != self.turn:
            sizes = {facts.block_size for facts in self._facts.values() if facts.block_size}
            self._listed = self.turn, tuple(sorted(self._facts)), tuple(sorted(sizes))
        return self._listed

    @property
    def plain(self) -> bool:
        """Every depth so far lies in GPU memory alone, and no further group caps one."""
        return not (self._owners.hybrid or self._owners.lower)

    def facts(self, worker: Worker) -> Facts | None:
        """None for a worker never heard of, or gone."""
        return self._facts.get(worker)

    def known(self, worker: Worker) -> Known | None:
        """How far we may be believed about a worker: the best that a living ingest says of it."""
        facts = self._facts.get(worker)
        return believed(facts, self.living, worker in self.cut_off) if facts else None

    def epoch(self, worker: Worker) -> Epoch | None:
        """The life this view is in."""
        facts = self._facts.get(worker)
        return facts.epoch if facts else None

    def block_size(self, worker: Worker) -> int | None:
        """Tokens; None until the worker stored something."""
        facts = self._facts.get(worker)
        return facts.block_size if facts else None

    def size(self) -> Size:
        """Totals; looks at every run."""
        holdings = sum(sum(facts.counts) for facts in self._facts.values())
        blocks, runs, weight = self._forest.blocks, len(self._forest.heads), self._forest.bytes()
        return Size(len(self._facts), blocks, holdings, runs, weight)

"""Exact: does the view answer as plain sets do, in the long run?

A small fleet lives badly: conversations that branch, holes, orphans, four tiers, restarts, late
words of an earlier life, workers that go. After each change there are some questions, and every
answer is compared. A wrong one is counted, and ends the benchmark with an error.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvplane.index import TIERS, View
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

QUERIES, SEED = 100_000, 5
EACH = 4  # questions after a change
WORKERS, PATHS = 12, 60
LENGTHS, LONG = (1, 64), 700  # blocks of a new path; of one in fifty, longer than any run
SIZE = 16

Answer = dict[Worker, tuple[int, dict[Tier, int]]]


@dataclass(frozen=True, slots=True)
class Exact:
    """How it went."""

    seed: int
    changes: int
    queries: int
    wrong: int
    seconds: float

    def line(self) -> str:
        """Questions and wrong answers."""
        told = f"(seed {self.seed}, {self.changes:,} changes, {self.seconds:.0f} s)"
        return f"{'exact':<44} {self.queries:>12,} {'queries':<10} {self.wrong} wrong {told}"


def rows(queries: int = QUERIES, seed: int = SEED) -> Iterator[Exact]:
    """One row."""
    view, sets, fleet = View(), Sets(), Fleet(random.Random(seed))
    changes = wrong = 0
    began = time.perf_counter()
    while changes * EACH < queries:
        change = fleet.change()
        view.apply(change)
        sets.apply(change)
        changes += 1
        if fleet.chance.random() < 0.05:
            view.sweep(fleet.chance.randint(1, 20))
        for _ in range(EACH):
            prompt, among = fleet.prompt(), fleet.some()
            wanted = sets.depths(prompt, among)
            depth = {worker: depth for worker, (depth, _) in wanted.items()}
            right = view.prefixes(prompt, among) == depth and view.depths(prompt, among) == wanted
            wrong += not right
    yield Exact(seed, changes, changes * EACH, wrong, time.perf_counter() - began)
    assert not wrong, f"{wrong} wrong answers, seed {seed}"


class Sets:
    """The same by the plainest means: a set for each worker and tier."""

    def __init__(self) -> None:
        self.held: dict[Worker, list[set[BlockHash]]] = {}
        self._epochs: dict[Worker, Epoch] = {}

    def apply(self, change: Change) -> None:
        """Take over one change."""
        worker = change.worker
        epoch = self._epochs.get(worker, Epoch(0))
        if change.epoch < epoch:
            return
        if change.epoch > epoch:
            self._epochs[worker], self.held[worker] = change.epoch, [set() for _ in TIERS]
        held = self.held[worker]
        if isinstance(change, Stored):
            held[TIERS.index(change.tier)].update(change.blocks)
        elif isinstance(change, Removed):
            held[TIERS.index(change.tier)].difference_update(change.blocks)
        elif isinstance(change, Cleared):
            for tier, blocks in zip(TIERS, held, strict=True):
                if change.tier in (None, tier):
                    blocks.clear()
            if change.reason is ClearReason.GONE:
                del self.held[worker], self._epochs[worker]

    def depths(self, blocks: Sequence[BlockHash], among: Sequence[Worker] | None) -> Answer:
        """Depth of each worker that holds something, and its best tiers."""
        found: Answer = {}
        for worker, held in self.held.items():
            best = [0] * len(TIERS)
            for block in blocks:
                for tier, mine in enumerate(held):
                    if block in mine:
                        best[tier] += 1
                        break
                else:
                    break
            if sum(best) and (among is None or worker in among):
                tiers = {TIERS[tier]: count for tier, count in enumerate(best) if count}
                found[worker] = sum(best), tiers
        return found


class Fleet:
    """What happens, and what is asked."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._epochs = {Worker(Pod(f"w{number}")): 1 for number in range(WORKERS)}
        self._paths = [self._fresh() for _ in range(4)]
        self._kinds: dict[Callable[[Worker, Epoch, Tier], Change], int] = {
            self._stored: 50, self._evicted: 24, self._holes: 20, self._cleared: 3, self._gone: 1,
        }  # fmt: skip

    def change(self) -> Change:
        """The next one. Some are late, some begin a life."""
        chance = self.chance
        if chance.random() < 0.1:
            self._branch()
        worker = chance.choice(list(self._epochs))
        self._epochs[worker] += chance.random() < 0.02
        late = chance.random() < 0.03
        epoch = Epoch(max(1, self._epochs[worker] - late))
        tier = chance.choice((Tier.GPU, Tier.GPU, Tier.GPU, *TIERS))
        [kind] = chance.choices(list(self._kinds), list(self._kinds.values()))
        return kind(worker, epoch, tier)

    def prompt(self) -> tuple[BlockHash, ...]:
        """The beginning of what somebody said, and often something new."""
        path = self.chance.choice(self._paths)
        cut = self.chance.randint(0, len(path)) if self.chance.random() < 0.6 else len(path)
        return tuple(path[:cut] + self._fresh()[: self.chance.choice((0, 3))])

    def some(self) -> list[Worker] | None:
        """Whom one asks about; mostly all."""
        if self.chance.random() < 0.8:
            return None
        return self.chance.sample(list(self._epochs), self.chance.randint(0, WORKERS))

    def _fresh(self) -> list[BlockHash]:
        count = LONG if self.chance.random() < 0.02 else self.chance.randint(*LENGTHS)
        return [BlockHash(self.chance.getrandbits(64)) for _ in range(count)]

    def _branch(self) -> None:
        """A new conversation that mostly begins as another one."""
        path, fresh = self.chance.choice(self._paths), self._fresh()
        if self.chance.random() < 0.8:
            fresh = path[: self.chance.randint(1, len(path))] + fresh
        self._paths.append(fresh[: 2 * LONG])
        if len(self._paths) > PATHS:
            self._paths.pop(self.chance.randrange(len(self._paths)))

    def _stored(self, worker: Worker, epoch: Epoch, tier: Tier) -> Change:
        """From the root, or an orphan."""
        path = self.chance.choice(self._paths)
        start = 0 if self.chance.random() < 0.7 else self.chance.randrange(len(path))
        blocks = tuple(path[start : self.chance.randint(start + 1, len(path))])
        return Stored(worker, epoch, tier, path[start - 1] if start else None, blocks, SIZE)

    def _evicted(self, worker: Worker, epoch: Epoch, tier: Tier) -> Change:
        path = self.chance.choice(self._paths)
        return Removed(worker, epoch, tier, tuple(path[self.chance.randrange(len(path)) :][::-1]))

    def _holes(self, worker: Worker, epoch: Epoch, tier: Tier) -> Change:
        path = self.chance.choice(self._paths)
        count = self.chance.randint(1, min(5, len(path)))
        return Removed(worker, epoch, tier, tuple(self.chance.sample(path, count)))

    def _cleared(self, worker: Worker, epoch: Epoch, tier: Tier) -> Change:
        reason = self.chance.choice((ClearReason.ENGINE, ClearReason.GAP, ClearReason.RESTART))
        return Cleared(worker, epoch, reason, self.chance.choice((None, tier)))

    def _gone(self, worker: Worker, epoch: Epoch, tier: Tier) -> Change:
        return Cleared(worker, epoch, ClearReason.GONE)

"""Index adapter: the view under the names that workload benchmarks use.

Edge of bench/: builds the very Change that events/ hands to the index, so what is timed is the
product's own path. Open it when vocabulary or view change their form.

    event(...) and query(...) make payloads, untimed      apply(...) and find(...) are timed
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TypeAlias

from kvplane.index import View
from kvplane.vocabulary import BlockHash, Change, Epoch, Pod, Removed, Stored, Tier, Worker

Query: TypeAlias = tuple[BlockHash, ...]
EPOCH = Epoch(1)
MOST_NAMED = 10_000  # sets of workers whose numbers are remembered


class Index:
    """One view over numbered pods."""

    def __init__(self, pods: int, block_size: int) -> None:
        self._block_size = block_size
        self._workers = [Worker(Pod(f"pod-{number}")) for number in range(pods)]
        self._number = {worker: number for number, worker in enumerate(self._workers)}
        self._named: dict[int, tuple[tuple[Worker, ...], tuple[int, ...]]] = {}
        self.view = View()

    def event(
        self, pod: int, stored: bool, parent: int | None, seq: Sequence[int], local: Sequence[int]
    ) -> Change:
        """One engine event as a Change. `seq` names prefixes as our chained hash does."""
        worker, blocks = self._workers[pod], tuple(BlockHash(int(block)) for block in seq)
        if not stored:
            return Removed(worker, EPOCH, Tier.GPU, blocks)
        above = None if parent is None else BlockHash(int(parent))
        return Stored(worker, EPOCH, Tier.GPU, above, blocks, self._block_size)

    def apply(self, payload: Change) -> None:
        """Take over one event."""
        self.view.apply(payload)

    def query(self, seq: Sequence[int], local: Sequence[int]) -> Query:
        """One prompt."""
        return tuple(BlockHash(int(block)) for block in seq)

    def find(self, payload: Query) -> dict[int, int]:
        """Pod number -> unbroken depth in blocks; pods that hold nothing of it are left out."""
        found: dict[int, int] = {}
        for workers, depth in self.view.together(payload):
            if len(workers) == 1:
                found[self._number[workers[0]]] = depth
            else:
                found.update(dict.fromkeys(self._numbers(workers), depth))
        return found

    def _numbers(self, workers: tuple[Worker, ...]) -> tuple[int, ...]:
        known = self._named.get(id(workers))
        if known is None or known[0] is not workers:
            if len(self._named) >= MOST_NAMED:
                self._named.clear()
            numbers: tuple[int, ...] = itemgetter(*workers)(self._number)
            known = self._named[id(workers)] = workers, numbers
        return known[1]

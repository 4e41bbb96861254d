"""Owners: whose bits are these, and how deep does each of them reach?

Pure: ordinals of the forest to workers of one view; view.py says who takes and gives back which.
Open it to change how bits become names, or what caps a depth.

    0b0110 -> (B, C)     who shares a system prompt is asked for again and again, so it is kept
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import compress

from kvplane.vocabulary import Worker

from .facts import Facts
from .runs import ordinals
from .windows import usable

MOST_NAMED = 4096  # bitmaps whose workers are remembered; a few hundred bytes each
_BITS = bytes.maketrans(b"01", b"\0\1")


class Owners:
    """Of one view."""

    def __init__(self) -> None:
        self.all = 0  # bitmap of the ordinals that somebody has
        self.hybrid = False  # somebody has, or had, further groups
        self.lower = False  # somebody holds, or held, blocks below GPU memory
        self._facts: dict[int, Facts] = {}
        self._named: dict[int, tuple[Worker, ...]] = {}
        self._workers: list[Worker | None] = []  # by ordinal

    def __getitem__(self, ordinal: int) -> Facts:
        return self._facts[ordinal]

    def __contains__(self, ordinal: object) -> bool:
        return ordinal in self._facts

    def add(self, ordinal: int, facts: Facts) -> None:
        """It is this worker's from now on."""
        self._facts[ordinal] = facts
        self.all |= 1 << ordinal
        self._workers += [None] * (ordinal + 1 - len(self._workers))
        self._workers[ordinal] = facts.worker

    def drop(self, ordinal: int) -> None:
        """It is nobody's any more."""
        del self._facts[ordinal]
        self.all &= ~(1 << ordinal)
        self._workers[ordinal] = None
        self._named.clear()

    def join(self, other: Owners) -> None:
        """Take over those of another view of the same forest."""
        for ordinal, facts in other._facts.items():
            self.add(ordinal, facts)
        self.hybrid, self.lower = self.hybrid or other.hybrid, self.lower or other.lower

    def mask(
        self, facts: Mapping[Worker, Facts], workers: Collection[Worker] | None, size: int
    ) -> int:
        """Bitmap of these workers (None: all) that have this block size (0: any)."""
        if workers is None and not size:
            return self.all
        mask = 0
        for worker in facts if workers is None else workers:
            one = facts.get(worker)
            if one is None or one.ordinal is None:
                continue
            if not size or one.block_size == size:
                mask |= 1 << one.ordinal
        return mask

    def names(self, mask: int) -> tuple[Worker, ...]:
        """Workers of a bitmap; often the same tuple again for the same bitmap."""
        found = self._named.get(mask)
        if found is None:
            if len(self._named) >= MOST_NAMED:
                self._named.clear()
            bits = f"{mask:b}"[::-1].encode().translate(_BITS)
            found = self._named[mask] = tuple(compress(self._workers, bits))  # type: ignore[arg-type]
        return found

    def reached(self, found: Sequence[tuple[int, int]], blocks: Sequence[int]) -> dict[Worker, int]:
        """Depths of bitmaps as depths of workers, capped by their further groups; none of 0."""
        reached: dict[Worker, int] = {}
        for mask, depth in found:
            if not depth:
                continue
            reached |= dict.fromkeys(self.names(mask), depth)
            for ordinal in ordinals(mask) if self.hybrid else ():
                self._cap(reached, self._facts[ordinal], blocks, depth)
        return reached

    def together(
        self, found: Sequence[tuple[int, int]], blocks: Sequence[int]
    ) -> list[tuple[tuple[Worker, ...], int]]:
        """The same, those of one depth together; the same tuple again for the same workers."""
        if self.hybrid:
            return [((one,), depth) for one, depth in self.reached(found, blocks).items()]
        named, told = self._named, list[tuple[tuple[Worker, ...], int]]()
        for mask, depth in found:
            if depth:
                told.append((named.get(mask) or self.names(mask), depth))
        return told

    @staticmethod
    def _cap(reached: dict[Worker, int], facts: Facts, blocks: Sequence[int], depth: int) -> None:
        if not facts.groups:
            return
        assert facts.block_size is not None, "who holds blocks told their size"
        groups = [(further.rule, further.tiers()) for further in facts.groups.values()]
        reached[facts.worker] = usable(blocks, depth, facts.block_size, groups)
        if not reached[facts.worker]:
            del reached[facts.worker]

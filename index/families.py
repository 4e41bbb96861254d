"""Families: which runs were one once, and which of them has a block?

Pure. A run that is split stays one family with its part, so that places.py, which remembers where
each block was put, need not be told. Used by forest.py. Open it to change how a block in the middle
of a run is found.

    places   b4 -> family 7         family 7   [b0 b1 b2] -> [b3 b4 b5] -> [b9]
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from .places import FAMILIES, Places
from .runs import Run

SPARE = 65_536  # old words beyond as many as there are blocks, before places are made anew


class Families:
    """Of one forest."""

    note: Callable[[int, array[int]], None]  # blocks are in a family in which they were not

    def __init__(self) -> None:
        self._first: dict[int, Run] = {}  # by number
        self._free: list[int] = []  # numbers of those that are gone
        self._places = Places()
        self._fresh: Places | None = None  # to replace it, under way
        self.note = self._places.add

    def __len__(self) -> int:
        return len(self._first)

    def begin(self, run: Run) -> Run:
        """A run gets a family of its own."""
        run.family = self._free.pop() if self._free else len(self._first)
        assert run.family < FAMILIES, f"{run.family} families: no more can be told apart"
        self._first[run.family] = run
        return run

    def split(self, run: Run, right: Run) -> None:
        """A run and what was its end."""
        right.family, right.next, run.next = run.family, run.next, right
        if self._fresh is not None:
            self._fresh.add(right.family, right.blocks[:])  # its turn may have been before

    def leave(self, run: Run) -> None:
        """A run is no more."""
        before = self._first[run.family]
        if before is not run:
            while before.next is not run:
                assert before.next is not None, "a run is in its family"
                before = before.next
            before.next = run.next
        elif run.next is not None:
            self._first[run.family] = run.next
        else:
            del self._first[run.family]
            self._free.append(run.family)

    def find(self, block: int) -> tuple[Run | None, int]:
        """The run that has a block, and its place there; -1 where none has."""
        for number in self._places.find(block):
            run = self._first.get(number)
            while run is not None:
                if (at := run.position(block)) >= 0:
                    return run, at
                run = run.next
        return None, -1

    def sift(self, blocks: array[int]) -> array[int]:
        """Those of many blocks that are worth looking for."""
        return self._places.sift(blocks)

    # -- keeping it small --------------------------------------------------------------------

    def stale(self, blocks: int) -> bool:
        """Whether too much of what places know is old, where there are so many blocks."""
        return self._places.words > 2 * blocks + SPARE

    def renew(self) -> None:
        """Places are made anew from now on: next comes `again` of every run there is."""
        fresh = self._fresh = Places()
        old = self._places

        def both(family: int, blocks: array[int]) -> None:
            old.add(family, blocks)
            fresh.add(family, blocks)

        self.note = both

    def again(self, run: Run) -> None:
        """What a run has is kept; it may be no more since the pass began."""
        if self._fresh is not None and run.blocks:
            self._fresh.add(run.family, run.blocks[:])

    def renewed(self) -> None:
        """All had their turn."""
        if self._fresh is not None:
            self._places, self._fresh = self._fresh, None
            self.note = self._places.add

    def bytes(self) -> int:
        """What places weigh."""
        return self._places.bytes()

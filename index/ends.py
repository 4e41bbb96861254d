"""Ends: which run begins with a block, which ends with it, and how many begin behind it?

Pure. Used by forest.py, which makes and changes runs. Whose parent is in a run is behind the end of
it; whose parent is unknown is awaited, since a run that is told later has to end there. Open it to
change what is kept of a run's ends.

    [b0 b1 b2] -+- [b3 b4]       heads b0 b3 c3 e9      children of [b0 b1 b2] 2
                +- [c3 c4]       tails b2 b4 c4 e9      awaited e8: 1
       (e8)     -- [e9]

Blocks that nobody can have told truly, a parent of two kinds, may be lost here, but break nothing.
"""

from __future__ import annotations

from sys import getsizeof

from .runs import Run, weight


class Ends:
    """Of one forest."""

    def __init__(self) -> None:
        self.heads: dict[int, Run] = {}  # first block -> its run
        self.tails: dict[int, Run] = {}  # last block -> its run
        self.awaited: dict[int, int] = {}  # unknown block -> runs whose parent it is

    def fork(self, parent: int | None, more: int) -> None:
        """So many runs more begin behind a block."""
        if parent is None:
            return
        if (above := self.tails.get(parent)) is not None:
            above.children += more
        elif (count := self.awaited.get(parent, 0) + more) > 0:
            self.awaited[parent] = count
        else:
            self.awaited.pop(parent, None)

    def split(self, run: Run, right: Run) -> None:
        """A run has lost its end to another one."""
        right.children, run.children = run.children, 1
        self.heads[right.blocks[0]] = self.tails[right.blocks[-1]] = right
        self.tails[run.blocks[-1]] = run

    def shorten(self, run: Run, first: int, last: int) -> None:
        """A run is about to lose first..last-1: its end, its beginning, or all."""
        mine = run.blocks
        if last == len(mine):
            self.tails.pop(mine[-1], None)
            if run.children:
                self.awaited[mine[-1]], run.children = run.children, 0
        if first:
            self.tails[mine[first - 1]] = run
            return
        self.heads.pop(mine[0], None)
        self.fork(run.parent, -1)
        if last < len(mine):
            self.heads[mine[last]] = run
            run.parent = mine[last - 1]
            self.fork(run.parent, 1)

    def bytes(self) -> int:
        """What the dicts weigh, and the runs in them."""
        return getsizeof(self.heads) + getsizeof(self.tails) + weight(self.heads.values())

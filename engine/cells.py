"""Cells: which ranks does an engine have, and what do people call them?

Pure. A dp rank (unit.py) has tp x pp ranks: tensor ranks share out its KV heads, pipeline ranks its
layers. All of them have the same page numbers; each has its own memory, port and registration
(ranks.py). Open it to cut an engine another way.

    tp 2, pp 2:   cells (pp 0, tp 0) (pp 0, tp 1) (pp 1, tp 0) (pp 1, tp 1)     "tp=1 pp=0"
    tp 4:         only what differs is named                                    "tp=3"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST_NAMED = 8  # of the ranks that are missing


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks there are along each axis."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Of one dp rank."""
        return self.tp * self.pp

    def cells(self, dp: int) -> tuple[Cell, ...]:
        """Of one dp rank, in the order of world ranks: pipeline stage by stage."""
        return tuple(Cell(dp, pp, tp) for pp in range(self.pp) for tp in range(self.tp))

    def name(self, cell: Cell) -> str:
        """`tp=1 pp=0` of the axes that have several ranks; "" where one rank is all there is."""
        axes = (("dp", self.dp), ("tp", self.tp), ("pp", self.pp))
        return " ".join(f"{axis}={getattr(cell, axis)}" for axis, size in axes if size > 1)


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """The place of one rank."""

    dp: int
    pp: int
    tp: int


def missing(names: Sequence[str], there: Iterable[str]) -> str:
    """`3 of 4, missing tp=3`, in their order."""
    known = set(there)
    absent = [name for name in names if name not in known]
    more = f" and {len(absent) - MOST_NAMED} more" if len(absent) > MOST_NAMED else ""
    shown = ", ".join(absent[:MOST_NAMED]) + more
    return f"{len(names) - len(absent)} of {len(names)}, missing {shown}"

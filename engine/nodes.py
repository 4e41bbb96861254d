"""Nodes: which process of a prefill has which ranks?

Pure. A prefill of several processes shares out the ranks of every dp rank, evenly and in the order
of world ranks, as SGLang does. Node 0 has the HTTP door and the rank directory; every node computes
every prompt and hands on what its own ranks own (leading.py, following.py). Open it to share out
another way.

    tp 4, 2 nodes:         node 0 has tp=0, tp=1     node 1 has tp=2, tp=3
    tp 2, pp 2, 2 nodes:   node 0 has stage pp=0     node 1 has stage pp=1
"""

from __future__ import annotations

from dataclasses import dataclass

from .cells import Cell, Sizes


@dataclass(frozen=True, slots=True)
class Nodes:
    """All processes of an instance, and which of them this one is."""

    sizes: Sizes
    count: int = 1
    rank: int = 0

    @property
    def leads(self) -> bool:
        """Is this node 0?"""
        return self.rank == 0

    @property
    def others(self) -> range:
        """The nodes that follow node 0."""
        return range(1, self.count)

    def cells(self, dp: int, node: int | None = None) -> tuple[Cell, ...]:
        """The ranks of a node (None = of this one) within one dp rank."""
        each = self.sizes.ranks // self.count
        first = (self.rank if node is None else node) * each
        return self.sizes.cells(dp)[first : first + each]

    def node_of(self, cell: Cell) -> int:
        """Where this rank runs."""
        return (cell.pp * self.sizes.tp + cell.tp) * self.count // self.sizes.ranks

    def name(self, node: int) -> str:
        """`node 1 of 2 (tp=2, tp=3)`."""
        grid = Sizes(self.sizes.tp, self.sizes.pp)
        ranks = ", ".join(grid.name(cell) for cell in self.cells(0, node))
        return f"node {node} of {self.count} ({ranks})"

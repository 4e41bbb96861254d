"""Ranks: one tensor and pipeline rank each: its part of the memory, its way to other engines.

Edge. network.py makes them, team.py lets all ranks of a dp rank act at once. The memory of a dp
rank is computed in as a whole; a rank owns the pieces of its heads and layers (model.py), and
nothing else can be reached through its backend. Open it to change what a rank is made of.

    pool[layer][K or V, head]  = region l0.k3    tp 4: on rank 3    pp 2: on stage 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.transfer import Backend, Grid, Layout, Metadata, Offers, Puller, Region, owned
from kvplane.vocabulary import Room, StageRecord

from .cells import Cell, Sizes
from .model import Pool


@dataclass(slots=True)
class Rank:
    """One rank of this process. A prefill's has offers and a port, a decode's a puller."""

    cell: Cell
    name: str  # "" where it is the only one
    backend: Backend
    regions: tuple[str, ...]
    offers: Offers | None = None
    puller: Puller | None = None
    port: int = 0  # decodes dial it

    async def deliver(
        self, room: Room, pages: Sequence[int], said: Metadata, deadline_s: float
    ) -> None:
        """Its part of these pages, to every decode rank that wants some. As Offers.deliver."""
        assert self.offers is not None, "a prefill's rank has offers"
        await self.offers.deliver(room, pages, said, deadline_s)

    def fail(self, room: Room, reason: str) -> None:
        """Tell the decode that nothing will come."""
        if self.offers is not None:
            self.offers.fail(room, reason)

    def seen(self, room: Room, error: BaseException) -> StageRecord | None:
        """transfer/ has recorded it already."""
        return None

    def shown(self) -> dict[str, Any]:
        """As /truth tells it."""
        found: dict[str, Any] = {"tp": self.cell.tp, "pp": self.cell.pp, "port": self.port}
        found["regions"] = list(self.regions)
        found["transfer"] = self.counts()
        return found

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        found = dict(self.backend.counts())
        for side in (self.offers, self.puller):
            found |= {} if side is None else side.counts()
        return found


def regions(pool: Pool, layout: Layout, sizes: Sizes, cell: Cell) -> list[Region]:
    """The memory of one rank, piece by piece, in the order of its names."""
    names = owned(layout, Grid(sizes.tp, sizes.pp, cell.tp, cell.pp))
    return [Region.of(_piece(pool, name), name) for name in names]


def _piece(pool: Pool, name: str) -> Any:
    """`l1.v3` -> values of head 3 in layer 1: [page, token, dim], contiguous."""
    layer, _, part = name.removeprefix("l").partition(".")
    return pool[int(layer)]["kv".index(part[0]), int(part[1:])]

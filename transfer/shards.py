"""Shards: which part of every page lies on which rank of a grid.

Pure. Tensor ranks share out the KV heads, pipeline ranks the layers, in order and evenly. A part
is named by layer, K or V, and head; two ranks exchange the parts that both have. Open it to add
another way of cutting pages.

    4 heads, 2 layers, tp 2, pp 1     rank 0: l0.k0 l0.k1 l0.v0 l0.v1 l1.k0 ..    rank 1: l0.k2 ..
    prefill tp 2, decode tp 4         decode 3 has head 3: it gets l?.?3 from prefill 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .metadata import Layout


@dataclass(frozen=True, slots=True)
class Grid:
    """How many ranks there are along both axes, and which of them this one is."""

    tp: int = 1
    pp: int = 1
    tp_rank: int = 0
    pp_rank: int = 0

    def __str__(self) -> str:
        return f"tp {self.tp_rank} of {self.tp}, pp {self.pp_rank} of {self.pp}"


def region_name(layer: int, part: str, head: int) -> str:
    """`l0.k3`: layer 0, keys, KV head 3."""
    return f"l{layer}.{part}{head}"


def owned(layout: Layout, grid: Grid) -> tuple[str, ...]:
    """The parts of every page that lie on this rank; ValueError where a size does not fit."""
    layers = _share("pp", layout.layers, grid.pp, grid.pp_rank)
    heads = _share("tp", layout.kv_heads, grid.tp, grid.tp_rank)
    return tuple(
        region_name(layer, part, head) for layer in layers for part in "kv" for head in heads
    )


def shared(mine: Sequence[str], theirs: Sequence[str]) -> tuple[str, ...]:
    """What both have, in my order."""
    there = set(theirs)
    return tuple(name for name in mine if name in there)


def _share(axis: str, things: int, ranks: int, rank: int) -> range:
    if ranks < 1 or things % ranks or not 0 <= rank < ranks:
        raise ValueError(f"{axis} {ranks}: must divide {things}, its ranks are 0 to {ranks - 1}")
    each = things // ranks
    return range(rank * each, (rank + 1) * each)

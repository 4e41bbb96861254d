"""Ranking: who holds most of this prompt?

Pure: chain x view -> how deep each worker's unbroken prefix goes. router/ calls it in process, on
the request's path, without an await; api.py calls it for others. Open it to change what is
reported of a worker or in which order.

    prompt b0 b1 b2 b3 b4     A holds 0 1 3 4 -> depth 2    B holds 1 2 3 -> 0    C holds all -> 5
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kvplane.vocabulary import Epoch, PrefixChain, Tier, Worker

from .view import View


@dataclass(frozen=True, slots=True)
class Held:
    """How much of one prompt one worker holds."""

    worker: Worker
    epoch: Epoch | None  # the life this is true in; None for a worker the view does not know
    depth_blocks: int
    depth_tokens: int
    tiers: Mapping[Tier, int] = field(default_factory=dict)  # blocks of the depth, by best tier
    blocks: int = 0  # full blocks of the prompt at this worker's block size


def rank(
    view: View,
    chains: PrefixChain | Mapping[int, PrefixChain],
    workers: Collection[Worker] | None = None,
) -> list[Held]:
    """One Held for each of `workers` (None: all the view knows), deepest first, ties by worker.

    Fleets mix block sizes: pass one chain per block size, and each worker is judged on the chain
    of its own. A worker whose size is unknown or has no chain holds 0 of 0 blocks.
    """
    if isinstance(chains, PrefixChain):
        chains = {chains.namespace.block_size: chains}
    found: list[Held] = []
    asked = view.workers() if workers is None else workers
    for size, chain in chains.items():
        depths = view.depths(chain.blocks, asked, size)
        for worker, (depth, tiers) in depths.items():
            epoch = view.epoch(worker)
            found.append(Held(worker, epoch, depth, depth * size, tiers, len(chain.blocks)))
    deep = {held.worker for held in found}
    for worker in asked:
        if worker not in deep:
            mine = chains.get(view.block_size(worker) or 0)
            blocks = len(mine.blocks) if mine else 0
            found.append(Held(worker, view.epoch(worker), 0, 0, {}, blocks))
    found.sort(key=lambda held: (-held.depth_tokens, held.worker))
    return found

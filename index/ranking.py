"""Ranking: who holds most of this prompt?

Pure: chain x view -> how deep each worker's unbroken prefix goes. router/ calls `rank` in process,
on the request's path, without an await; lines.py writes it for others. Open it to change what is
reported of a worker or in which order.

    prompt b0 b1 b2 b3 b4     A holds 0 1 3 4 -> depth 2    B holds 1 2 3 -> 0    C holds all -> 5
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from kvplane.vocabulary import Epoch, PrefixChain, Tier, Worker

from .view import View

Depths = Mapping[Worker, int]  # in tokens, so that block sizes compare; holders of none left out


class Held(msgspec.Struct, frozen=True):
    """How much of one prompt one worker holds."""

    worker: Worker
    epoch: Epoch | None  # the life this is true in; None for a worker the view does not know
    depth_blocks: int
    depth_tokens: int
    tiers: Mapping[Tier, int] = {}  # blocks of the depth, by best tier
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
    depths = reached(view, chains, workers)
    below = tiers(view, chains, depths)
    found: list[Held] = []
    for worker in ordered(view.workers() if workers is None else sorted(workers), depths):
        size, tokens = view.block_size(worker) or 0, depths.get(worker, 0)
        count = len(chains[size].blocks) if size in chains else 0
        depth = tokens // size if tokens else 0
        lies = below.get(worker) or ({Tier.GPU: depth} if depth else {})
        found.append(Held(worker, view.epoch(worker), depth, tokens, lies, count))
    return found


def reached(
    view: View, chains: Mapping[int, PrefixChain], workers: Collection[Worker] | None
) -> dict[Worker, int]:
    """Depth in tokens, each worker on the chain of its own block size."""
    found: dict[Worker, int] = {}
    sizes = view.block_sizes()
    for size in sizes:
        if size in chains:
            alone = workers is None and len(sizes) == 1  # then nobody has to be picked out
            depths = view.prefixes(chains[size].blocks, workers, 0 if alone else size)
            found |= {worker: depth * size for worker, depth in depths.items()}
    return found


def tiers(
    view: View, chains: Mapping[int, PrefixChain], depths: Depths
) -> dict[Worker, dict[Tier, int]]:
    """Blocks of the depth by best tier, of those that hold anything below GPU memory."""
    lower: dict[int, list[Worker]] = {}
    if view.plain:
        return {}
    for worker in depths:
        facts = view.facts(worker)
        if facts is not None and (facts.counts[1] or facts.counts[2] or facts.counts[3]):
            lower.setdefault(facts.block_size or 0, []).append(worker)
    found: dict[Worker, dict[Tier, int]] = {}
    for size, some in lower.items():
        told = view.depths(chains[size].blocks, some, size)
        found |= {worker: lies for worker, (_, lies) in told.items()}
    return found


def ordered(workers: Iterable[Worker], depths: Depths) -> list[Worker]:
    """Deepest first; `workers` are in order, and those of equal depth stay so."""
    return sorted(workers, key=lambda worker: -depths.get(worker, 0))

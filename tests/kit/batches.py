"""Batches: what a stream's tests say, and how they ask the index about it. One prompt per name."""

from __future__ import annotations

from array import array

from kit.streams import WORKER, Followed, Publisher
from kvplane.events import DIALECTS, BlocksRemoved, BlocksStored, EngineEvent, engine_key
from kvplane.index import chain, rank
from kvplane.vocabulary import Namespace, Worker

SIZE = 4
SPACE = Namespace("m", SIZE)


def payload(*events: EngineEvent, dp_rank: int = 0) -> bytes:
    return DIALECTS["vllm"].encode(1.0, events, dp_rank)


def tokens(name: int, blocks: int = 1) -> list[int]:
    return [name * 1000 + at for at in range(blocks * SIZE)]


def store(name: int, first: int = 0, last: int = 1) -> BlocksStored:
    """Blocks first..last-1 of the prompt called `name`."""
    keys = tuple(engine_key(name * 1000 + at) for at in range(first, last))
    parent = engine_key(name * 1000 + first - 1) if first else None
    return BlocksStored(
        keys, parent, array("I", tokens(name, last)[first * SIZE :]), SIZE, kind="full_attention"
    )


def drop(name: int, at: int = 0) -> BlocksRemoved:
    return BlocksRemoved((engine_key(name * 1000 + at),))


def depth(followed: Followed, name: int, blocks: int = 1, worker: Worker = WORKER) -> int:
    (held,) = rank(followed.view, chain(tokens(name, blocks), SPACE), [worker])
    return held.depth_blocks


def held(followed: Followed, *names: int) -> list[int]:
    return [name for name in names if depth(followed, name)]


async def send(publisher: Publisher, *names: int, **how: bool) -> None:
    for name in names:
        await publisher.publish(payload(store(name)), **how)

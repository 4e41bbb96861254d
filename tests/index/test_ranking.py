"""Ranking: unbroken from the first block, deepest first, each worker at its own block size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from kvplane.index import (
    Batch,
    Follower,
    Held,
    IndexMetrics,
    IndexSettings,
    MemoryStore,
    RedisStore,
    Row,
    Store,
    View,
    chain,
    rank,
)
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    ClearReason,
    Epoch,
    Namespace,
    Pod,
    PrefixChain,
    Removed,
    Stored,
    Tier,
    Worker,
)

A, B, C = (Worker(Pod(name)) for name in "abc")
CHAIN = chain(range(7 * 16), Namespace("m", 16))


def view_of(held: dict[Worker, list[int]], asked: PrefixChain = CHAIN) -> View:
    view = View()
    size = asked.namespace.block_size
    for worker, numbers in held.items():
        for at in numbers:
            parent = asked.blocks[at - 1] if at else None
            blocks = (asked.blocks[at],)
            view.apply(Stored(worker, Epoch(1), Tier.GPU, parent, blocks, size))
    return view


def depths(found: list[Held]) -> list[tuple[Worker, int]]:
    return [(held.worker, held.depth_blocks) for held in found]


def test_scattered_blocks_are_no_prefix() -> None:
    view = view_of({A: [0, 1, 3, 4], B: [1, 2, 3], C: [0, 1, 2, 3, 4]})
    five = PrefixChain(CHAIN.namespace, CHAIN.blocks[:5])
    assert depths(rank(view, five)) == [(C, 5), (A, 2), (B, 0)]
    assert depths(rank(view, five, [B, A])) == [(A, 2), (B, 0)]


def test_the_longest_comes_first_and_a_whole_match_counts_every_block() -> None:
    view = view_of({A: [0], B: list(range(7)), C: list(range(7))})
    found = rank(view, CHAIN)
    assert depths(found) == [(B, 7), (C, 7), (A, 1)]
    assert found[0].depth_tokens == 112 and found[0].blocks == 7 and found[0].epoch == 1


def test_prompts_around_one_block() -> None:
    """FR-IX-18."""
    view = view_of({A: [0, 1]})
    for tokens, expected in ((0, 0), (1, 0), (15, 0), (16, 1), (17, 1)):
        asked = chain(range(tokens), Namespace("m", 16))
        assert rank(view, asked)[0].depth_blocks == expected


def test_each_worker_is_judged_on_the_chain_of_its_own_block_size() -> None:
    big = chain(range(7 * 16), Namespace("m", 32))
    view = view_of({A: [0, 1]})
    view.apply(Stored(B, Epoch(4), Tier.GPU, None, big.blocks, 32))
    found = rank(view, {16: CHAIN, 32: big})
    assert [(h.worker, h.depth_blocks, h.depth_tokens, h.blocks) for h in found] == [
        (B, 3, 96, 3),
        (A, 2, 32, 7),
    ]
    assert depths(rank(view, {16: CHAIN})) == [(A, 2), (B, 0)]


def test_a_worker_nobody_heard_of_holds_nothing() -> None:
    assert rank(View(), CHAIN, [A]) == [Held(A, None, 0, 0)]


def test_tiers_count_each_block_of_the_depth_once_where_it_lies_best() -> None:
    view = view_of({A: [0, 1, 2]})
    for at, tier in ((1, Tier.CPU), (3, Tier.CPU), (4, Tier.DISK), (6, Tier.CPU)):
        view.apply(Stored(A, Epoch(1), tier, CHAIN.blocks[at - 1], (CHAIN.blocks[at],), 16))
    held = rank(view, CHAIN)[0]
    assert held.depth_blocks == 5
    assert held.tiers == {Tier.GPU: 3, Tier.CPU: 1, Tier.DISK: 1}


def test_tiers_leave_out_what_lies_behind_a_hole() -> None:
    view = View()
    view.apply(Stored(A, Epoch(1), Tier.GPU, None, CHAIN.blocks, 16))
    view.apply(Stored(A, Epoch(1), Tier.CPU, None, CHAIN.blocks[:1], 16))
    view.apply(Removed(A, Epoch(1), Tier.GPU, CHAIN.blocks[3:4]))
    held = rank(view, CHAIN)[0]
    assert (held.depth_blocks, held.tiers) == (3, {Tier.GPU: 3})


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest, redis_prefix: str) -> AsyncIterator[Store]:
    made: Store
    if request.param == "memory":
        made = MemoryStore()
    else:
        url, settings = request.getfixturevalue("redis_url"), IndexSettings(block_ms=50)
        made = RedisStore(url, redis_prefix, settings=settings)
    yield made
    await made.close()


async def put(store: Store, worker: Worker, numbers: list[int]) -> None:
    epoch, changes, rows = await store.begin_life(worker, None), [], {}
    for at in numbers:
        parent, block = CHAIN.blocks[at - 1] if at else None, CHAIN.blocks[at]
        changes.append(Stored(worker, epoch, Tier.GPU, parent, (block,), 16))
        rows[b"u%d" % at] = Row(block, parent, (1, 0, 0, 0), 16)
    await store.apply(Batch(worker, epoch, 0, 0, tuple(changes), rows))


@pytest.mark.parametrize("before", [True, False], ids=["from a snapshot", "from the stream"])
async def test_a_prefix_is_unbroken_from_its_first_block_with_every_store(
    store: Store, before: bool
) -> None:
    """FR-IX-01: by whatever way the view was filled; and metrics count the same blocks."""
    held = {A: [0, 1, 3, 4], B: [1, 2, 3], C: [0, 1, 2, 3, 4]}
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    follower = Follower(store, view, SystemClock(), metrics)
    five = PrefixChain(CHAIN.namespace, CHAIN.blocks[:5])
    for worker in held if before else ():
        await put(store, worker, held[worker])
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 20)
        for worker in () if before else held:
            await put(store, worker, held[worker])
        goal = await store.head()
        while not store.reached(follower.cursor, goal):  # noqa: ASYNC110 - bounded by the test's
            await asyncio.sleep(0.005)
        assert depths(rank(view, five)) == [(C, 5), (A, 2), (B, 0)]
        assert depths(rank(view, five, [B, A])) == [(A, 2), (B, 0)]
        for worker, numbers in held.items():
            labels = {"worker": str(worker), "tier": "gpu"}
            counted = metrics.registry.get_sample_value("kvplane_index_blocks", labels)
            assert counted == len(numbers)


@pytest.mark.parametrize("first", [A, B, C])
def test_the_last_block_counts_and_the_longest_wins_whoever_came_first(first: Worker) -> None:
    """FR-IX-02."""
    held = {A: [0], B: list(range(7)), C: list(range(7))}
    order = [first, *(worker for worker in held if worker != first)]
    view = view_of({worker: held[worker] for worker in order})
    assert depths(rank(view, CHAIN)) == [(B, 7), (C, 7), (A, 1)]


@pytest.mark.parametrize(
    ("one", "other"),
    [("ns1/p", "ns2/p"), ("p", "p.ns"), ("p@1", "p"), ("[fd00::1]:80", "[fd00::1]:8000")],
)
def test_a_namesake_is_never_credited(one: str, other: str) -> None:
    """FR-IX-03: a worker is its whole name, on the side that writes and on the side that asks."""
    mine, theirs = Worker(Pod(one)), Worker(Pod(other))
    elsewhere = chain(range(1000, 1064), Namespace("m", 16))
    view = view_of({mine: [0, 1]})
    view.apply(Stored(theirs, Epoch(1), Tier.GPU, None, elsewhere.blocks, 16))
    assert depths(rank(view, CHAIN, [Worker.parse(str(mine))])) == [(mine, 2)]
    assert depths(rank(view, CHAIN, [Worker.parse(str(theirs))])) == [(theirs, 0)]
    assert depths(rank(view, elsewhere, [mine])) == [(mine, 0)]
    view.apply(Cleared(theirs, Epoch(1), ClearReason.GONE))
    assert depths(rank(view, CHAIN)) == [(mine, 2)]


def test_a_worker_that_comes_back_with_another_block_size_is_ranked_on_it() -> None:
    """FR-IX-07: 32 became 64 while another worker keeps 32; neither is a silent zero."""
    tokens = range(256)
    small, big = (chain(tokens, Namespace("m", size)) for size in (32, 64))
    view = View()
    for worker in (A, B):
        view.apply(Stored(worker, Epoch(1), Tier.GPU, None, small.blocks, 32))
    view.apply(Cleared(A, Epoch(2), ClearReason.RESTART))
    view.apply(Stored(A, Epoch(2), Tier.GPU, None, big.blocks, 64))
    assert view.block_sizes() == (32, 64)
    found = rank(view, {32: small, 64: big})
    assert [(h.worker, h.depth_blocks, h.depth_tokens) for h in found] == [(A, 4, 256), (B, 8, 256)]


def test_a_tie_in_tokens_between_sizes_is_no_tie_in_blocks() -> None:
    view = view_of({A: [0, 1]})
    big = chain(range(7 * 16), Namespace("m", 32))
    view.apply(Stored(B, Epoch(1), Tier.GPU, None, big.blocks[:2], 32))
    assert [h.worker for h in rank(view, {16: CHAIN, 32: big})] == [B, A]
    assert rank(view, {16: CHAIN, 32: big}, [Worker(Pod("x"))])[0].depth_blocks == 0


def test_an_empty_prompt_holds_nothing_of_nothing() -> None:
    empty = PrefixChain(CHAIN.namespace, tuple[BlockHash, ...]())
    assert [(h.depth_blocks, h.blocks) for h in rank(view_of({A: [0]}), empty)] == [(0, 0)]

"""Depths are the same wherever the index lies: by snapshot, by tail, with and without a filter."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing

import pytest
from kit.backends import BACKENDS, Opener, backend
from prometheus_client import CollectorRegistry

from kvplane.index import Batch, IndexMetrics, Row, Store, View, chain, rank
from kvplane.vocabulary import Cursor, Epoch, Namespace, Pod, PrefixChain, Stored, Tier, Worker

FIVE = chain(range(5 * 16), Namespace("m", 16))
A, B, C = (Worker(Pod(name)) for name in "abc")


@pytest.fixture(scope="module", params=BACKENDS)
def place(request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Every place where the index may live."""
    with backend(request.param) as opened:
        yield opened


@pytest.fixture
async def store(place: Opener, redis_prefix: str) -> AsyncIterator[Store]:
    kept = place(redis_prefix)
    yield kept
    await kept.close()


async def hold(
    store: Store, worker: Worker, epoch: Epoch, asked: PrefixChain, at: Sequence[int]
) -> None:
    """One batch that stores these blocks of a chain."""
    size = asked.namespace.block_size
    changes, rows = [], {}
    for number in at:
        parent = asked.blocks[number - 1] if number else None
        block = asked.blocks[number]
        changes.append(Stored(worker, epoch, Tier.GPU, parent, (block,), size))
        rows[b"u%d" % number] = Row(block, parent, (1, 0, 0, 0), size)
    await store.apply(Batch(worker, epoch, 0, 0, tuple(changes), rows))


async def views(store: Store, since: Cursor) -> list[View]:
    """One from a snapshot, one from the stream alone."""
    loaded, told = View(), View()
    snapshot = await store.snapshot()
    loaded.load(snapshot)
    async with aclosing(store.tail(since)) as entries:
        async for entry in entries:
            for change in entry.changes:
                told.apply(change)
            if store.reached(entry.cursor, snapshot.cursor):
                return [loaded, told]
    raise AssertionError("the tail ended")


def depths(view: View, asked: PrefixChain, among: Sequence[Worker] | None = None) -> dict[str, int]:
    return {str(held.worker): held.depth_blocks for held in rank(view, asked, among)}


def gauges(view: View) -> dict[str, float]:
    """Blocks a worker holds on the GPU, as /metrics shows them."""
    registry = CollectorRegistry()
    IndexMetrics(registry).watch(view, lambda: 0.0)
    (family,) = (one for one in registry.collect() if one.name == "kvplane_index_blocks")
    return {
        one.labels["worker"]: one.value for one in family.samples if one.labels["tier"] == "gpu"
    }


async def test_a_prefix_is_unbroken_from_the_first_block_and_metrics_count_the_same(
    store: Store,
) -> None:
    since = await store.head()
    for worker, at in ((A, (0, 1, 3, 4)), (B, (1, 2, 3)), (C, range(5))):
        await hold(store, worker, await store.begin_life(worker, None), FIVE, at)
    for view in await views(store, since):
        assert depths(view, FIVE) == {"a": 2, "b": 0, "c": 5}
        assert depths(view, FIVE, [A, B]) == {"a": 2, "b": 0}
        assert gauges(view) == {"a": 4, "b": 3, "c": 5}


async def test_pods_of_one_name_in_two_namespaces_are_two_workers(store: Store) -> None:
    since, other = await store.head(), chain(range(900, 900 + 5 * 16), Namespace("m", 16))
    ours, theirs = Worker(Pod("ours/p-0:8000")), Worker(Pod("theirs/p-0:8000"))
    for worker, asked in ((ours, FIVE), (theirs, other)):
        await hold(store, worker, await store.begin_life(worker, None), asked, range(5))
    for view in await views(store, since):
        assert depths(view, FIVE, [ours]) == {"ours/p-0:8000": 5}
        assert depths(view, FIVE, [theirs]) == {"theirs/p-0:8000": 0}
        assert depths(view, other) == {"ours/p-0:8000": 0, "theirs/p-0:8000": 5}


async def test_a_worker_that_comes_back_with_another_block_size_counts_and_so_do_the_others(
    store: Store,
) -> None:
    tokens, since = range(256), await store.head()
    sizes = {size: chain(tokens, Namespace("m", size)) for size in (32, 64)}
    for worker in (A, B):
        await hold(store, worker, await store.begin_life(worker, None), sizes[32], range(8))
    await hold(store, A, await store.begin_life(A, await epoch(store, A)), sizes[64], range(3))
    for view in await views(store, since):
        found = {held.worker: held for held in rank(view, sizes)}
        assert (found[A].depth_blocks, found[A].depth_tokens) == (3, 192)
        assert (found[B].depth_blocks, found[B].depth_tokens) == (8, 256)
        assert (view.block_size(A), view.block_size(B)) == (64, 32)


async def epoch(store: Store, worker: Worker) -> Epoch:
    position = await store.position(worker)
    assert position is not None
    return position.epoch

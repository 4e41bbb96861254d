"""The follower's view equals the store: from a snapshot, by the tail, over outages and trims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from kit.clock import FakeClock
from kit.ports import free_port
from kit.redis import binary, server
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.index import (
    Batch,
    Follower,
    IndexMetrics,
    IndexSettings,
    MemoryStore,
    RedisStore,
    Row,
    Store,
    View,
)
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import BlockHash, Epoch, Knowledge, Known, Pod, Stored, Tier, Worker

A, ONE = Worker(Pod("a")), Epoch(1)


async def put(store: Store, number: int, epoch: Epoch = ONE) -> None:
    blocks = (BlockHash(number),)
    parent = BlockHash(number - 1) if number else None
    change = Stored(A, epoch, Tier.GPU, parent, blocks, 16)
    rows = {b"%d" % number: Row(blocks[0], parent, (1, 0, 0, 0), 16)}
    await store.apply(Batch(A, epoch, number, number, (change,), rows))


def count(view: View) -> int:
    facts = view.facts(A)
    return facts.counts[0] if facts else -1


@pytest.fixture
async def store(clock: FakeClock) -> AsyncIterator[MemoryStore]:
    made = MemoryStore(clock, IndexSettings(stream_entries=20))
    yield made
    await made.close()


async def test_a_view_begins_with_the_snapshot_and_goes_on_with_the_tail(
    store: MemoryStore, clock: FakeClock
) -> None:
    await store.begin_life(A, None)
    await store.known(Known(A, ONE, Knowledge.EXACT, "live", 1.0))
    for number in range(40):  # more than the stream keeps
        await put(store, number)
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    follower = Follower(store, view, clock, metrics)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        assert count(view) == 40 and view.known(A) is not None
        await put(store, 40)
        await until(lambda: count(view) == 41)
        facts = view.facts(A)
        assert facts is not None and facts.last == 40
        assert follower.cursor == await store.head()
        await store.begin_life(A, ONE)
        await until(lambda: view.epoch(A) == 2)
        assert count(view) == 0
    value = metrics.registry.get_sample_value
    assert value("kvplane_index_entries_total") == 2
    assert value("kvplane_index_blocks", {"worker": "a", "tier": "gpu"}) == 0
    assert value("kvplane_index_lag_seconds") == 0


async def test_a_follower_that_fell_behind_begins_again_from_a_snapshot(
    store: MemoryStore, clock: FakeClock
) -> None:
    await store.begin_life(A, None)
    view, metrics = View(), IndexMetrics(CollectorRegistry())
    follower = Follower(store, view, clock, metrics)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        for number in range(100):  # none of these awaits lets the follower run
            await put(store, number)

        def caught_up() -> bool:
            clock.advance(1)
            return count(view) == 100

        await until(caught_up)
    errors = metrics.registry.get_sample_value
    assert errors("kvplane_index_store_errors_total", {"kind": "cursor_gone"}) == 1


async def test_lag_is_the_age_of_the_last_entry_until_the_stream_is_idle(
    store: MemoryStore, clock: FakeClock
) -> None:
    await store.begin_life(A, None)
    view = View()
    follower = Follower(store, view, clock)
    async with running([follower]):
        await asyncio.wait_for(follower.ready.wait(), 5)
        await put(store, 0)
        clock.advance(0.25)
        await until(lambda: count(view) == 1)
        assert follower.lag_ms() == 250
        clock.advance(1)
        assert follower.lag_ms() == 0 and follower.down_s() == 0


async def test_an_outage_keeps_the_view_and_ends_without_a_new_snapshot(tmp_path: object) -> None:
    port, view = free_port(), View()
    disk = ("--dir", str(tmp_path), "--appendonly", "yes", "--appendfsync", "always")
    settings = IndexSettings(block_ms=50, command_timeout_s=1.0)
    metrics = IndexMetrics(CollectorRegistry())
    store = RedisStore(f"redis://127.0.0.1:{port}/0", settings=settings)
    follower = Follower(store, view, SystemClock(), metrics)
    try:
        with server(binary(), *disk, port=port):
            await store.begin_life(A, None)
            await put(store, 0)
            await follower.start()
            await asyncio.wait_for(follower.ready.wait(), 5)
        await until(lambda: follower.down_s() > 0)
        assert count(view) == 1 and follower.lag_ms() > 0
        with server(binary(), *disk, port=port):
            await until(lambda: follower.down_s() == 0)
            await put(store, 1)
            await until(lambda: count(view) == 2)
        assert metrics.registry.get_sample_value("kvplane_index_snapshots_total") == 1
    finally:
        await follower.stop()
        await store.close()

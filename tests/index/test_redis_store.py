"""What only a store in Redis can suffer: wrong shards, flushes, outages; and its public layout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from kit.ports import free_port
from kit.redis import binary, server
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from kvplane.index import (
    Applied,
    Batch,
    CursorGone,
    IndexSettings,
    RedisStore,
    Row,
    ShardsFixed,
    StaleEpoch,
    StoreDown,
)
from kvplane.index.stores.reading import ours
from kvplane.runtime import cancel
from kvplane.vocabulary import BlockHash, Cursor, Epoch, Pod, Stored, Tier, Worker

A, ONE = Worker(Pod("a")), Epoch(1)
FAST = IndexSettings(block_ms=50, command_timeout_s=1.0)
ROW = Row(BlockHash(2), BlockHash(1), (1, 0, 0, 0), 16)


def batch(number: int) -> Batch:
    change = Stored(A, ONE, Tier.GPU, BlockHash(1), (BlockHash(2),), 16)
    return Batch(A, ONE, number, number, (change,), {b"k": ROW})


@pytest.fixture
async def raw(redis_url: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def store(redis_url: str, redis_prefix: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(redis_url, redis_prefix, settings=FAST)
    yield made
    await made.close()


async def first_after(store: RedisStore, cursor: Cursor) -> object:
    async with asyncio.timeout(5), aclosing(store.tail(cursor)) as entries:
        async for entry in entries:
            return entry
    return None


async def test_the_keys_are_those_drawn_and_share_one_hash_tag(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    tag = f"{{{redis_prefix}:0}}"
    keys = {key.decode() async for key in raw.scan_iter(f"*{redis_prefix}*", count=1000)}
    wanted = {f"{tag}:w", f"{tag}:m:a", f"{tag}:t:1:a", f"{tag}:n", f"{tag}:x"}
    assert keys == {f"{redis_prefix}:shards"} | wanted
    assert await raw.hgetall(f"{tag}:t:1:a") == {b"k": ROW.encode()}


async def test_a_forgotten_worker_leaves_only_a_tombstone_that_expires(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    await store.forget(A, ONE)
    tag = f"{{{redis_prefix}:0}}"
    assert not await raw.exists(f"{tag}:t:1:a", f"{tag}:w")
    assert 0 < await raw.ttl(f"{tag}:m:a") <= FAST.tombstone_s
    await store.begin_life(A, None)
    assert await raw.ttl(f"{tag}:m:a") == -1


async def test_the_number_of_shards_is_fixed_at_first_use(
    redis_url: str, redis_prefix: str
) -> None:
    first, same, other = (RedisStore(redis_url, redis_prefix, n) for n in (2, None, 4))
    try:
        assert await first.begin_life(A, None) == 1
        assert await same.begin_life(A, None) == 1
        with pytest.raises(ShardsFixed, match="made with 2"):
            await other.position(A)
    finally:
        for one in (first, same, other):
            await one.close()


async def test_a_flushed_store_is_noticed_by_writer_and_reader(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    cursor = await store.head()
    waiting = asyncio.create_task(first_after(store, cursor))
    async for key in raw.scan_iter(f"*{redis_prefix}*", count=1000):
        await raw.delete(key)
    assert await store.apply(batch(1)) == StaleEpoch(Epoch(0))
    with pytest.raises(CursorGone):
        await waiting
    assert await store.begin_life(A, ONE) == 2


async def test_a_hole_in_the_counter_is_a_gap_for_readers(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    cursor = await store.head()
    await raw.incr(f"{{{redis_prefix}:0}}:n")
    await store.apply(batch(0))
    with pytest.raises(CursorGone, match="entry 3 follows it"):
        await first_after(store, cursor)


async def test_an_entry_of_a_later_version_is_not_guessed_at(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    cursor = await store.head()
    tag = f"{{{redis_prefix}:0}}"
    number = await raw.incr(f"{tag}:n")
    await raw.xadd(f"{tag}:x", {"v": 2, "n": number, "w": "a", "e": 1, "l": "", "c": b"\x90"})
    with pytest.raises(CursorGone, match="version"):
        await first_after(store, cursor)


async def test_no_server_is_store_down_without_the_password() -> None:
    store = RedisStore(f"redis://:hunter2@127.0.0.1:{free_port()}/0", settings=FAST)
    with pytest.raises(StoreDown) as caught:
        await store.begin_life(A, None)
    assert "hunter2" not in str(caught.value) and "127.0.0.1" in str(caught.value)
    await store.close()


async def test_a_store_survives_a_restart_of_the_server(tmp_path: object) -> None:
    port = free_port()
    disk = ("--dir", str(tmp_path), "--appendonly", "yes", "--appendfsync", "always")
    with server(binary(), *disk, port=port) as url:
        store = RedisStore(url, settings=FAST)
        await store.begin_life(A, None)
        await store.apply(batch(0))
        cursor = await store.head()
    with pytest.raises(StoreDown):
        await store.apply(batch(1))
    with server(binary(), *disk, port=port):
        assert isinstance(await store.apply(batch(1)), Applied)
        assert await first_after(store, cursor) is not None
        assert await store.table(A) == {b"k": ROW}
        await store.close()


async def test_a_cancelled_call_never_leaves_its_answer_to_the_next(store: RedisStore) -> None:
    workers = [Worker(Pod(f"w{number}")) for number in range(8)]
    for number, worker in enumerate(workers):
        for _ in range(number + 1):
            await store.begin_life(worker, Epoch(_) if _ else None)
    for turn in range(200):
        calls = [asyncio.create_task(store.position(worker)) for worker in workers]
        await asyncio.sleep(0)
        calls[turn % 8].cancel()
        for number, found in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
            if isinstance(found, asyncio.CancelledError):
                continue
            assert not isinstance(found, BaseException) and found is not None
            assert found.epoch == number + 1


@pytest.mark.parametrize("ends_with", [None, RedisConnectionError("gone")])
async def test_a_cancellation_that_the_client_loses_still_ends_the_task(
    ends_with: Exception | None,
) -> None:
    async def work() -> None:
        with ours("redis://h:1"):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:  # as asyncio.wait_for does before Python 3.12
                if ends_with:
                    raise ends_with from None

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancel(task)
    assert task.cancelled()

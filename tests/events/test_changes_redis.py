"""Readers of the change stream while their Redis is emptied, restarted, or does not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from kit.ports import free_port
from kit.redis import binary, server
from kit.streams import QUICK
from kit.wait import until
from redis.asyncio import Redis

from kvplane.events import Broadcast
from kvplane.events.reader import Reader
from kvplane.index import Batch, CursorGone, IndexSettings, RedisStore
from kvplane.vocabulary import BlockHash, Epoch, Pod, Stored, Tier, Worker

P = Worker(Pod("p"))
FAST = IndexSettings(block_ms=100, command_timeout_s=1.5, stream_entries=100)


@contextlib.asynccontextmanager
async def told(url: str, prefix: str) -> AsyncIterator[tuple[RedisStore, Broadcast]]:
    store = RedisStore(url, prefix, settings=FAST)
    broadcast = Broadcast(store, settings=QUICK)
    await store.begin_life(P, None)
    try:
        yield store, broadcast
    finally:
        await broadcast.stop()
        await store.close()


async def write(store: RedisStore, first: int, last: int) -> None:
    for number in range(first, last):
        stored = Stored(P, Epoch(1), Tier.GPU, None, (BlockHash(number),), 16)
        await store.apply(Batch(P, Epoch(1), number, number, (stored,)))


async def take(reader: Reader, events: int) -> None:
    async with asyncio.timeout(20):
        while events > 0:
            events -= (await reader.take(1.0)).count(b"event: changes")
    assert events == 0


async def gone(reader: Reader) -> str:
    with pytest.raises(CursorGone) as raised:
        async with asyncio.timeout(30):
            while True:
                await reader.take(1.0)
    return raised.value.reason


async def test_readers_of_a_stream_that_was_emptied_are_told_so(
    redis_url: str, redis_prefix: str
) -> None:
    async with told(redis_url, redis_prefix) as (store, broadcast):
        readers = [await broadcast.join(None) for _ in range(3)]
        await write(store, 0, 5)
        for reader in readers:
            await take(reader, 5)
        redis = Redis.from_url(redis_url)
        keys = [key async for key in redis.scan_iter(f"*{redis_prefix}*")]
        await redis.delete(*keys)
        assert all(await asyncio.gather(*map(gone, readers)))
        await store.begin_life(P, None)
        fresh = await broadcast.join(None)
        await write(store, 0, 2)
        await take(fresh, 2)
        await redis.aclose()


async def test_a_reader_that_was_away_for_longer_than_the_stream_is_told_so(
    redis_url: str, redis_prefix: str
) -> None:
    async with told(redis_url, redis_prefix) as (store, broadcast):
        old = await store.head()
        await write(store, 0, 1000)
        with pytest.raises(CursorGone):
            await broadcast.join(old)
        assert broadcast.behind._value == QUICK.changes_behind


async def test_a_server_that_freezes_costs_no_change(redis_prefix: str) -> None:
    with server(binary()) as url:
        async with told(url, redis_prefix) as (store, broadcast):
            reader = await broadcast.join(None)
            await write(store, 0, 3)
            await take(reader, 3)
            redis = Redis.from_url(url)
            await redis.execute_command("CLIENT", "PAUSE", "2000", "ALL")
            assert await reader.take(0.5) == b""
            await until(lambda: _written(store, 3, 6), 30, "the server to answer again")
            await take(reader, 3)
            await redis.aclose()


async def _written(store: RedisStore, first: int, last: int) -> bool:
    with contextlib.suppress(Exception):
        await write(store, first, last)
        return True
    return False


async def test_a_server_that_comes_back_empty_is_told_and_one_that_is_away_is_waited_for(
    redis_prefix: str,
) -> None:
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        with server(binary(), port=port) as url:
            store, broadcast = await stack.enter_async_context(told(url, redis_prefix))
            reader = await broadcast.join(None)
            await write(store, 0, 3)
            await take(reader, 3)
        assert await reader.take(0.5) == b""
        with server(binary(), port=port):
            await until(lambda: _begun(store), 30, "the store to be used again")
            assert await gone(reader)


async def _begun(store: RedisStore) -> bool:
    with contextlib.suppress(Exception):
        await store.begin_life(P, None)
        return True
    return False

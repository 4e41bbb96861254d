"""What only a store in Redis can suffer: wrong shards, flushes, outages; and its public layout."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
import pytest
from kit.ports import free_port
from kit.redis import binary, server
from kit.wait import until
from redis.asyncio import Redis

from kvplane.index import (
    Applied,
    Batch,
    CursorGone,
    IndexSettings,
    Position,
    RedisStore,
    Row,
    ShardsFixed,
    StaleEpoch,
    StoreDown,
    StoreUnfit,
)
from kvplane.index.stores import codec
from kvplane.runtime import cancel
from kvplane.vocabulary import (
    BlockHash,
    Cursor,
    Epoch,
    Knowledge,
    Known,
    Pod,
    Stored,
    Tier,
    Worker,
)

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
    outcome = await store.apply(batch(0))
    await store.beat("me", 60.0)
    await store.known(Known(A, ONE, Knowledge.EXACT, "live", 7.5, "me"))
    tag = f"{{{redis_prefix}:0}}"
    keys = {key.decode() async for key in raw.scan_iter(f"*{redis_prefix}*", count=1000)}
    wanted = {f"{tag}:{key}" for key in ("w", "m:a", "t:1:a", "n", "x", "b")}
    assert keys == {f"{redis_prefix}:shards"} | wanted
    assert await raw.hgetall(f"{redis_prefix}:shards") == {b"shards": b"1", b"format": b"2"}
    assert await raw.hgetall(f"{tag}:t:1:a") == {b"": b"", b"k": ROW.encode()}
    entries = await raw.xrange(f"{tag}:x")
    ids = [at for at, _ in entries]
    assert isinstance(outcome, Applied) and outcome.cursor == f"{ids[1].decode()}.2"
    assert [fields[b"n"] for _, fields in entries] == [b"1", b"2", b"3"]
    assert [fields[b"p"] for _, fields in entries] == [b"0-0", *ids[:2]]
    assert {tuple(fields) for _, fields in entries} == {(b"v", b"n", b"p", b"w", b"e", b"l", b"c")}
    assert await raw.hgetall(f"{tag}:n") == {b"n": b"3", b"i": ids[2]}
    meta = await raw.hgetall(f"{tag}:m:a")
    told = msgspec.msgpack.decode(meta.pop(b"k:me"))
    assert told == ["exact", "live", 7.5]
    assert meta == {b"e": b"1", b"l": b"0", b"h": ids[1]}


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


async def test_a_new_life_keeps_nothing_of_the_old_one_and_dead_ingests_leave_nothing(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    await store.known(Known(A, ONE, Knowledge.EXACT, "live", 7.5, "me"))
    await store.begin_life(A, ONE)
    tag = f"{{{redis_prefix}:0}}"
    assert await raw.hgetall(f"{tag}:m:a") == {b"e": b"2"}
    assert not await raw.exists(f"{tag}:t:1:a", f"{tag}:t:2:a")
    for number in range(5):
        await store.beat(f"old{number}", 0.001)

    async def nobody() -> bool:
        return not await store.living()

    await until(nobody)
    await store.beat("me", 60.0)
    assert await raw.zrange(f"{tag}:b", 0, -1) == [b"me"]


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


async def write_past_the_script(raw: Redis, tag: str, **other: object) -> None:
    """One more entry, well linked but for what `other` says."""
    number, at = await raw.hmget(f"{tag}:n", "n", "i")
    fields = {"v": codec.VERSION, "n": int(number) + 1, "p": at, "w": "a", "e": 1, "l": ""}
    made = await raw.xadd(f"{tag}:x", {**fields, "c": b"\x90", **other})
    await raw.hset(f"{tag}:n", mapping={"n": int(number) + 1, "i": made})


@pytest.mark.parametrize("other", [{"n": 4}, {"n": 2}, {"n": "x"}, {"p": "1-1"}, {"p": ""}])
async def test_an_entry_that_does_not_follow_the_one_before_is_a_gap_for_readers(
    store: RedisStore, raw: Redis, redis_prefix: str, other: dict[str, object]
) -> None:
    await store.begin_life(A, None)
    cursor, tag = await store.head(), f"{{{redis_prefix}:0}}"
    await write_past_the_script(raw, tag)
    assert await first_after(store, cursor) is not None
    cursor = await store.head()
    await write_past_the_script(raw, tag, **other)
    with pytest.raises(CursorGone, match="follows it") as caught:
        await first_after(store, cursor)
    assert caught.value.shards == {0}


@pytest.mark.parametrize(
    "other", [{"v": codec.VERSION + 1}, {"c": b"?"}, {"e": "x"}, {"w": ""}, {"l": "x"}]
)
async def test_an_entry_that_cannot_be_read_is_not_guessed_at(
    store: RedisStore, raw: Redis, redis_prefix: str, other: dict[str, object]
) -> None:
    await store.begin_life(A, None)
    cursor = await store.head()
    await write_past_the_script(raw, f"{{{redis_prefix}:0}}", **other)
    with pytest.raises(CursorGone, match="cannot be read"):
        await first_after(store, cursor)


async def test_a_store_rolled_back_is_noticed_by_who_reads_on(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    """A failover or a crash lost the newest entries; others took their numbers."""
    await store.begin_life(A, None)
    await store.apply(batch(0))
    keys = [key async for key in raw.scan_iter(f"*{redis_prefix}:0*", count=1000)]
    kept = {key: await raw.dump(key) for key in keys}
    await store.apply(batch(1))
    cursor = await store.head()
    for key in keys:
        await raw.restore(key, 0, kept[key], replace=True)
    with pytest.raises(CursorGone):
        await first_after(store, cursor)
    await store.apply(batch(1))
    await store.apply(batch(2))
    with pytest.raises(CursorGone):
        await first_after(store, cursor)


@pytest.mark.parametrize("key", ["x", "n"])
async def test_a_stream_that_lost_its_end_is_noticed_though_it_is_silent(
    store: RedisStore, raw: Redis, redis_prefix: str, key: str
) -> None:
    await store.begin_life(A, None)
    early = await store.head()
    await store.apply(batch(0))
    waiting = asyncio.create_task(first_after(store, await store.head() if key == "n" else early))
    if key == "x":
        await raw.delete(f"{{{redis_prefix}:0}}:x")  # thrown away, the counter is still there
        waiting.cancel()
        waiting = asyncio.create_task(first_after(store, early))
    else:
        await raw.delete(f"{{{redis_prefix}:0}}:n")
    with pytest.raises(CursorGone):
        await waiting


async def test_another_entry_under_the_number_of_the_last_one_is_noticed_though_it_is_silent(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    """Written by a master whose clock is behind: no read after our place gives it."""
    await store.begin_life(A, None)
    await store.apply(batch(0))
    cursor = await store.head()
    await raw.hset(f"{{{redis_prefix}:0}}:n", "i", "1-1")
    with pytest.raises(CursorGone):
        await first_after(store, cursor)


async def test_a_stream_lost_while_another_shard_is_busy_is_noticed(
    raw: Redis, redis_url: str, redis_prefix: str
) -> None:
    store = RedisStore(redis_url, redis_prefix, 2, FAST)
    workers = [Worker(Pod(f"w{number}")) for number in range(8)]
    await store.begin_life(A, None)
    quiet = store.shard_of(A)
    busy = next(worker for worker in workers if store.shard_of(worker) != quiet)
    await store.begin_life(busy, None)
    cursor = await store.head()
    await raw.delete(f"{{{redis_prefix}:{quiet}}}:n", f"{{{redis_prefix}:{quiet}}}:x")
    writing = asyncio.create_task(keep_writing(store, busy))
    try:
        with pytest.raises(CursorGone) as caught:
            async with asyncio.timeout(10), aclosing(store.tail(cursor)) as entries:
                async for _ in entries:
                    pass
        assert caught.value.shards == {quiet}
    finally:
        await cancel(writing)
        await store.close()


async def keep_writing(store: RedisStore, worker: Worker) -> None:
    for number in range(1_000_000):
        await store.apply(Batch(worker, ONE, number, number))


async def test_a_table_that_was_thrown_away_makes_the_position_not_whole(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    await raw.delete(f"{{{redis_prefix}:0}}:t:1:a")
    assert await store.position(A) == Position(ONE, 0, whole=False)
    await store.apply(batch(1))  # some rows are there again, and still it is not whole
    assert await store.position(A) == Position(ONE, 1, whole=False)
    await store.apply(Batch(A, ONE, 9, 9, reset=True))
    assert await store.position(A) == Position(ONE, 9, whole=True, gaps=1)


async def test_what_a_lost_life_left_behind_is_not_taken_for_the_next_ones(
    store: RedisStore, raw: Redis, redis_prefix: str
) -> None:
    await store.begin_life(A, None)
    await store.apply(batch(0))
    left = await raw.dump(f"{{{redis_prefix}:0}}:t:1:a")
    await raw.delete(f"{{{redis_prefix}:0}}:m:a")  # thrown away, and its table is not
    fresh = await store.begin_life(A, None)
    await raw.restore(f"{{{redis_prefix}:0}}:t:{fresh}:a", 0, left)
    assert await store.table(A) == {} and (await store.snapshot()).workers[0].table == {}
    await store.apply(Batch(A, fresh, 0, 0))
    assert await store.table(A) == {} and (await store.snapshot()).workers[0].table == {}


@pytest.mark.parametrize("lives", [1, 2, 9])
async def test_a_life_after_a_lost_one_is_newer_than_all_that_readers_saw(
    store: RedisStore, raw: Redis, redis_prefix: str, lives: int
) -> None:
    """Or they would take all that is said of it for old, and believe what is over."""
    epoch = await store.begin_life(A, None)
    while epoch < lives:
        epoch = await store.begin_life(A, epoch)
    await store.apply(Batch(A, epoch, 0, 0, (), {b"k": ROW}))
    meta = f"{{{redis_prefix}:0}}:m:a"
    for seen in (None, epoch):  # who was started since does not know which life it was
        kept = await raw.dump(meta)
        await raw.delete(meta)
        assert await store.begin_life(A, seen) > epoch
        await raw.restore(meta, 0, kept, replace=True)


async def test_a_store_of_another_format_is_refused_with_a_sentence(
    redis_url: str, redis_prefix: str, raw: Redis
) -> None:
    stores = [RedisStore(redis_url, redis_prefix, writes=writes) for writes in (True, False)]
    await raw.set(f"{redis_prefix}:shards", 1)  # as format 1 kept it
    for store in stores:
        with pytest.raises(StoreUnfit, match="has format 1, this program writes format 2"):
            await store.fit()
    await raw.delete(f"{redis_prefix}:shards")
    await raw.hset(f"{redis_prefix}:shards", mapping={"shards": 1, "format": 3})
    for store in stores:
        with pytest.raises(StoreUnfit, match="has format 3"):
            await store.begin_life(A, None)
    for field, value in (("format", b"\xff"), ("shards", "many"), ("shards", ""), ("shards", "0")):
        await raw.hset(f"{redis_prefix}:shards", mapping={"shards": 1, "format": 2, field: value})
        for store in stores:
            with pytest.raises(StoreUnfit, match="another --redis-prefix"):
                await store.begin_life(A, None)
    for store in stores:
        await store.close()


async def test_who_only_reads_does_not_fix_the_number_of_shards(
    redis_url: str, redis_prefix: str, raw: Redis
) -> None:
    reader, told = (RedisStore(redis_url, redis_prefix, n, FAST, writes=False) for n in (None, 2))
    with pytest.raises(StoreDown, match="no ingest has used this store yet"):
        await reader.head()
    assert await told.shards() == 2 and await told.head() == "0-0.0_0-0.0"
    assert not await raw.exists(f"{redis_prefix}:shards")
    writer = RedisStore(redis_url, redis_prefix, 3, FAST)
    await writer.begin_life(A, None)
    assert await reader.shards() == 3
    with pytest.raises(ShardsFixed, match="made with 3"):
        await told.head()
    for store in (reader, told, writer):
        await store.close()


async def test_a_writer_that_finds_its_store_emptied_fixes_its_number_of_shards_again(
    redis_url: str, redis_prefix: str, raw: Redis
) -> None:
    store = RedisStore(redis_url, redis_prefix, 3, FAST)
    await store.begin_life(A, None)
    await raw.delete(*[key async for key in raw.scan_iter(f"*{redis_prefix}*", count=1000)])
    await store.begin_life(A, ONE)
    assert await raw.hget(f"{redis_prefix}:shards", "shards") == b"3"
    await store.close()


async def test_no_server_is_store_down_without_the_password() -> None:
    for kind in ("redis://", "rediss://", "redis+cluster://", "redis+sentinel://"):
        url = f"{kind}:hunter2@127.0.0.1:{free_port()}{'/mymaster' * ('sentinel' in kind)}"
        store = RedisStore(url, settings=FAST)
        with pytest.raises(StoreDown) as caught:
            await store.begin_life(A, None)
        shown = f"{caught.value!r} {caught.value} {caught.value.__cause__!r} {vars(store)}"
        assert "hunter2" not in shown and "127.0.0.1" in str(caught.value)
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

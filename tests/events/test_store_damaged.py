"""A store in which somebody else wrote: whose part cannot be read is heard again, nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from kit.batches import drop, payload, send, store
from kit.ingesting import ingesting, up
from kit.redis import binary, server
from kit.streams import QUICK, WORKER, Publisher
from kit.wait import until
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from kvplane.index import Follower, IndexMetrics, RedisStore, View
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import Knowledge, Pod, Worker

WATCHFUL = replace(QUICK, store_check_s=0.05)
TABLE, META, NAMES = "{t:0}:t:1:p0", "{t:0}:m:p0", "{t:0}:w"
DAMAGE = {
    "row": (TABLE, {b"u" + bytes(8): b"\x7fgarbage"}),
    "short row": (TABLE, {b"u" + bytes(8): b"\x10"}),
    "empty row": (TABLE, {b"u" + bytes(8): b""}),
    "waiting": (TABLE, {b"?wu" + bytes(8): b"\x30\xc1"}),
    "chunk": (TABLE, {b"?cu" + bytes(8): b"\x30\x01"}),
    "memo": (TABLE, {b"!g": b"\x30\x01"}),
    "epoch": (META, {"e": "abc"}),
    "no epoch": (META, {"e": ""}),
    "batch": (META, {"l": "-"}),
    "heard": (META, {"h": "now"}),
    "gaps": (META, {"o": "many"}),
    "state": (META, {"k:x": b"\x93\xa4hazy\xa0\x00"}),
    "word": (META, {"k:x": b"\xc1"}),
}


@pytest.fixture
def own_redis() -> Iterator[str]:
    with server(binary()) as url:
        yield url


@pytest.fixture
async def raw(own_redis: str) -> AsyncIterator[Redis]:
    client = Redis.from_url(own_redis)
    yield client
    await client.aclose()


@pytest.mark.parametrize("restarted", [False, True], ids=["alive", "restarted"])
@pytest.mark.parametrize("damage", list(DAMAGE))
async def test_what_cannot_be_read_is_heard_again(
    own_redis: str, raw: Redis, damage: str, restarted: bool
) -> None:
    """Not exact while nobody follows, and whole in the end: by us, and by who starts after it."""
    kept = RedisStore(own_redis, "t")
    key, fields = DAMAGE[damage]

    async def hurt() -> None:
        await raw.hset(key, mapping=fields)  # type: ignore[arg-type,misc]
        await one.publish(payload(store(4), drop(1)))

    async with Publisher(topic=b"") as one:
        async with ingesting(kept, WATCHFUL) as ingest:
            await ingest.subscriptions.up(up("p0", one))
            await one.listened()
            await send(one, 1, 2, 3)
            await ingest.at("p0", 2)
            if not restarted:
                await hurt()
                if key == TABLE:  # an ingest that lives reads it when it has to begin again
                    await raw.hincrby(META, "o", 1)
                await until(lambda: ingest.held("p0", (1, 2, 3, 4)) == [2, 3, 4], 10)
                await ingest.knows("p0", Knowledge.EXACT)
        if restarted:
            await hurt()
            async with ingesting(kept, WATCHFUL) as ingest:
                await ingest.subscriptions.up(up("p0", one))
                await until(lambda: ingest.held("p0", (1, 2, 3, 4)) == [2, 3, 4], 10)
                await ingest.knows("p0", Knowledge.EXACT)
    await kept.close()


async def test_who_cannot_follow_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the fault is: the last word must not be that all is well."""
    from kvplane.events.writer import Writer
    from kvplane.index import MemoryStore

    kept = MemoryStore(SystemClock())
    async with Publisher() as one, ingesting(kept, WATCHFUL) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await one.listened()
        await send(one, 1)
        await ingest.knows("p0", Knowledge.EXACT)
        with monkeypatch.context() as broken:

            async def fails(*_: Any) -> None:
                raise ZeroDivisionError("a fault of ours")

            broken.setattr(Writer, "take", fails)
            await send(one, 2)
            await ingest.knows("p0", Knowledge.DARK, "ZeroDivisionError: a fault of ours")
        await until(lambda: ingest.held("p0", (1, 2)) == [1, 2], 20)
        await ingest.knows("p0", Knowledge.EXACT)
    await kept.close()


@pytest.mark.parametrize("lives", [1, 3])
async def test_facts_that_were_thrown_away_do_not_leave_the_old_life_standing(
    own_redis: str, raw: Redis, lives: int
) -> None:
    kept = RedisStore(own_redis, "t")
    async with Publisher(topic=b"") as one, ingesting(kept, WATCHFUL) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await one.listened()
        await send(one, 1, 2)
        await ingest.at("p0", 1)
        for life in range(1, lives):
            await kept.begin_life(WORKER, ingest.view.epoch(WORKER))
            await until(lambda life=life: (ingest.view.epoch(WORKER) or 0) > life)
            await ingest.at("p0", 1)
        await raw.delete(META)
        await one.publish(payload(store(3), drop(1)))
        await until(lambda: ingest.held("p0", (1, 2, 3)) == [2, 3], 10)
        await ingest.knows("p0", Knowledge.EXACT)
    await kept.close()


async def test_a_name_that_cannot_be_read_hides_nobody(own_redis: str, raw: Redis) -> None:
    kept = RedisStore(own_redis, "t")
    await kept.begin_life(WORKER, None)
    await raw.sadd(NAMES, b"\xff\xfe", "p@" + "9" * 5000, "torn")  # type: ignore[misc]
    await raw.hset("{t:0}:m:torn", mapping={"e": "abc"})  # type: ignore[misc]
    view = View()
    async with running([follower := Follower(kept, view, SystemClock())]):
        await until(follower.ready.is_set)
        assert view.workers() == (WORKER,)
    await kept.close()


async def test_an_entry_that_cannot_be_read_costs_a_few_snapshots_not_a_flood(
    own_redis: str, raw: Redis
) -> None:
    """It stays the stream's end until somebody writes, and that may take long."""
    kept, view, registry = RedisStore(own_redis, "t"), View(), CollectorRegistry()

    def snapshots() -> float:
        return registry.get_sample_value("kvplane_index_snapshots_total") or 0.0

    await kept.begin_life(WORKER, None)
    follower = Follower(kept, view, SystemClock(), IndexMetrics(registry))
    async with running([follower]):
        await until(follower.ready.is_set)
        await raw.xadd("{t:0}:x", {"foo": "bar"})
        await until(lambda: snapshots() >= 4, 10)
        waits = [next(follower._waits) for _ in range(3)]
        assert waits[0] > 0.3 and waits[2] > 1  # longer each time, whatever the machine does
        await kept.begin_life(Worker(Pod("p1")), None)
        await until(lambda: len(view.workers()) == 2, 10)
        async with aclosing(kept.tail(follower.cursor)):
            assert await kept.head() == follower.cursor
    await kept.close()

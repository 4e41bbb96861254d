"""A store that lost something, all of it or a little: seen, and heard again from the engines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kit.batches import drop, held, payload, send, store
from kit.ingesting import Ingest, ingesting, up
from kit.redis import binary, server
from kit.streams import QUICK, WORKER, Publisher, following
from kit.wait import until
from redis.asyncio import Redis

from kvplane.index import MemoryStore, Position, RedisStore, View
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Epoch, Knowledge, Known, Pod, Worker

WATCHFUL = replace(QUICK, store_check_s=0.05)
PODS = ("p0", "p1", "p2")


class Torn(MemoryStore):
    """A store that says what a test wants it to say."""

    torn = False  # the table of the next life that is asked about is gone
    thrown = 0

    async def position(self, worker: Worker) -> Position | None:
        found = await super().position(worker)
        return replace(found, whole=False) if found and found.epoch == 1 and self.torn else found

    async def evicted(self) -> int:
        return self.thrown


@pytest.fixture
async def torn() -> AsyncIterator[Torn]:
    kept = Torn(SystemClock())
    yield kept
    await kept.close()


async def test_a_table_that_is_gone_while_its_position_stayed_is_heard_again(torn: Torn) -> None:
    async with Publisher() as one, ingesting(torn, WATCHFUL) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await one.listened()
        await send(one, 1, 2, 3)
        await ingest.at("p0", 2)
        torn.torn = True
        await until(lambda: ingest.view.epoch(WORKER) == 2)
        await until(lambda: ingest.held("p0", (1, 2, 3)) == [1, 2, 3])
        await ingest.knows("p0", Knowledge.EXACT)
        assert ingest.count("resyncs_total", reason="lost") == 1
        assert ingest.count("restarts_total") == 0  # it was the store, not the engine


async def test_a_table_that_is_gone_when_we_start_is_heard_again(torn: Torn) -> None:
    async with Publisher() as one:
        async with ingesting(torn, WATCHFUL) as ingest:
            await ingest.subscriptions.up(up("p0", one))
            await one.listened()
            await send(one, 1, 2)
            await ingest.at("p0", 1)
        torn.torn = True
        async with ingesting(torn, WATCHFUL) as ingest:
            await ingest.subscriptions.up(up("p0", one))
            await until(lambda: ingest.view.epoch(WORKER) == 2)
            await until(lambda: ingest.held("p0", (1, 2)) == [1, 2])


async def test_a_store_that_evicts_is_not_believed_about_anybody(torn: Torn) -> None:
    async with (
        Publisher() as one,
        Publisher(topic=b"") as other,
        ingesting(torn, WATCHFUL) as ingest,
    ):
        for name, publisher in (("p0", one), ("p1", other)):
            await ingest.subscriptions.up(up(name, publisher))
            await publisher.listened()
            await send(publisher, 1, 2)
            await ingest.at(name, 1)
        torn.thrown = 7
        for name in ("p0", "p1"):
            await until(lambda name=name: ingest.view.epoch(Worker(Pod(name))) == 2)
            await until(lambda name=name: ingest.held(name, (1, 2)) == [1, 2])
            await ingest.knows(name, Knowledge.EXACT)
        assert ingest.count("evictions_total") == 1
        assert ingest.count("resyncs_total", reason="evicted") == 2


async def test_what_a_store_forgot_that_we_told_is_told_again() -> None:
    kept = MemoryStore(SystemClock())
    async with Publisher() as one, ingesting(kept, WATCHFUL) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await ingest.knows("p0", Knowledge.EXACT)
        me = ingest.subscriptions.ingest
        older = Known(WORKER, Epoch(1), Knowledge.DARK, "an older word", 1.0, me)
        await kept.known(older)  # a replica that took over had not heard the last one
        await ingest.knows("p0", Knowledge.DARK)
        await ingest.knows("p0", Knowledge.EXACT)


async def test_a_store_that_went_back_is_brought_forward_again() -> None:
    class Back(MemoryStore):
        """Goes back to what it was when `keep` was called."""

        def keep(self) -> None:
            import copy

            self.kept = copy.deepcopy(self._lives)

        def go_back(self) -> None:
            self._lives = self.kept

    kept = Back(SystemClock())
    async with Publisher() as one, ingesting(kept, WATCHFUL) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await one.listened()
        await send(one, 1, 2)
        await ingest.at("p0", 1)
        kept.keep()
        await one.publish(payload(store(3), drop(1)))
        await ingest.at("p0", 2)
        kept.go_back()

        async def whole() -> bool:
            position = await kept.position(WORKER)
            return position is not None and position.last == 2

        await until(whole)
        view = View()
        view.load(await kept.snapshot())
        assert ingest.held("p0", (1, 2, 3)) == [2, 3]
        assert ingest.count("restarts_total") == 0


async def test_a_gap_that_only_the_other_ingest_could_not_close_makes_us_partial_too() -> None:
    """It wrote past the gap, so the table that both share lacks what we have heard."""
    kept = MemoryStore(SystemClock())
    settings = replace(WATCHFUL, idle_check_s=60.0, settle_s=60.0)
    lame = Publisher(with_replay=False)
    async with lame, following(lame, store=kept, settings=settings) as other:
        await lame.listened()
        await send(lame, 1)
        await other.at(0)
        whole = Publisher(topic=lame.topic)
        whole.buffer, whole.sequence = dict(lame.buffer), lame.sequence
        async with whole, following(whole, store=kept, settings=settings) as one:
            await whole.listened()
            await until(lambda: one.subscriber.sequence == 0)
            one.subscriber.distrust  # noqa: B018 - it is alive
            await send(lame, 2, 3, live=False)
            await send(lame, 4)  # to the other: batches 1 and 2 are lost for good
            await other.at(3)
            for name in (2, 3, 4):
                await send(whole, name)
            reason = await until(lambda: partial(one.subscriber.stream))
            assert re.search("incomplete since .*: batches before 3", reason)
            assert one.count("resyncs_total", reason="gap") >= 1
    await kept.close()


async def test_a_gap_that_the_other_ingest_has_written_over_already_clears_nothing() -> None:
    """Who could not close it takes over what is there, or it would not know what is removed."""
    kept = MemoryStore(SystemClock())
    settings = replace(WATCHFUL, idle_check_s=60.0, settle_s=60.0)
    lame = Publisher(with_replay=False)
    async with lame, following(lame, store=kept, settings=settings) as other:
        await lame.listened()
        await send(lame, 1)
        await other.at(0)
        whole = Publisher(topic=lame.topic, buffer=dict(lame.buffer), sequence=1)
        async with whole, following(whole, store=kept, settings=settings) as one:
            await whole.listened()
            await until(lambda: one.subscriber.sequence == 0)
            await send(whole, 2, 3, 4)
            await one.at(3)
            await send(lame, 2, 3, live=False)
            await send(lame, 4)
            await until(lambda: other.count("resyncs_total", reason="repeat") == 1)
            await lame.publish(payload(drop(1)))
            await other.at(4)
            assert held(other, 1, 2, 3, 4) == [2, 3, 4]
            facts = other.view.facts(WORKER)
            assert facts is not None and facts.gaps == 0
    await kept.close()


def partial(stream: tuple[str, str]) -> str:
    return stream[1] if stream[0] == "partial" else ""


@pytest.fixture
def own_redis() -> Any:
    """A server of this test alone, which may be emptied and stopped."""
    with server(binary()) as url:
        yield url


async def fill(ingest: Ingest, *publishers: Publisher) -> None:
    for name, one in zip(PODS, publishers, strict=False):
        await ingest.subscriptions.up(up(name, one))
        await one.listened()
    for one in publishers:
        await send(one, *range(20))
    for name, _ in zip(PODS, publishers, strict=False):
        await ingest.at(name, 19)
        await ingest.knows(name, Knowledge.EXACT)


async def test_a_redis_that_is_emptied_while_events_flow_is_filled_again(own_redis: str) -> None:
    """Never empty and exact at once: what is lost shows, or is there."""
    kept = RedisStore(own_redis, "t")
    async with (
        Publisher(topic=b"") as one,
        Publisher(topic=b"") as other,
        ingesting(kept, WATCHFUL) as ingest,
    ):
        await fill(ingest, one, other)
        watching = asyncio.create_task(never_short_and_exact(ingest, "p0", "p1"))
        admin = Redis.from_url(own_redis)
        await admin.flushall()
        await admin.aclose()
        for name in range(20, 40):
            await send(one, name)  # p0 goes on, p1 is silent
            await asyncio.sleep(0)
        await until(lambda: ingest.held("p0", range(40)) == list(range(40)), 20)
        await until(lambda: ingest.held("p1", range(20)) == list(range(20)), 20)
        for name in ("p0", "p1"):
            await ingest.knows(name, Knowledge.EXACT)
        position = await kept.position(WORKER)
        assert position is not None and position.last == 39
        watching.cancel()
        (found,) = await asyncio.gather(watching, return_exceptions=True)
        assert isinstance(found, asyncio.CancelledError), found
    await kept.close()


async def never_short_and_exact(ingest: Ingest, *names: str) -> None:
    """At no turn of the loop is a pod called exact that lacks what `fill` gave it."""
    while True:
        for name in names:
            if ingest.believed(name)[0] is Knowledge.EXACT:
                assert ingest.held(name, range(20)) == list(range(20)), name
        await asyncio.sleep(0)


async def test_a_redis_without_memory_is_written_to_again_by_itself_once_it_has_some(
    own_redis: str,
) -> None:
    kept, admin = RedisStore(own_redis, "t"), Redis.from_url(own_redis)
    async with Publisher(topic=b"") as one, ingesting(kept, WATCHFUL) as ingest:
        await fill(ingest, one)
        await admin.config_set("maxmemory", 1)
        await send(one, *range(20, 40))
        await until(lambda: ingest.count("store_errors_total") > 2)
        assert ingest.held("p0", range(40)) == list(range(20))  # the view answers as before
        await admin.config_set("maxmemory", 0)
        await ingest.at("p0", 39)
        assert ingest.held("p0", range(40)) == list(range(40))
        await ingest.knows("p0", Knowledge.EXACT)
        assert ingest.count("restarts_total") == ingest.count("gaps_total", outcome="lost") == 0
    await admin.aclose()
    await kept.close()


async def test_a_pod_that_is_gone_leaves_nothing_and_touches_nobody(own_redis: str) -> None:
    kept = RedisStore(own_redis, "t")
    admin = Redis.from_url(own_redis)

    async def tables() -> list[bytes]:
        keys = [key async for key in admin.scan_iter(match="*")]
        return sorted(key for key in keys if b":t:" in key)

    async with (
        Publisher(topic=b"") as one,
        Publisher(topic=b"") as other,
        ingesting(kept) as ingest,
    ):
        await fill(ingest, one, other)
        assert len(await tables()) == 2
        await ingest.subscriptions.down(Pod("p0"))  # crashed: no removal was ever said
        await until(lambda: Worker(Pod("p0")) not in ingest.view.workers())
        assert ingest.held("p0", range(20)) == []
        assert ingest.held("p1", range(20)) == list(range(20))

        async def one_table() -> bool:
            return len(await tables()) == 1

        await until(one_table, what="the keys of the dead")
        one.buffer = {at: one.buffer[at] for at in range(15, 20)}  # what the engine can still say
        await ingest.subscriptions.up(up("p0", one))
        await ingest.at("p0", 19)
        assert ingest.held("p0", range(20)) == list(range(15, 20))  # by replay, not as it was
        await ingest.knows("p0", Knowledge.PARTIAL, "incomplete since")
    await admin.aclose()
    await kept.close()


async def test_after_a_stop_and_a_start_depths_are_those_of_a_run_without(own_redis: str) -> None:
    kept = RedisStore(own_redis, "t")
    publishers = [Publisher(topic=b"") for _ in PODS]
    async with publishers[0], publishers[1], publishers[2]:
        async with ingesting(kept) as ingest:
            await fill(ingest, *publishers)
        for one in publishers:  # 50 more while nobody follows
            await send(one, *range(20, 60), live=False)
            for name in range(10):
                await one.publish(payload(drop(name)), live=False)
        for one in publishers:
            one.questions.clear()
        async with ingesting(kept) as ingest:
            for name, one in zip(PODS, publishers, strict=True):
                await ingest.subscriptions.up(up(name, one))
            for name in PODS:
                await ingest.at(name, 69)
                assert ingest.held(name, range(60)) == list(range(10, 60))
                await ingest.knows(name, Knowledge.EXACT)
            assert [one.questions[0] for one in publishers] == [19, 19, 19]  # only what is new
            assert ingest.count("restarts_total") == 0
    await kept.close()

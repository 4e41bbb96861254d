"""Ingests sign what they say and give signs of life; two of them may follow the same engines."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

from kit.batches import drop, payload, send, store
from kit.ingesting import ingesting, up
from kit.ports import free_ports
from kit.streams import QUICK, WORKER, Publisher
from kit.wait import until

from kvplane.index import MemoryStore, RedisStore, StoreDown
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Knowledge, Pod


class Failing(MemoryStore):
    """A store where signs of life fail for a while."""

    failing = 0
    beaten: int = 0

    async def beat(self, ingest: str, ttl_s: float) -> None:
        self.beaten += 1
        if self.failing:
            self.failing -= 1
            raise StoreDown("memory", "on purpose")
        await super().beat(ingest, ttl_s)


async def test_an_ingest_lives_while_it_beats_and_says_when_it_leaves() -> None:
    kept = MemoryStore(SystemClock())
    async with ingesting(kept) as ingest:
        me = ingest.subscriptions.ingest
        assert len(me) == 8 and int(me, 16) >= 0

        async def lives() -> bool:
            return await kept.living() == {me}

        await until(lives)
    assert await kept.living() == frozenset()
    await kept.close()


async def test_each_life_of_an_ingest_has_a_name_of_its_own() -> None:
    kept = MemoryStore(SystemClock())
    names = set()
    for _ in range(3):
        async with ingesting(kept) as ingest:
            names.add(ingest.subscriptions.ingest)
    assert len(names) == 3
    await kept.close()


async def test_a_store_that_is_down_for_a_sign_of_life_hears_the_next() -> None:
    kept = Failing(SystemClock())
    kept.failing = 3
    async with ingesting(kept) as ingest:

        async def lives() -> bool:
            return bool(await kept.living())

        await until(lives)
        assert ingest.count("beats_total", outcome="failed") == 3
        kept.failing = 10**9  # and it stops in peace
    await kept.close()


async def test_what_is_told_is_signed() -> None:
    kept = MemoryStore(SystemClock())
    async with Publisher() as one, ingesting(kept) as ingest:
        await ingest.subscriptions.up(up("p0", one))
        await ingest.knows("p0", Knowledge.EXACT)
        (state,) = (await kept.snapshot()).workers
        assert [known.by for known in state.known] == [ingest.subscriptions.ingest]
    await kept.close()


async def test_two_ingests_write_what_one_alone_would(redis_url: str, redis_prefix: str) -> None:
    """Both hear everything, at their own pace and each over its own connection to Redis."""
    chance = random.Random(7)
    alone, first, second = (RedisStore(redis_url, f"{redis_prefix}{at}") for at in "aab")
    first, alone = alone, second  # first and second share a prefix
    second = RedisStore(redis_url, f"{redis_prefix}a")
    odd = replace(QUICK, linger_s=0.007, apply_rows=13)
    async with (
        Publisher() as one,
        ingesting(first) as mine,
        ingesting(second, odd) as yours,
        ingesting(alone) as reference,
    ):
        for each in (mine, yours, reference):
            await each.subscriptions.up(up("p0", one))
        await one.listened(3)
        alive: list[int] = []
        for at in range(300):
            events: list[Any] = [store(at)]
            if alive and chance.random() < 0.6:
                events.insert(0, drop(alive.pop(chance.randrange(len(alive)))))
            if chance.random() < 0.3:
                events += [store(at, 1, 2), store(at, 1, 2), drop(at, 1)]  # one of two copies
            alive.append(at)
            await one.publish(payload(*events))
            if at % 10 == 0:
                await asyncio.sleep(0.003)
        for each in (mine, yours, reference):
            await each.at("p0", 299)
        assert mine.held("p0", range(300)) == sorted(alive)
        assert yours.held("p0", range(300)) == sorted(alive)
        tables = [await kept.table(WORKER) for kept in (first, second, alone)]
        for table in tables:
            table.pop(b"!", None)
        assert tables[0] == tables[1] == tables[2]
        assert mine.view.epoch(WORKER) == reference.view.epoch(WORKER) == 1
    for kept in (first, second, alone):
        await kept.close()


async def test_pods_that_come_and_go_in_a_storm_leave_nothing_behind() -> None:
    kept = MemoryStore(SystemClock())
    before = len(asyncio.all_tasks())
    chance = random.Random(3)
    ports = free_ports(4)
    async with Publisher() as one, Publisher(topic=b"") as other:
        async with ingesting(kept) as ingest:
            places = [up("p0", one), up("p0", other)]
            gone = replace(places[0], events=(f"tcp://127.0.0.1:{ports[0]}",))
            for _ in range(60):
                await asyncio.gather(
                    *(
                        ingest.subscriptions.up(chance.choice([*places, gone]))
                        if chance.random() < 0.6
                        else ingest.subscriptions.down(Pod("p0"))
                        for _ in range(4)
                    )
                )
                await asyncio.sleep(chance.random() / 200)
            await ingest.subscriptions.down(Pod("p0"))
            assert ingest.subscriptions.following() == ()
            for state in ("live", "gap", "replaying", "partial", "dark"):
                assert ingest.count("streams", state=state) == 0
            for known in Knowledge:
                assert ingest.count("workers", state=known.value) == 0
            assert await kept.position(WORKER) is None
            before_up = one.subscribed
            await ingest.subscriptions.up(places[0])
            await one.listened(before_up + 1)
            await send(one, 1)
            await until(lambda: ingest.held("p0", [1]) == [1])
        await asyncio.sleep(0)
    await until(lambda: len(asyncio.all_tasks()) == before)
    await kept.close()

"""Pods that come, change and go."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kit.ports import free_ports
from kit.streams import QUICK, Publisher
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.events import DIALECTS, BlocksStored, EventsMetrics, Subscriptions, engine_key
from kvplane.index import MemoryStore, Row, StoreDown
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Generation, Knowledge, Pod, Role, Worker, WorkerUp

POD = Pod("p0")


def batch(number: int, rank: int = 0) -> bytes:
    key = engine_key(number)
    stored = BlocksStored((key,), None, array("I", [number] * 4), 4, kind="full_attention")
    return DIALECTS["vllm"].encode(1.0, [stored], rank)


def up(*publishers: Publisher, **facts: Any) -> WorkerUp:
    events = tuple(one.events for one in publishers)
    replay = tuple(one.replay for one in publishers if one.replay)
    worker = WorkerUp(POD, "http://127.0.0.1:1", Role.PREFILL, "vllm", "m", None, None, events)
    return replace(worker, replay=replay, **facts)


@contextlib.asynccontextmanager
async def subscriptions(store: Any = None) -> AsyncIterator[tuple[Subscriptions, MemoryStore]]:
    clock = SystemClock()
    kept = store or MemoryStore(clock)
    following = Subscriptions(kept, clock, EventsMetrics(CollectorRegistry()), QUICK)
    await following.start()
    try:
        yield following, kept
    finally:
        await following.stop()
        await kept.close()


async def rows(store: MemoryStore, worker: Worker = Worker(POD)) -> int:  # noqa: B008
    """Blocks in a worker's table."""
    return sum(isinstance(row, Row) for row in (await store.table(worker)).values())


async def test_every_rank_of_a_pod_is_followed() -> None:
    async with Publisher() as one, Publisher() as other, subscriptions() as (following, store):
        await one.publish(batch(1), live=False)
        await other.publish(batch(2, rank=1), live=False)
        await other.publish(batch(3, rank=1), live=False)
        await following.up(up(one, other))
        await until(lambda: [f.sequence for f in following.following()] == [0, 1], 5)
        await until(lambda: {f.state for f in following.following()} == {Knowledge.EXACT}, 5)
        assert [f.worker for f in following.following()] == [Worker(POD), Worker(POD, 1)]
        assert (await rows(store), await rows(store, Worker(POD, 1))) == (1, 2)


async def test_a_rank_whose_port_is_closed_is_dark_and_the_others_are_not() -> None:
    async with Publisher() as one, subscriptions() as (following, _):
        closed = Publisher()
        await following.up(up(one, closed))
        states = [Knowledge.EXACT, Knowledge.DARK]
        await until(lambda: [f.state for f in following.following()] == states, 5)


async def test_the_same_news_twice_changes_nothing() -> None:
    async with Publisher() as one, subscriptions() as (following, _):
        await following.up(up(one))
        await one.listened()
        await following.up(up(one, max_tokens=77))  # nothing that matters here
        await until(lambda: following.following()[0].state is Knowledge.EXACT, 5)
        assert one.subscribed == 1


async def test_a_pod_that_went_is_cleared() -> None:
    async with Publisher() as one, subscriptions() as (following, store):
        await one.publish(batch(1), live=False)
        await following.up(up(one))
        await until(lambda: following.following()[0].sequence == 0, 5)
        await following.down(POD)
        assert following.following() == ()
        assert await store.position(Worker(POD)) is None
        await following.down(POD)  # and again, harmless
        await following.down(Pod("nobody"))


async def test_another_generation_is_another_life() -> None:
    async with Publisher() as one, subscriptions() as (following, store):
        await one.publish(batch(1), live=False)
        await following.up(up(one, generation=Generation("a")))
        await until(lambda: following.following()[0].sequence == 0, 5)
        one.buffer, one.sequence = {}, 0
        await one.publish(batch(2), live=False)
        await one.publish(batch(3), live=False)
        await following.up(up(one, generation=Generation("b")))
        await until(lambda: following.following()[0].sequence == 1, 5)
        position = await store.position(Worker(POD))
        assert position is not None and position.epoch > 1
        assert await rows(store) == 2


async def test_a_generation_that_is_told_late_or_no_more_is_no_other_life() -> None:
    async with Publisher() as one, subscriptions() as (following, store):
        await one.publish(batch(1), live=False)
        for generation in (None, Generation("a"), None):
            await following.up(up(one, generation=generation))
            await until(lambda: following.following()[0].sequence == 0, 5)
            position = await store.position(Worker(POD))
            assert position is not None and position.epoch == 1
            assert await rows(store) == 1


async def test_a_pod_that_moved_is_followed_at_its_new_address() -> None:
    async with Publisher() as one, Publisher() as other, subscriptions() as (following, _):
        await following.up(up(one))
        await one.listened()
        await following.up(up(other))
        await other.listened()
        assert [f.endpoint for f in following.following()] == [other.events]


@pytest.mark.parametrize(
    "facts", [{"engine": "tgi"}, {"events": ("http://h:1",)}, {"events": ()}], ids=str
)
async def test_what_cannot_be_followed_is_not(facts: dict[str, Any]) -> None:
    async with subscriptions() as (following, _):
        await following.up(replace(up(Publisher()), **facts))
        assert following.following() == ()


class Down(MemoryStore):
    """A store that cannot forget for a while."""

    failing = 0

    async def forget(self, *args: Any) -> None:
        if self.failing:
            self.failing -= 1
            raise StoreDown("memory", "on purpose")
        await super().forget(*args)


async def test_a_pod_that_went_while_the_store_was_down_is_cleared_later() -> None:
    store = Down(SystemClock())
    async with Publisher() as one, subscriptions(store) as (following, _):
        await following.up(up(one))
        await until(lambda: following.following()[0].state is Knowledge.EXACT, 5)
        store.failing = 3
        await following.down(POD)

        async def cleared() -> bool:
            return await store.position(Worker(POD)) is None

        await until(cleared, 5)


async def test_stopping_ends_everything_and_clears_nothing() -> None:
    before = len(asyncio.all_tasks())
    store = MemoryStore(SystemClock())
    async with Publisher() as one:
        async with subscriptions(store) as (following, _):
            await one.publish(batch(1), live=False)
            await following.up(up(one))
            await until(lambda: following.following()[0].sequence == 0, 5)
        assert await rows(store) == 1
    assert len(asyncio.all_tasks()) == before


async def test_ports_are_counted_up_from_one_base() -> None:
    base = free_ports(1)[0]
    first = Publisher((base, free_ports(1)[0]), with_replay=False)
    async with first, subscriptions() as (following, _):
        await following.up(up(first, dp_size=2))
        found = [f.endpoint for f in following.following()]
        assert found == [f"tcp://127.0.0.1:{base}", f"tcp://127.0.0.1:{base + 1}"]


async def test_a_life_that_another_ingest_began_is_not_forgotten() -> None:
    async with Publisher() as one, subscriptions() as (following, store):
        await following.up(up(one))
        await until(lambda: following.following()[0].state is Knowledge.EXACT, 5)
        epoch = (await store.position(Worker(POD))).epoch  # type: ignore[union-attr]
        newer = await store.begin_life(Worker(POD), epoch)  # the other saw the restart first
        await following.down(POD)
        position = await store.position(Worker(POD))
        assert position is not None and position.epoch == newer

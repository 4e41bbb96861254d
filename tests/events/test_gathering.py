"""Batches are gathered for a moment, so that a store is not asked once per block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kit.batches import held, payload, send, store
from kit.streams import QUICK, Followed, Publisher, following
from kit.wait import until

from kvplane.index import Applied, Batch, Outcome, Store
from kvplane.vocabulary import Knowledge

CALM = replace(QUICK, settle_s=60.0, idle_check_s=60.0, store_check_s=60.0)


class Noting:
    """Remembers what was applied, and when."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.applied: list[tuple[float, Batch]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def apply(self, batch: Batch) -> Outcome:
        outcome = await self._store.apply(batch)
        if isinstance(outcome, Applied):
            self.applied.append((asyncio.get_running_loop().time(), batch))
        return outcome


@pytest.fixture
def noting() -> tuple[list[Noting], Callable[[Store], Noting]]:
    made: list[Noting] = []

    def wrap(store: Store) -> Noting:
        made.append(Noting(store))
        return made[0]

    return made, wrap


Wrapped = tuple[list[Noting], Callable[[Store], Noting]]


async def told(publisher: Publisher, followed: Followed) -> None:
    await followed.knows(Knowledge.EXACT)
    await publisher.listened()


async def test_a_stream_of_lone_blocks_is_written_in_few_steps(noting: Wrapped) -> None:
    made, wrap = noting
    settings = replace(CALM, linger_s=0.05)
    async with Publisher() as publisher, following(publisher, settings=settings, wrap=wrap) as one:
        await told(publisher, one)
        await send(publisher, *range(100))
        await one.at(99)
        assert held(one, *range(100)) == list(range(100))
        assert len(made[0].applied) < 30  # of 100 batches of one block
        assert one.count("apply_blocks_sum") == 100
        assert one.count("apply_batches_sum") == 100
        assert one.count("apply_blocks_count") == len(made[0].applied)


async def test_a_lone_batch_after_a_silence_waits_for_nothing(noting: Wrapped) -> None:
    made, wrap = noting
    settings = replace(CALM, linger_s=0.2)
    async with Publisher() as publisher, following(publisher, settings=settings, wrap=wrap) as one:
        await told(publisher, one)
        took = []
        for name in range(6):
            before = asyncio.get_running_loop().time()
            await send(publisher, name)
            await until(lambda name=name: len(made[0].applied) == name + 1)
            took.append(made[0].applied[-1][0] - before)
            await asyncio.sleep(0.5)  # the silence: longer than two lingers
        assert sorted(took)[2] < 0.1, took  # a busy machine adds to some, not to most


async def test_one_batch_behind_another_waits_no_longer_than_the_linger(noting: Wrapped) -> None:
    made, wrap = noting
    settings = replace(CALM, linger_s=0.4)
    async with Publisher() as publisher, following(publisher, settings=settings, wrap=wrap) as one:
        await told(publisher, one)
        await send(publisher, 0)
        await until(lambda: len(made[0].applied) == 1)
        for name in range(1, 4):
            await send(publisher, name)
            await asyncio.sleep(0.005)  # one after the other, and yet one step
        await one.at(3)
        (first, _), (second, batch), *_ = made[0].applied
        assert batch.first == 1 and 0.2 < second - first < 4.0


async def test_what_is_much_already_does_not_wait(noting: Wrapped) -> None:
    made, wrap = noting
    settings = replace(CALM, linger_s=30.0, apply_rows=64)
    async with Publisher() as publisher, following(publisher, settings=settings, wrap=wrap) as one:
        await told(publisher, one)
        await publisher.publish(payload(*(store(name) for name in range(64))))
        await one.at(0)
        assert len(made[0].applied) == 1


async def test_one_store_batch_is_bounded_however_much_is_there(noting: Wrapped) -> None:
    made, wrap = noting
    settings = replace(CALM, apply_rows=50, apply_batches=20)
    async with Publisher() as publisher:
        for name in range(0, 600, 10):
            batch = payload(*(store(name + at) for at in range(10)))
            await publisher.publish(batch, live=False)
        async with following(publisher, settings=settings, wrap=wrap) as one:
            await one.at(59)
            assert held(one, *range(600)) == list(range(600))
            for _, batch in made[0].applied:
                assert len(batch.rows) <= 50 + 10 + 1 and batch.last - batch.first < 20
            assert len(made[0].applied) == 12

"""The broadcast: one tail for all readers, nobody held up by the slow, nothing lost by them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from kit.streams import QUICK
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.events import Broadcast, EventsSettings, TooMany
from kvplane.events.reader import Reader
from kvplane.index import Batch, CursorGone, Entry, IndexSettings, MemoryStore, StoreDown
from kvplane.runtime import SystemClock
from kvplane.vocabulary import BlockHash, Cursor, Epoch, Pod, Stored, Tier, Worker

P = Worker(Pod("p"))
SMALL = replace(QUICK, changes_entries=8, changes_wait_s=0.1, changes_behind=2)


class Counted(MemoryStore):
    """A store that counts its tails, and can be away or cut."""

    def __init__(self, entries: int = 100_000) -> None:
        super().__init__(SystemClock(), IndexSettings(stream_entries=entries))
        self.tails = self.begun = 0
        self.away = False
        self._next = 0
        self.cut = asyncio.Event()

    async def fill(self, batches: int, blocks: int = 1) -> None:
        if await self.position(P) is None:
            await self.begin_life(P, None)
        for _ in range(batches):
            number, self._next = self._next, self._next + 1
            names = tuple(BlockHash(number << 20 | at) for at in range(blocks))
            stored = Stored(P, Epoch(1), Tier.GPU, None, names, 16)
            await self.apply(Batch(P, Epoch(1), number, number, (stored,)))

    async def head(self) -> Cursor:
        if self.away:
            raise StoreDown("memory", "on purpose")
        return await super().head()

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        self.tails += 1
        self.begun += 1
        try:
            async with contextlib.aclosing(super().tail(after)) as entries:
                async for entry in entries:
                    if self.away:
                        raise StoreDown("memory", "on purpose")
                    if self.cut.is_set():
                        raise CursorGone(after, "cut on purpose")
                    yield entry
        finally:
            self.tails -= 1


@contextlib.asynccontextmanager
async def told(
    store: Counted, settings: EventsSettings = QUICK, registry: CollectorRegistry | None = None
) -> AsyncIterator[Broadcast]:
    broadcast = Broadcast(store, settings=settings, registry=registry)
    await broadcast.start()
    try:
        yield broadcast
    finally:
        await broadcast.stop()
        await store.close()


def numbers(data: bytes) -> list[int]:
    """The batches in joined events."""
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
    bodies: list[dict[str, Any]] = [json.loads(line[6:]) for line in lines]
    return [body["sequence"] for body in bodies if body["sequence"] is not None]


async def take(reader: Reader, wanted: int) -> list[int]:
    """The next batches, at least so many."""
    found: list[int] = []
    async with asyncio.timeout(20):
        while len(found) < wanted:
            found += numbers(await reader.take(1.0))
    return found


async def test_all_readers_share_one_tail_and_each_has_every_change() -> None:
    store = Counted()
    async with told(store) as broadcast:
        await store.fill(2)
        readers = [await broadcast.join(None) for _ in range(50)]
        await store.fill(30)
        said = await asyncio.gather(*(take(reader, 30) for reader in readers))
        assert said == [list(range(2, 32))] * 50
        assert (store.tails, store.begun) == (1, 1)
        for reader in readers:
            await broadcast.leave(reader)


async def test_a_reader_too_slow_for_the_ring_loses_nothing_and_holds_nothing() -> None:
    store, registry = Counted(), CollectorRegistry()

    def value(name: str) -> float:
        return registry.get_sample_value(name) or 0.0

    async with told(store, SMALL, registry) as broadcast:
        await store.fill(1)
        slow, quick = await broadcast.join(None), await broadcast.join(None)
        await store.fill(5)
        first = await take(slow, 5)
        await store.fill(100, blocks=500)
        assert await take(quick, 105) == list(range(1, 106))
        assert len(broadcast.ring) == 8
        assert value("kvplane_events_changes_lag_seconds") > 0
        assert first + await take(slow, 100) == list(range(1, 106))
        await until(lambda: store.tails == 1, 5, "the slow one back in the ring")
        await store.fill(1)
        assert await take(slow, 1) == [106]
        assert await take(quick, 1) == [106]
        assert value("kvplane_events_changes_behind_total") >= 1
        assert value("kvplane_events_changes_lag_seconds") == 0


async def test_an_old_cursor_reads_the_store_until_it_has_caught_up() -> None:
    store = Counted()
    async with told(store, SMALL) as broadcast:
        await store.fill(1)
        old = await store.head()
        await store.fill(40)
        reader = await broadcast.join(old)
        assert await take(reader, 40) == list(range(1, 41))
        await until(lambda: store.tails == 1, 5, "only the common tail is left")
        await store.fill(3)
        assert await take(reader, 3) == [41, 42, 43]


async def test_readers_with_old_cursors_are_few_and_a_place_is_free_again() -> None:
    store, registry = Counted(), CollectorRegistry()
    async with told(store, SMALL, registry) as broadcast:
        await store.fill(1)
        old = await store.head()
        await store.fill(40)
        held = [await broadcast.join(old) for _ in range(2)]  # they do not read on
        with pytest.raises(TooMany, match=r"2 readers with older cursors.*again in 1 s"):
            await broadcast.join(old)
        assert store.tails <= 3
        value = registry.get_sample_value
        assert value("kvplane_events_changes_refused_total", {"reason": "behind"}) == 1
        assert value("kvplane_events_changes_readers") == 2
        now = await broadcast.join(None)  # who is not old is not refused
        await store.fill(1)
        assert await take(now, 1) == [41]
        await broadcast.leave(held[0])
        assert await take(await broadcast.join(old), 41) == list(range(1, 42))


async def test_readers_are_counted_and_one_that_left_makes_room() -> None:
    store = Counted()
    async with told(store, replace(QUICK, changes_readers=2)) as broadcast:
        first = await broadcast.join(None)
        await broadcast.join(None)
        with pytest.raises(TooMany, match="2 readers follow here"):
            await broadcast.join(None)
        await broadcast.leave(first)
        await broadcast.join(None)


async def test_a_store_that_is_away_is_waited_for_and_nothing_is_lost() -> None:
    store = Counted()
    async with told(store) as broadcast:
        await store.fill(1)
        reader = await broadcast.join(None)
        await store.fill(1)
        assert await take(reader, 1) == [1]
        store.away = True
        await store.fill(3)
        assert await reader.take(0.2) == b""
        with pytest.raises(StoreDown):
            await broadcast.join(None)
        store.away = False
        assert await take(reader, 3) == [2, 3, 4]


async def test_a_stream_that_moved_on_is_told_to_every_reader() -> None:
    store = Counted()
    async with told(store) as broadcast:
        await store.fill(1)
        readers = [await broadcast.join(None) for _ in range(3)]
        store.cut.set()
        await store.fill(1)
        for reader in readers:
            with pytest.raises(CursorGone, match="cut on purpose"):
                await reader.take(20)
        store.cut.clear()
        fresh = await broadcast.join(None)
        await store.fill(1)
        assert await take(fresh, 1) == [2]


async def test_a_cursor_that_is_no_cursor_is_refused_at_once() -> None:
    async with told(Counted()) as broadcast:
        for odd in ("x", "other.1", "'; DROP", "0-0.1_0-0.1"):
            with pytest.raises(CursorGone, match="not of this stream"):
                await broadcast.join(Cursor(odd))
        assert broadcast.behind._value == QUICK.changes_behind


async def test_when_the_last_has_left_nothing_is_followed_or_kept() -> None:
    store = Counted()
    async with told(store, replace(QUICK, changes_linger_s=0.05)) as broadcast:
        assert store.begun == 0
        reader = await broadcast.join(None)
        await store.fill(3)
        await take(reader, 3)
        await broadcast.leave(reader)
        await until(lambda: store.tails == 0, 5, "the tail to end")
        assert len(broadcast.ring) == 0
        reader = await broadcast.join(None)
        await store.fill(1)
        assert await take(reader, 1) == [3]


async def test_readers_that_come_and_go_leave_nothing_behind() -> None:
    store = Counted()
    async with told(store, SMALL) as broadcast:
        await store.fill(1)
        old = await store.head()
        await store.fill(40)
        stay = await broadcast.join(None)

        async def visit(number: int) -> None:
            with contextlib.suppress(TimeoutError, TooMany):
                async with asyncio.timeout(0.002 * (number % 9)):
                    reader = await broadcast.join(old if number % 2 else None)
                    try:
                        await reader.take(0.01 * (number % 3))
                    finally:
                        await broadcast.leave(reader)

        await asyncio.gather(*(visit(number) for number in range(200)))
        await until(lambda: store.tails == 1, 5, "one tail for the one that stayed")
        assert broadcast.behind._value == SMALL.changes_behind
        await broadcast.leave(stay)
        assert broadcast.lag_s() == 0


async def test_a_broadcast_that_stops_ends_its_readers() -> None:
    store = Counted()
    async with told(store) as broadcast:
        reader = await broadcast.join(None)
        waiting = asyncio.create_task(reader.take(60))
        await asyncio.sleep(0)
        await broadcast.stop()
        with pytest.raises(StoreDown, match="closed"):
            await waiting
        with pytest.raises(StoreDown, match="closed"):
            await broadcast.join(None)

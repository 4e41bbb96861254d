"""A store in several shards, each a MemoryStore, whose snapshots and tails a test can hold up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from dataclasses import replace

from kvplane.index import (
    Batch,
    CursorGone,
    Entry,
    IndexSettings,
    MemoryStore,
    Snapshot,
    StoreDown,
    WorkerState,
)
from kvplane.runtime import Clock
from kvplane.vocabulary import Cursor, Epoch, Known, Worker


class Shards(MemoryStore):
    """Worker `name-N` lies in shard N. Cursors are those of the shards, joined."""

    def __init__(self, clock: Clock, count: int = 2, entries: int = 20) -> None:
        super().__init__(clock)
        made = IndexSettings(stream_entries=entries)
        self.parts = [MemoryStore(clock, made) for _ in range(count)]
        self.asked: list[set[int] | None] = []  # shards of every snapshot
        self.step: Callable[[str], Awaitable[None]] | None = None  # called within a snapshot
        self.open = asyncio.Event()  # closed: tails give nothing
        self.open.set()
        self.dumb = False  # nobody can say who lives
        self.unread: frozenset[int] = frozenset()

    def of(self, worker: Worker) -> MemoryStore:
        return self.parts[self.shard_of(worker)]

    def shard_of(self, worker: Worker) -> int:
        return int(worker.pod.rpartition("-")[2])

    async def shards(self) -> int:
        return len(self.parts)

    async def begin_life(self, worker: Worker, seen: Epoch | None) -> Epoch:
        return await self.of(worker).begin_life(worker, seen)

    async def apply(self, batch: Batch) -> object:  # type: ignore[override]
        return await self.of(batch.worker).apply(batch)

    async def known(self, change: Known) -> None:
        await self.of(change.worker).known(change)

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        await self.of(worker).forget(worker, epoch)

    async def beat(self, ingest: str, ttl_s: float) -> None:
        for part in self.parts:
            await part.beat(ingest, ttl_s)

    async def living(self) -> frozenset[str]:
        if self.dumb:
            raise StoreDown("beats", "nobody answers")
        return await self.parts[0].living()

    def away(self) -> frozenset[int]:
        return self.unread

    async def head(self) -> Cursor:
        return Cursor("|".join([await part.head() for part in self.parts]))

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        marks = zip(self.parts, cursor.split("|"), goal.split("|"), strict=True)
        return all(part.reached(Cursor(mine), Cursor(wanted)) for part, mine, wanted in marks)

    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor:
        both = zip(cursor.split("|"), fresh.split("|"), strict=True)
        return Cursor("|".join(new if at in shards else old for at, (old, new) in enumerate(both)))

    async def snapshot(self, shards: Collection[int] | None = None) -> Snapshot:
        """Worker by worker, with `step` before, between and behind them."""
        self.asked.append(None if shards is None else set(shards))
        cursor, states = await self.head(), list[WorkerState]()
        for number, part in enumerate(self.parts):
            for state in (
                (await part.snapshot()).workers if shards is None or number in shards else ()
            ):
                await self._step(f"before {state.worker}")
                found = (await part.snapshot()).workers
                states += [replace(one) for one in found if one.worker == state.worker]
        await self._step("behind")
        return Snapshot(cursor, tuple(states), await self.head())

    async def _step(self, what: str) -> None:
        if self.step is not None:
            await self.step(what)

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        marks = after.split("|")
        while True:
            await self.open.wait()
            for number, part in enumerate(self.parts):
                try:
                    found = await self._next(part, Cursor(marks[number]))
                except CursorGone as error:
                    raise CursorGone(after, error.reason, frozenset({number})) from None
                if found is not None:
                    marks[number] = found.cursor
                    yield replace(found, cursor=Cursor("|".join(marks)))
                    break
            else:
                await asyncio.sleep(0.001)

    @staticmethod
    async def _next(part: MemoryStore, mark: Cursor) -> Entry | None:
        if await part.head() == mark:
            return None
        tail = part.tail(mark)
        try:
            return await anext(tail)
        finally:
            await tail.aclose()

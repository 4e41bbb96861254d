"""Redis: the store that survives a restart, shared by many processes.

Edge: tables, positions and the change stream in Redis or Valkey >= 6.2; the two Lua files beside
it are its atomic steps, reading.py its snapshot and tail. Open it to change the key layout.

    PREFIX:shards              STRING  number of shards, fixed at first use
    {PREFIX:S}:w               SET     living workers of shard S, by their text form
    {PREFIX:S}:m:WORKER        HASH    e epoch | l last batch | k Known, msgpack | g 1 when gone
    {PREFIX:S}:t:EPOCH:WORKER  HASH    engine key -> row, 29 bytes, base.Row.encode
    {PREFIX:S}:n               STRING  number of stream entries ever written, without a hole
    {PREFIX:S}:x               STREAM  v n w e l c, see codec.py

All keys of a shard share one hash tag, so one apply touches one slot; a worker's shard is
xxh3_64(its text form) mod the number of shards. Layout version: 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection
from pathlib import Path
from typing import Any

import msgspec
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from xxhash import xxh3_64_intdigest

from kvplane.vocabulary import Cleared, ClearReason, Cursor, Epoch, Knowledge, Known, Worker

from ..errors import ShardsFixed
from ..settings import IndexSettings
from . import codec
from .base import (
    Applied,
    Batch,
    Entry,
    GapRefused,
    Outcome,
    Position,
    Repeat,
    Snapshot,
    StaleEpoch,
    WorkerState,
)
from .reading import Mark, Reader, ours, parse, write
from .rows import Value, decode, encode

HERE = Path(__file__).parent


class RedisStore:
    """See base.py for what every method promises."""

    def __init__(
        self,
        url: str,
        prefix: str = "kvplane",
        shards: int | None = None,  # None = as the store was made, 1 for a new one
        settings: IndexSettings | None = None,
    ) -> None:
        self._settings = settings or IndexSettings()
        self._url, self._prefix, self._asked = url, prefix, shards
        self._redis = self._connect(self._settings.connections)
        self._tails = self._connect(self._settings.tail_connections)
        self._apply = self._redis.register_script((HERE / "apply.lua").read_text())
        self._life = self._redis.register_script((HERE / "life.lua").read_text())
        self._shards = 0  # not known yet

    def _connect(self, most: int) -> Redis:
        pool = BlockingConnectionPool.from_url(
            self._url,
            max_connections=most,
            timeout=self._settings.command_timeout_s,
            socket_timeout=self._settings.command_timeout_s + self._settings.block_ms / 1000,
            socket_connect_timeout=self._settings.command_timeout_s,
            retry=Retry(ConstantBackoff(0.05), 1),  # a pooled connection may be dead already
        )
        return Redis.from_pool(pool)

    async def begin_life(self, worker: Worker, seen: Epoch | None) -> Epoch:
        """See base.py."""
        changes = (Cleared(worker, Epoch(0), ClearReason.RESTART),)
        given = "" if seen is None else str(seen)
        return Epoch(await self._step("begin", worker, seen or Epoch(0), changes, given))

    async def position(self, worker: Worker) -> Position | None:
        """See base.py."""
        state = await self._state(worker)
        return Position(state.epoch, state.last) if state else None

    async def apply(self, batch: Batch) -> Outcome:
        """See base.py."""
        await self._ready()
        base, shard = self._keys(batch.worker)
        gone = [key for key, row in batch.rows.items() if row is None]
        kept = [part for key, row in batch.rows.items() if row for part in (key, encode(row))]
        keys = [f"{base}:m:{batch.worker}", f"{base}:t:{batch.epoch}:{batch.worker}"]
        head: list[Any] = [
            batch.epoch,
            batch.first,
            batch.last,
            int(batch.reset),
            str(batch.worker),
        ]
        body: list[Any] = [codec.encode(batch.changes), self._settings.stream_entries, len(gone)]
        with ours(self._url):
            said, *rest = await self._apply(
                keys=[*keys, f"{base}:x", f"{base}:n"], args=[*head, *body, *gone, *kept]
            )
        match said:
            case b"applied":
                marks = [Mark()] * self._shards
                marks[shard] = Mark(rest[0].decode(), rest[1])
                return Applied(write(marks))
            case b"repeat":
                return Repeat(rest[0])
            case b"gap":
                return GapRefused(rest[0])
        return StaleEpoch(Epoch(rest[0]))

    async def table(self, worker: Worker) -> dict[bytes, Value]:
        """See base.py."""
        state = await self._state(worker)
        raw = await self._rows(worker, state.epoch) if state else {}
        return {key: decode(value) for key, value in raw.items()}

    async def known(self, change: Known) -> None:
        """See base.py."""
        kept = msgspec.msgpack.encode([change.state, change.reason, change.since])
        given = str(change.epoch)
        await self._step("known", change.worker, change.epoch, (change,), given, kept)

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        """See base.py."""
        changes = (Cleared(worker, epoch, ClearReason.GONE),)
        await self._step("forget", worker, epoch, changes, str(epoch), self._settings.tombstone_s)

    async def beat(self, ingest: str, ttl_s: float) -> None:
        """See base.py."""
        raise NotImplementedError

    async def living(self) -> frozenset[str]:
        """See base.py."""
        raise NotImplementedError

    async def shards(self) -> int:
        """See base.py."""
        await self._ready()
        return self._shards

    def shard_of(self, worker: Worker) -> int:
        """See base.py."""
        return self._keys(worker)[1]

    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor:
        """See base.py."""
        raise NotImplementedError

    async def snapshot(self, shards: Collection[int] | None = None) -> Snapshot:
        """See base.py."""
        cursor = await self.head()
        states: list[WorkerState] = []
        for shard in range(self._shards):
            with ours(self._url):
                names: Any = await self._redis.smembers(f"{{{self._prefix}:{shard}}}:w")
            for name in sorted(names):
                worker = Worker.parse(name.decode())
                state = await self._state(worker)
                if state is not None:
                    rows = await self._rows(worker, state.epoch)
                    states.append(WorkerState(worker, state.epoch, state.last, state.known, rows))
        return Snapshot(cursor, tuple(states), await self.head())

    async def head(self) -> Cursor:
        """See base.py."""
        reader = await self._reader()
        return write(await reader.marks())

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        """See base.py."""
        pairs = zip(parse(cursor), parse(goal), strict=True)
        return all(mine.number >= wanted.number for mine, wanted in pairs)

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """See base.py."""
        reader = await self._reader()
        async with contextlib.aclosing(reader.tail(after)) as entries:
            async for entry in entries:
                yield entry

    async def close(self) -> None:
        """See base.py."""
        await self._redis.aclose()
        await self._tails.aclose()

    async def _step(
        self, verb: str, worker: Worker, epoch: Epoch, changes: Any, given: str, more: Any = ""
    ) -> int:
        await self._ready()
        base, _ = self._keys(worker)
        keys = [f"{base}:m:{worker}", f"{base}:t:{epoch}:{worker}"]
        args: list[Any] = [
            verb,
            given,
            str(worker),
            codec.encode(changes),
            self._settings.stream_entries,
        ]
        with ours(self._url):
            return int(
                await self._life(
                    keys=[*keys, f"{base}:x", f"{base}:n", f"{base}:w"], args=[*args, more]
                )
            )

    async def _state(self, worker: Worker) -> WorkerState | None:
        await self._ready()
        base, _ = self._keys(worker)
        with ours(self._url):
            found: Any = await self._redis.hmget(f"{base}:m:{worker}", ["e", "l", "k", "g"])
        epoch, last, kept, gone = found
        if epoch is None or gone:
            return None
        known: tuple[Known, ...] = ()
        if kept:
            state, reason, since = msgspec.msgpack.decode(kept)
            known = (Known(worker, Epoch(int(epoch)), Knowledge(state), reason, since),)
        return WorkerState(worker, Epoch(int(epoch)), None if last is None else int(last), known)

    async def _rows(self, worker: Worker, epoch: Epoch) -> dict[bytes, bytes]:
        base, _ = self._keys(worker)
        rows: dict[bytes, bytes] = {}
        with ours(self._url):
            scan = self._redis.hscan_iter(
                f"{base}:t:{epoch}:{worker}", count=self._settings.scan_count
            )
            async for key, row in scan:
                rows[key] = row
        return rows

    async def _reader(self) -> Reader:
        await self._ready()
        tags = [f"{{{self._prefix}:{shard}}}" for shard in range(self._shards)]
        return Reader(self._tails, self._url, tags, self._settings)

    async def _ready(self) -> None:
        """Learn, or fix at first use, how many shards there are."""
        if self._shards:
            return
        with ours(self._url):
            await self._redis.set(f"{self._prefix}:shards", self._asked or 1, nx=True)
            kept = int(await self._redis.get(f"{self._prefix}:shards") or 1)
        if self._asked not in (None, kept):
            raise ShardsFixed(self._asked or 1, kept)
        self._shards = kept

    def _keys(self, worker: Worker) -> tuple[str, int]:
        shard = xxh3_64_intdigest(str(worker).encode()) % self._shards
        return f"{{{self._prefix}:{shard}}}", shard

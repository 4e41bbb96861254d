"""Redis: the store that survives a restart, shared by many processes.

Edge: tables, positions and the change stream in Redis or Valkey >= 6.2, alone, behind sentinels or
as a cluster; the Lua files beside it are its atomic steps, tables.py and reading.py read, line.py
is the way to a server. Open it to change what is written; the keys:

    PREFIX:shards              HASH    shards (number) | format 2; fixed at first use
    {PREFIX:S}:w               SET     living workers of shard S, by their text form
    {PREFIX:S}:m:WORKER        HASH    e epoch | l last batch | h id of the entry of that batch
                                       | o gaps that stayed open | g 1 when gone
                                       | k:INGEST msgpack [state, reason, since], one per ingest
    {PREFIX:S}:t:EPOCH:WORKER  HASH    see rows.py; and "" -> "" from the first batch on, so that a
                                       table that was thrown away is told from one without rows
    {PREFIX:S}:n               HASH    n number and i id of the newest entry of the stream
    {PREFIX:S}:x               STREAM  v n p w e l c, see codec.py; n has no hole, p links back
    {PREFIX:S}:b               ZSET    ingest -> until when it lives, ms of the server's clock

All keys of a shard share one hash tag, so one apply touches one slot; a worker's shard is
xxh3_64(its text form) mod the number of shards.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Collection
from typing import Any

import msgspec

from kvplane.vocabulary import Cleared, ClearReason, Cursor, Epoch, Known, Worker

from ..errors import StoreDown
from ..settings import IndexSettings
from . import address, codec, fitness
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
)
from .layout import Layout
from .line import Line, Script
from .reading import Mark, Reader, parse, write
from .rows import Value, decode, encode
from .servers import servers
from .tables import Tables

_APPLY, _LIFE, _BEAT = Script("apply.lua"), Script("life.lua"), Script("beat.lua")


class RedisStore:
    """See base.py for what every method promises."""

    def __init__(
        self,
        url: str,  # see address.py; raises ValueError for one that cannot be read
        prefix: str = "kvplane",
        shards: int | None = None,  # None = as the store was made, 1 for a new one
        settings: IndexSettings | None = None,
        writes: bool = True,  # False: never fixes the number of shards of a new store
    ) -> None:
        told = self._settings = settings or IndexSettings()
        where, deadline_s = address.parse(url), told.command_timeout_s
        self._line = Line(servers(where, told.connections, deadline_s), deadline_s)
        self._tails = Line(servers(where, told.tail_connections, deadline_s), deadline_s)
        self._layout = Layout(self._line, str(where), prefix, shards, writes)
        self._tables = Tables(self._line, self._layout, told.scan_count, told.scans)
        self._away: set[int] = set()

    async def begin_life(self, worker: Worker, seen: Epoch | None) -> Epoch:
        """See base.py."""
        self._layout.doubt()  # a store that lost this worker may have lost everything
        changes = (Cleared(worker, Epoch(0), ClearReason.RESTART),)
        given = "" if seen is None else str(seen)
        return Epoch(await self._step("begin", worker, seen or Epoch(0), changes, given))

    async def position(self, worker: Worker) -> Position | None:
        """See base.py."""
        state = await self._tables.state(worker)
        if state is None:
            return None
        known = {told.by: told.state for told in state.known}
        whole = await self._tables.whole(state)
        return Position(state.epoch, state.last, whole, known, state.gaps)

    async def apply(self, batch: Batch) -> Outcome:
        """See base.py."""
        await self._layout.ready()
        gone: list[bytes] = []
        kept: list[bytes] = []
        for key, value in batch.rows.items():
            if value is None:
                gone.append(key)
            else:
                kept += (key, encode(value))
        worker, tag = batch.worker, self._layout.tag(batch.worker)
        table = self._layout.table(worker, batch.epoch)
        keys = (self._layout.meta(worker), table, f"{tag}:x", f"{tag}:n")
        head = (batch.epoch, batch.first, batch.last, int(batch.reset), str(worker))
        body = (codec.encode(batch.changes), self._settings.stream_entries, len(gone))
        said, *rest = await self._line.share(_APPLY, keys, *head, *body, *gone, *kept)
        match said:
            case b"applied":
                marks = [Mark()] * self._layout.shards
                marks[self._layout.shard(worker)] = Mark(rest[0].decode(), rest[1])
                return Applied(write(marks))
            case b"repeat":
                return Repeat(rest[0])
            case b"gap":
                return GapRefused(rest[0])
        return StaleEpoch(Epoch(rest[0]))

    async def table(self, worker: Worker) -> dict[bytes, Value]:
        """See base.py."""
        state = await self._tables.state(worker)
        raw = await self._tables.rows(state) if state else {}
        return {key: decode(value) for key, value in raw.items()}

    async def known(self, change: Known) -> None:
        """See base.py."""
        kept = msgspec.msgpack.encode([change.state, change.reason, change.since])
        given, more = str(change.epoch), (kept, change.by)
        await self._step("known", change.worker, change.epoch, (change,), given, *more)

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        """See base.py."""
        changes = (Cleared(worker, epoch, ClearReason.GONE),)
        await self._step("forget", worker, epoch, changes, str(epoch), self._settings.tombstone_s)

    async def _step(
        self, verb: str, worker: Worker, epoch: Epoch, changes: Any, given: str, *more: Any
    ) -> int:
        await self._layout.ready()
        own = (self._layout.meta(worker), self._layout.table(worker, epoch))
        keys = (*own, *(f"{self._layout.tag(worker)}:{key}" for key in "xnwb"))
        told = (str(worker), codec.encode(changes), self._settings.stream_entries)
        return int(await self._line.run(_LIFE, keys, verb, given, *told, *more))

    async def beat(self, ingest: str, ttl_s: float) -> None:
        """See base.py; said to every shard, enough where one heard it."""
        await self._beats(ingest, int(ttl_s * 1000))

    async def living(self) -> frozenset[str]:
        """See base.py; those that any shard heard."""
        heard = await self._beats()
        return frozenset(one.decode() for some in heard for one in some)

    async def _beats(self, *args: Any) -> list[Any]:
        await self._layout.ready()
        keys = [f"{tag}:b" for tag in self._layout.tags]
        found = await self._line.run_each(_BEAT, keys, *args, deadline_s=self._settings.beat_s)
        heard = [one for one in found if not isinstance(one, StoreDown)]
        if not heard:
            raise found[0]
        return heard

    async def shards(self) -> int:
        """See base.py."""
        await self._layout.ready()
        return self._layout.shards

    def shard_of(self, worker: Worker) -> int:
        """See base.py."""
        return self._layout.shard(worker)

    def away(self) -> frozenset[int]:
        """See base.py."""
        return frozenset(self._away)

    async def fit(self) -> None:
        """See base.py."""
        try:
            fitness.judge(await self._line.each("INFO", "memory"))
            await self._layout.ready()
        except StoreDown as error:
            fitness.let_in(error)
            raise

    async def refuses(self) -> str:
        """See base.py."""
        each = self._line.each
        return fitness.refusal([*await each("INFO", "memory"), *await each("INFO", "replication")])

    async def evicted(self) -> int:
        """See base.py."""
        return fitness.evicted(await self._line.each("INFO", "stats"))

    async def snapshot(self, shards: Collection[int] | None = None) -> Snapshot:
        """See base.py."""
        reader = await self._reader(self._line)
        wanted = range(self._layout.shards) if shards is None else sorted(shards)
        cursor = write(await reader.marks(wanted))
        states = await self._tables.of(wanted)
        return Snapshot(cursor, states, write(await reader.marks(wanted)))

    async def head(self) -> Cursor:
        """See base.py."""
        reader = await self._reader(self._line)
        return write(await reader.marks(range(self._layout.shards)))

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        """See base.py."""
        pairs = zip(parse(cursor), parse(goal), strict=True)
        return all(mine.number >= wanted.number for mine, wanted in pairs)

    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor:
        """See base.py."""
        pairs = enumerate(zip(parse(cursor), parse(fresh), strict=True))
        return write([new if shard in shards else old for shard, (old, new) in pairs])

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """See base.py."""
        reader = await self._reader(self._tails)
        async with contextlib.aclosing(reader.tail(after)) as entries:
            async for entry in entries:
                yield entry

    async def close(self) -> None:
        """See base.py."""
        await self._line.aclose()
        await self._tails.aclose()

    async def _reader(self, line: Line) -> Reader:
        await self._layout.ready()
        return Reader(line, self._layout.tags, self._settings, self._away)

"""Reading: where is the stream of a Redis store, and what comes next?

Edge: cursors and the endless read; redis.py makes it, nobody else. Open it to change how a hole in
the stream is noticed.

    cursor  ID.N_ID.N_...  per shard the id of an entry and its number
    proof   the next entry must be N + 1 and must name ID as the one before it: trimmed, emptied,
            rolled back, or rewritten after a failover, all show; a silent stream is compared
            with its newest entry once a second, since one that lost its end stays silent
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from kvplane.runtime import cancel
from kvplane.vocabulary import Cursor, Epoch, Worker

from ..errors import CursorGone, StoreDown
from ..settings import IndexSettings
from . import codec
from .base import Entry
from .line import Line

_MARK = re.compile(r"([0-9]{1,19}-[0-9]{1,19})\.([0-9]{1,19})")  # as long as Redis takes
AGAIN_S = 0.2  # before a shard that is away is asked again, while others answer


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in one shard's stream."""

    id: str = "0-0"
    number: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """The id as Redis orders it: milliseconds, then a counter."""
        at, _, count = self.id.partition("-")
        return int(at), int(count)


Step = tuple[int, Mark, dict[bytes, bytes]]  # shard, place and fields of one entry


def write(marks: Sequence[Mark]) -> Cursor:
    """Marks of all shards as one cursor."""
    return Cursor("_".join(f"{mark.id}.{mark.number}" for mark in marks))


def parse(cursor: Cursor) -> list[Mark]:
    """The reverse; raises CursorGone for a text that no store of this kind wrote."""
    found = [_MARK.fullmatch(part) for part in cursor.split("_")]
    if not all(found):
        raise CursorGone(cursor, "it is not of this stream")
    return [Mark(match[1], int(match[2])) for match in found if match]


class Reader:
    """All shards' streams of one store. On one server they are read together; in a cluster each
    for itself, so that one node that is away holds up nobody; `away` names its shards meanwhile."""

    def __init__(
        self, line: Line, tags: Sequence[str], settings: IndexSettings, away: set[int]
    ) -> None:
        self._line, self._tags, self._settings, self._away = line, tags, settings, away

    async def marks(self, needed: Iterable[int]) -> list[Mark]:
        """The end of every stream now; of one that is not needed and away, the start."""
        keys = [f"{tag}:n" for tag in self._tags]
        found = await self._line.many([(key, ("HMGET", key, "n", "i")) for key in keys])
        for shard in needed:
            if isinstance(found[shard], StoreDown):
                raise found[shard]
        return [Mark() if isinstance(one, StoreDown) else _mark(one) for one in found]

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """Entries after a cursor for ever; CursorGone as soon as one is missing."""
        marks = parse(after)
        if len(marks) != len(self._tags):
            raise CursorGone(after, f"it has {len(marks)} shards, this store {len(self._tags)}")
        shards = range(len(marks))
        apart = self._line.apart and len(marks) > 1
        steps = self._merged(marks) if apart else self._together(shards, list(marks))
        async with aclosing(steps):
            async for some in steps:
                for shard, mark, fields in some:
                    marks[shard] = mark
                    yield _entry(write(marks), shard, mark, fields)

    async def _merged(self, marks: Sequence[Mark]) -> AsyncGenerator[list[Step], None]:
        """Every shard at its own pace; StoreDown when all are away."""
        arrived: asyncio.Queue[list[Step] | Exception] = asyncio.Queue(2 * len(marks))
        down: set[int] = set()

        async def pump(shard: int) -> None:
            mine = list(marks)
            while True:
                try:
                    async with aclosing(self._together([shard], mine)) as steps:
                        async for some in steps:
                            self._away.discard(shard)
                            down.discard(shard)
                            if some:
                                await arrived.put(some)
                except StoreDown as error:
                    self._away.add(shard)
                    down.add(shard)
                    if len(down) == len(marks):
                        await arrived.put(error)
                    await asyncio.sleep(AGAIN_S)
                except Exception as error:
                    await arrived.put(error)
                    return

        pumps = [asyncio.create_task(pump(shard)) for shard in range(len(marks))]
        try:
            while True:
                some = await arrived.get()
                if isinstance(some, Exception):
                    raise some
                yield some
        finally:
            await cancel(*pumps)

    async def _together(
        self, shards: Sequence[int], marks: list[Mark]
    ) -> AsyncGenerator[list[Step], None]:
        """What one read after the other finds in these shards; empty where it found nothing."""
        told = self._settings
        owed: dict[int, Mark] = {}  # where an entry must follow, or it is missing
        look_at = 0.0
        names = [f"{self._tags[shard]}:x" for shard in shards]
        while True:
            if time.monotonic() >= look_at:
                await self._look(shards, marks, owed)
                look_at = time.monotonic() + told.block_ms / 1000
            ids = [marks[shard].id for shard in shards]
            how = ("COUNT", told.read_entries, "BLOCK", told.block_ms, "STREAMS")
            deadline_s = told.command_timeout_s + told.block_ms / 1000
            answer = await self._line.call(
                names[0], "XREAD", *how, *names, *ids, deadline_s=deadline_s
            )
            some: list[Step] = []
            for name, entries in answer or ():
                shard = shards[names.index(name.decode())]
                some += [(shard, *_linked(marks, shard, one)) for one in entries]
            yield some

    async def _look(self, shards: Sequence[int], marks: list[Mark], owed: dict[int, Mark]) -> None:
        """Ids and numbers rise alike, or it is another stream; and what is owed must have come."""
        newest = await self._ends(shards)
        for shard, end in zip(shards, newest, strict=True):
            mine = marks[shard]
            behind = mine.number < end.number
            lost = mine.number > end.number or (not behind and mine.id != end.id)
            if lost or (behind and mine.place >= end.place) or owed.get(shard) == mine:
                why = f"the stream ends at entry {end.number}"
                raise CursorGone(write(marks), why, frozenset({shard}))
            owed.pop(shard, None)
            if behind:
                owed[shard] = mine

    async def _ends(self, shards: Sequence[int]) -> list[Mark]:
        keys = [f"{self._tags[shard]}:n" for shard in shards]
        asked = [("HMGET", key, "n", "i") for key in keys]
        return [_mark(one) for one in await self._line.calls(keys[0], asked)]


def _mark(answer: Sequence[bytes | None]) -> Mark:
    number, at = answer
    return Mark(at.decode(), int(number)) if number and at else Mark()


def _linked(
    marks: list[Mark], shard: int, entry: tuple[bytes, list[bytes]]
) -> tuple[Mark, dict[bytes, bytes]]:
    """An entry that follows the mark, which moves there; CursorGone where it does not follow."""
    at, flat = entry
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    mine, number, before = marks[shard], fields.get(b"n", b""), fields.get(b"p", b"")
    if not number.isdigit() or int(number) != mine.number + 1 or before.decode() != mine.id:
        shown = f"entry {number.decode()} follows it, after {before.decode() or 'none'}"
        raise CursorGone(write(marks), shown, frozenset({shard}))
    marks[shard] = Mark(at.decode(), int(number))
    return marks[shard], fields


def _entry(cursor: Cursor, shard: int, mark: Mark, fields: dict[bytes, bytes]) -> Entry:
    """One entry; what cannot be read is skipped by way of a snapshot."""
    try:
        if fields[b"v"] != b"%d" % codec.VERSION:
            raise ValueError(f"version {fields[b'v']!r}, this program reads {codec.VERSION}")
        worker, epoch = Worker.parse(fields[b"w"].decode()), Epoch(int(fields[b"e"]))
        changes = codec.decode(fields[b"c"], worker, epoch)
        last = int(fields[b"l"]) if fields[b"l"] else None
    except (KeyError, ValueError) as error:
        why = f"entry {mark.number} cannot be read: {error}"
        raise CursorGone(cursor, why, frozenset({shard})) from None
    at = int(mark.id.partition("-")[0]) / 1000  # ids begin with the server's wall clock, ms
    return Entry(cursor, changes, worker, epoch, last, at)

"""Reading: where is the stream of a Redis store, and what comes next?

Edge: cursors and the endless read; redis.py makes it, nobody else. Open it to change how a hole in
the stream is noticed.

    cursor  ID.N_ID.N_...  per shard the id of an entry and its number; numbers have no hole, so
            the next entry must be N + 1: trimmed, flushed or rolled back shows as another number
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvplane.vocabulary import Cursor, Epoch, Worker

from ..errors import CursorGone, StoreDown
from ..settings import IndexSettings
from . import codec
from .base import Entry

_MARK = re.compile(r"([0-9]{1,19}-[0-9]{1,19})\.([0-9]{1,19})")  # as long as Redis takes


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


def write(marks: Sequence[Mark]) -> Cursor:
    """Marks of all shards as one cursor."""
    return Cursor("_".join(f"{mark.id}.{mark.number}" for mark in marks))


def parse(cursor: Cursor) -> list[Mark]:
    """The reverse; raises CursorGone for a text that no store of this kind wrote."""
    found = [_MARK.fullmatch(part) for part in cursor.split("_")]
    if not all(found):
        raise CursorGone(cursor, "it is not of this stream")
    return [Mark(match[1], int(match[2])) for match in found if match]


@contextlib.contextmanager
def ours(url: str) -> Iterator[None]:
    """Errors of the client become StoreDown, without the password of the URL.

    A cancellation that was lost inside passes after all: before Python 3.12 asyncio.wait_for, which
    the client uses to send, drops one that arrives as its work ends; the task would never stop.
    """
    before = _cancels()
    try:
        yield
    except (RedisError, OSError) as error:
        if _cancels() > before:
            raise asyncio.CancelledError from error
        parts = urlsplit(url)
        shown = f"{parts.hostname}:{parts.port}" if parts.hostname else parts.path
        raise StoreDown(shown, f"{type(error).__name__}: {error}") from error
    if _cancels() > before:
        raise asyncio.CancelledError


def _cancels() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task else 0


class Reader:
    """All shards' streams of one store, read together."""

    def __init__(self, redis: Redis, url: str, tags: list[str], settings: IndexSettings) -> None:
        self._redis, self._url, self._tags, self._settings = redis, url, tags, settings

    async def marks(self) -> list[Mark]:
        """The end of every stream now."""
        found = []
        with ours(self._url):
            for tag in self._tags:
                newest: Any = await self._redis.xrevrange(f"{tag}:x", count=1)
                number = await self._redis.get(f"{tag}:n")
                if not newest:
                    found.append(Mark("0-0", int(number or 0)))
                    continue
                at, fields = newest[0]
                found.append(Mark(at.decode(), int(fields[b"n"])))
        return found

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """Entries after a cursor for ever; CursorGone as soon as one is missing."""
        marks = parse(after)
        if len(marks) != len(self._tags):
            raise CursorGone(after, f"it has {len(marks)} shards, this store {len(self._tags)}")
        await self._check(after, marks)
        while True:
            streams: Any = {
                f"{tag}:x": mark.id for tag, mark in zip(self._tags, marks, strict=True)
            }
            with ours(self._url):
                answer: Any = await self._redis.xread(
                    streams, count=self._settings.read_entries, block=self._settings.block_ms
                )
            if not answer:
                await self._check(after, marks)
                continue
            for key, entries in _by_stream(answer):
                shard = self._tags.index(key.decode().removesuffix(":x"))
                for at, fields in entries:
                    mark = Mark(at.decode(), int(fields[b"n"]))
                    if mark.number != marks[shard].number + 1:
                        raise CursorGone(write(marks), f"entry {mark.number} follows it")
                    marks[shard] = mark
                    yield _entry(write(marks), mark, fields)

    async def _check(self, after: Cursor, marks: list[Mark]) -> None:
        """A stream that lost its end stays silent; ids and numbers rise alike, or it is another."""
        for mine, newest in zip(marks, await self.marks(), strict=True):
            behind, before = mine.number < newest.number, mine.place < newest.place
            if mine.number > newest.number or behind != before or mine.place > newest.place:
                raise CursorGone(after, f"the stream ends at entry {newest.number}")


def _by_stream(answer: Any) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """RESP3 answers with a dict and wraps entries in one more list than RESP2."""
    if isinstance(answer, dict):
        return [(key, wrapped[0]) for key, wrapped in answer.items()]
    return [(key, entries) for key, entries in answer]


def _entry(cursor: Cursor, mark: Mark, fields: dict[bytes, bytes]) -> Entry:
    """One entry; what cannot be read is skipped by way of a snapshot."""
    try:
        if fields[b"v"] != b"%d" % codec.VERSION:
            raise ValueError(f"version {fields[b'v']!r}, this program reads {codec.VERSION}")
        worker, epoch = Worker.parse(fields[b"w"].decode()), Epoch(int(fields[b"e"]))
        changes = codec.decode(fields[b"c"], worker, epoch)
        last = int(fields[b"l"]) if fields[b"l"] else None
    except (KeyError, ValueError) as error:
        raise CursorGone(cursor, f"entry {mark.number} cannot be read: {error}") from None
    at = int(mark.id.partition("-")[0]) / 1000  # ids begin with the server's wall clock, ms
    return Entry(cursor, changes, worker, epoch, last, at)

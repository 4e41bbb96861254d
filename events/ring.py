"""Ring: the newest changes, kept ready once for all readers of a process.

Pure: entries in, encoded events out, oldest forgotten first; broadcast.py fills it, reader.py walks
it by number. Open it to change what is kept, or how a foreign cursor finds its place.

    forgotten | first ........ end      number of an entry, counted in this process
              base          head        cursors: what the first one follows, what the last one is

A cursor names a place in every shard, and another process saw the shards in another order, so a
reader's cursor is often none of ours. It still has a place where each of its marks is one of ours:
after the last of our cursors it has reached; what it has seen beyond is left out, shard by shard.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvplane.index import Entry
from kvplane.vocabulary import Cursor, Removed, Stored, Worker

from .records import entry_record

_ENTRY_BYTES, _CHANGE_BYTES, _BLOCK_BYTES = 512, 256, 40  # at most, as objects and as text
_FAR = 4096  # entries looked through for a foreign cursor; beyond it the store is asked
NOWHERE = Cursor("")


class Order(Protocol):
    """What a store knows of its cursors; see index/stores/base.py."""

    def reached(self, cursor: Cursor, goal: Cursor) -> bool: ...
    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor: ...
    def shard_of(self, worker: Worker) -> int: ...


class Kept:
    """One entry; it becomes an event when the first reader wants it, and stays one."""

    __slots__ = ("_entry", "_event", "at", "bytes", "cursor", "worker")

    def __init__(self, entry: Entry) -> None:
        self.cursor, self.worker, self.at = entry.cursor, entry.worker, entry.at
        self.bytes = _ENTRY_BYTES + sum(_weight(change) for change in entry.changes)
        self._entry: Entry | None = entry
        self._event = b""

    def event(self, cursor: Cursor | None = None) -> bytes:
        """As server-sent event; with `cursor` for a reader whose place is another after it."""
        if self._entry is not None:
            self._event, self._entry = encoded(self._entry), None
        if cursor is None or cursor == self.cursor:
            return self._event
        return _head(cursor) + self._event[len(_head(self.cursor)) :]


def encoded(entry: Entry) -> bytes:
    """An entry as a server-sent event; its id is its cursor."""
    rest = msgspec.json.encode({**entry_record(entry), "cursor": ""}).partition(b',"')[2]
    return _head(entry.cursor) + rest + b"\n\n"


def _head(cursor: Cursor) -> bytes:
    shown = msgspec.json.encode(cursor)
    return b'id: %s\nevent: changes\ndata: {"cursor":%s,"' % (cursor.encode(), shown)


def _weight(change: object) -> int:
    blocks = len(change.blocks) if isinstance(change, Stored | Removed) else 0
    return _CHANGE_BYTES + _BLOCK_BYTES * blocks


@dataclass(slots=True)
class Place:
    """How far one reader is: `number` is its next entry; not aligned: it saw some beyond."""

    number: int
    at: Cursor
    aligned: bool


class Ring:
    """Entries `first` .. `end` - 1, at most so many and so many bytes, and always the newest."""

    def __init__(self, order: Order, most_entries: int, most_bytes: int) -> None:
        self._order, self._most, self._most_bytes = order, most_entries, most_bytes
        self._kept: dict[int, Kept] = {}
        self._follows: dict[Cursor, int] = {}  # cursor -> number of the entry after it
        self.first = self.end = self.bytes = 0
        self.base = self.head = NOWHERE
        self.life = 0  # another one each time it begins anew; numbers go on
        self.why = ""  # it began anew
        self.followed = False  # somebody fills it; broadcast.py's own mark

    def begin(self, cursor: Cursor, why: str = "") -> None:
        """Empty, with what follows this cursor to come."""
        self.life, self.why, self.bytes = self.life + 1, why, 0
        self._kept.clear()
        self.first, self.base, self.head = self.end, cursor, cursor
        self._follows = {cursor: self.end}

    def __getitem__(self, number: int) -> Kept:
        return self._kept[number]

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, entry: Entry) -> None:
        """One more; the oldest make room."""
        kept = Kept(entry)
        self._kept[self.end] = kept
        self.end, self.head = self.end + 1, entry.cursor
        self._follows[entry.cursor] = self.end
        self.bytes += kept.bytes
        while len(self._kept) > self._most or (
            self.bytes > self._most_bytes and len(self._kept) > 1
        ):
            old = self._kept.pop(self.first)
            self._follows.pop(self.base, None)
            self.first, self.base = self.first + 1, old.cursor
            self.bytes -= old.bytes

    def ahead(self, cursor: Cursor) -> bool:
        """Whether this cursor has seen what has not come here yet."""
        return cursor not in self._follows and not self._order.reached(self.head, cursor)

    def place(self, cursor: Cursor) -> Place | None:
        """Where a reader at this cursor goes on; None where that is not in the ring."""
        number = self._follows.get(cursor)
        if number is not None:
            return Place(number, cursor, True)
        if not self._order.reached(cursor, self.base) or self.ahead(cursor):
            return None
        low, high = self.first, self.end
        while low < high:  # the last of our cursors that this one has reached
            middle = (low + high + 1) // 2
            if self._order.reached(cursor, self._kept[middle - 1].cursor):
                low = middle
            else:
                high = middle - 1
        return Place(low, cursor, False) if self._ours(cursor, low) else None

    def _ours(self, cursor: Cursor, number: int) -> bool:
        """Whether every mark of the cursor is one of ours, or it is of another history."""
        at = self._kept[number - 1].cursor if number > self.first else self.base
        last = min(self.end, number + _FAR)
        while at != cursor and number < last:
            step = self._step(at, self._kept[number])
            at = step if self._order.reached(cursor, step) else at
            number += 1
        return at == cursor

    def take(self, place: Place) -> bytes:
        """The event at a place, which moves on; b"" where its reader has seen it."""
        kept = self._kept[place.number]
        place.number += 1
        if place.aligned:
            place.at = kept.cursor
            return kept.event()
        step = self._step(place.at, kept)
        seen = self._order.reached(place.at, step)
        place.at = place.at if seen else step
        place.aligned = place.at == kept.cursor
        return b"" if seen else kept.event(place.at)

    def _step(self, at: Cursor, kept: Kept) -> Cursor:
        return self._order.splice(at, kept.cursor, {self._order.shard_of(kept.worker)})

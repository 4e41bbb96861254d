"""Memory: the store of one process, gone with it.

Edge, though it moves no bytes: tails wait for writers. For the demo, `kvplane all` and tests; same
promises as redis.py, kept by the same contract suite. Open it only to follow base.py.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field

from kvplane.runtime import Clock, SystemClock
from kvplane.vocabulary import Change, Cleared, ClearReason, Cursor, Epoch, Known, Worker

from ..errors import CursorGone
from ..settings import IndexSettings
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
from .rows import Value, encode

_NUMBER = re.compile("[0-9]{1,19}")


@dataclass(slots=True)
class _Life:
    epoch: Epoch
    last: int | None = None
    known: dict[str, Known] = field(default_factory=dict)  # by ingest
    gone: bool = False
    table: dict[bytes, Value] = field(default_factory=dict)
    gaps: int = 0
    heard: float | None = None  # wall clock, seconds


class MemoryStore:
    """Tables, positions and one stream. Nothing here awaits, so every call is one step."""

    def __init__(self, clock: Clock | None = None, settings: IndexSettings | None = None) -> None:
        self._clock: Clock = clock or SystemClock()
        self._lives: dict[Worker, _Life] = {}
        self._name = secrets.token_hex(4)  # cursors of another process are not ours
        self._written = 0  # number of the newest entry
        most = (settings or IndexSettings()).stream_entries
        self._stream: deque[Entry] = deque(maxlen=most)
        self._grown = asyncio.Event()  # set and replaced at each entry
        self._beats: dict[str, float] = {}  # ingest -> monotonic end of its life
        self._closed = False

    async def begin_life(self, worker: Worker, seen: Epoch | None) -> Epoch:
        """See base.py."""
        life = self._lives.get(worker)
        if life is not None and not life.gone and life.epoch != seen:
            return life.epoch
        epoch = Epoch(max(life.epoch if life else 0, seen or 0) + 1)
        self._lives[worker] = _Life(epoch, gaps=life.gaps if life and not life.gone else 0)
        self._append(worker, epoch, None, (Cleared(worker, epoch, ClearReason.RESTART),))
        return epoch

    async def position(self, worker: Worker) -> Position | None:
        """See base.py."""
        life = self._living(worker)
        if life is None:
            return None
        known = {by: told.state for by, told in life.known.items()}
        return Position(life.epoch, life.last, True, known, life.gaps)

    async def apply(self, batch: Batch) -> Outcome:
        """See base.py."""
        life = self._lives.get(batch.worker)
        if life is None or life.gone or life.epoch != batch.epoch:
            return StaleEpoch(life.epoch if life else Epoch(0))
        last = -1 if life.last is None else life.last
        if batch.last <= last:
            return Repeat(last)
        if batch.first > last + 1 and not batch.reset:
            return GapRefused(last + 1)
        if batch.reset:
            life.table.clear()
            life.gaps += 1
        life.table |= batch.rows  # type: ignore[arg-type]  # what is None goes at once
        for key in [key for key, value in batch.rows.items() if value is None]:
            del life.table[key]
        life.last, life.heard = batch.last, self._clock.wall()
        return Applied(self._append(batch.worker, batch.epoch, batch.last, batch.changes))

    async def table(self, worker: Worker) -> dict[bytes, Value]:
        """See base.py."""
        life = self._living(worker)
        return dict(life.table) if life else {}

    async def known(self, change: Known) -> None:
        """See base.py."""
        life = self._living(change.worker)
        if life and life.epoch == change.epoch:
            living = await self.living()
            life.known = {by: told for by, told in life.known.items() if by in living}
            life.known[change.by] = change
            self._append(change.worker, change.epoch, None, (change,))

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        """See base.py."""
        life = self._living(worker)
        if life and life.epoch == epoch:
            self._lives[worker] = _Life(epoch, gone=True)
            self._append(worker, epoch, None, (Cleared(worker, epoch, ClearReason.GONE),))

    async def beat(self, ingest: str, ttl_s: float) -> None:
        """See base.py."""
        self._beats[ingest] = self._clock.now() + ttl_s
        self._beats = {one: end for one, end in self._beats.items() if end > self._clock.now()}

    async def living(self) -> frozenset[str]:
        """See base.py."""
        return frozenset(one for one, end in self._beats.items() if end > self._clock.now())

    async def fit(self) -> None:
        """See base.py."""

    async def refuses(self) -> str:
        """See base.py."""
        return ""

    async def evicted(self) -> int:
        """See base.py."""
        return 0

    def away(self) -> frozenset[int]:
        """See base.py."""
        return frozenset()

    async def shards(self) -> int:
        """See base.py."""
        return 1

    def shard_of(self, worker: Worker) -> int:
        """See base.py."""
        return 0

    async def snapshot(self, shards: Collection[int] | None = None) -> Snapshot:
        """See base.py."""
        here = self._cursor(self._written)
        living = ((w, life) for w, life in sorted(self._lives.items()) if not life.gone)
        states = tuple(_state(worker, life) for worker, life in living)
        return Snapshot(here, states if shards is None or 0 in shards else (), here)

    async def head(self) -> Cursor:
        """See base.py."""
        return self._cursor(self._written)

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        """See base.py."""
        return self._number(cursor) >= self._number(goal)

    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor:
        """See base.py."""
        return fresh if 0 in shards else cursor

    async def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """See base.py."""
        number = self._number(after)
        while not self._closed:
            behind = self._written - number
            if not 0 <= behind <= len(self._stream):
                raise CursorGone(after, f"the stream holds the last {len(self._stream)} entries")
            if behind:
                number += 1
                yield self._stream[-behind]
            else:
                await self._grown.wait()

    async def close(self) -> None:
        """See base.py."""
        self._closed = True
        self._grown.set()

    def _living(self, worker: Worker) -> _Life | None:
        life = self._lives.get(worker)
        return None if life is None or life.gone else life

    def _append(
        self, worker: Worker, epoch: Epoch, last: int | None, changes: tuple[Change, ...]
    ) -> Cursor:
        self._written += 1
        cursor = self._cursor(self._written)
        self._stream.append(Entry(cursor, changes, worker, epoch, last, self._clock.wall()))
        self._grown.set()
        self._grown = asyncio.Event()
        return cursor

    def _cursor(self, number: int) -> Cursor:
        return Cursor(f"{self._name}.{number}")

    def _number(self, cursor: Cursor) -> int:
        name, _, number = cursor.partition(".")
        if name != self._name or not _NUMBER.fullmatch(number):
            raise CursorGone(cursor, "it is not of this stream")
        return int(number)


def _state(worker: Worker, life: _Life) -> WorkerState:
    known = tuple(life.known.values())
    table = {key: encode(value) for key, value in life.table.items()}
    return WorkerState(worker, life.epoch, life.last, known, table, life.gaps, life.heard)

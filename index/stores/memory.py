"""Memory: the store of one process, gone with it.

Edge, though it moves no bytes: tails wait for writers. For the demo, `kvplane all` and tests; same
promises as redis.py, kept by the same contract suite. Open it only to follow base.py.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import deque
from collections.abc import AsyncGenerator
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
    Row,
    Snapshot,
    StaleEpoch,
    WorkerState,
)

_NUMBER = re.compile("[0-9]{1,19}")


@dataclass(slots=True)
class _Life:
    epoch: Epoch
    last: int | None = None
    known: Known | None = None
    gone: bool = False
    rows: dict[bytes, Row] = field(default_factory=dict)


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
        self._closed = False

    async def begin_life(self, worker: Worker, seen: Epoch | None) -> Epoch:
        """See base.py."""
        life = self._lives.get(worker)
        if life is not None and not life.gone and life.epoch != seen:
            return life.epoch
        epoch = Epoch(max(life.epoch if life else 0, seen or 0) + 1)
        self._lives[worker] = _Life(epoch)
        self._append(worker, epoch, None, (Cleared(worker, epoch, ClearReason.RESTART),))
        return epoch

    async def position(self, worker: Worker) -> Position | None:
        """See base.py."""
        life = self._living(worker)
        return Position(life.epoch, life.last) if life else None

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
            life.rows.clear()
        for key, row in batch.rows.items():
            if row is None:
                life.rows.pop(key, None)
            else:
                life.rows[key] = row
        life.last = batch.last
        return Applied(self._append(batch.worker, batch.epoch, batch.last, batch.changes))

    async def table(self, worker: Worker) -> dict[bytes, Row]:
        """See base.py."""
        life = self._living(worker)
        return dict(life.rows) if life else {}

    async def known(self, change: Known) -> None:
        """See base.py."""
        life = self._living(change.worker)
        if life and life.epoch == change.epoch:
            life.known = change
            self._append(change.worker, change.epoch, None, (change,))

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        """See base.py."""
        life = self._living(worker)
        if life and life.epoch == epoch:
            self._lives[worker] = _Life(epoch, gone=True)
            self._append(worker, epoch, None, (Cleared(worker, epoch, ClearReason.GONE),))

    async def snapshot(self) -> Snapshot:
        """See base.py."""
        here = self._cursor(self._written)
        living = ((w, life) for w, life in sorted(self._lives.items()) if not life.gone)
        states = (
            WorkerState(worker, life.epoch, life.last, life.known, dict(life.rows))
            for worker, life in living
        )
        return Snapshot(here, tuple(states), here)

    async def head(self) -> Cursor:
        """See base.py."""
        return self._cursor(self._written)

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        """See base.py."""
        return self._number(cursor) >= self._number(goal)

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

"""Tables: what does a Redis store keep of its workers?

Edge: reads of one worker's facts and rows, and of whole shards for a snapshot; nothing is decoded
here but numbers and Known. redis.py makes it. Open it to change how a snapshot is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from kvplane.vocabulary import Epoch, Knowledge, Known, Worker

from ..errors import StoreDown
from .base import WorkerState
from .layout import Layout
from .line import Line

log = logging.getLogger(__name__)

THERE = b""  # a field that is no row; in every table that was written to


class Tables:
    """Reads of one store; nothing here changes it."""

    def __init__(self, line: Line, layout: Layout, scan_count: int, scans: int) -> None:
        self._line, self._layout = line, layout
        self._scan_count, self._scans = scan_count, scans

    async def state(self, worker: Worker) -> WorkerState | None:
        """All of a living worker but its table."""
        await self._layout.ready()
        meta = self._layout.meta(worker)
        flat: list[bytes] = await self._line.call(meta, "HGETALL", meta)
        kept = dict(zip(flat[::2], flat[1::2], strict=True))
        if b"g" in kept:
            return None
        return _state(worker, kept)

    async def whole(self, state: WorkerState) -> bool:
        """Whether the table that batches were applied to is still there."""
        if state.last is None:
            return True
        table = self._layout.table(state.worker, state.epoch)
        return bool(await self._line.call(table, "HEXISTS", table, THERE))

    async def rows(self, state: WorkerState) -> dict[bytes, bytes]:
        """Its table, as it lies there."""
        if state.last is None:
            return {}  # no batch yet: what may lie there is of a life that was lost
        table, cursor = self._layout.table(state.worker, state.epoch), b"0"
        rows: dict[bytes, bytes] = {}
        while True:
            step = ("HSCAN", table, cursor, "COUNT", self._scan_count)
            cursor, flat = await self._line.call(table, *step)
            rows.update(zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                break
        rows.pop(THERE, None)
        return rows

    async def of(self, shards: Sequence[int]) -> tuple[WorkerState, ...]:
        """Everything of the living workers of these shards."""
        keys = [f"{self._layout.tags[shard]}:w" for shard in shards]
        names = await self._line.many([(key, ("SMEMBERS", key)) for key in keys])
        for some in names:
            if isinstance(some, StoreDown):
                raise some
        workers = sorted(filter(None, {_worker(name) for some in names for name in some}))
        turn = asyncio.Semaphore(self._scans)

        async def read(worker: Worker) -> WorkerState | None:
            async with turn:
                state = await self.state(worker)
                return replace(state, table=await self.rows(state)) if state else None

        found = await asyncio.gather(*map(read, workers))
        return tuple(state for state in found if state is not None)


def _worker(name: bytes) -> Worker | None:
    """Whose name it is; one that nobody can have written hides nobody else."""
    try:
        return Worker.parse(name.decode())
    except ValueError as error:
        log.error("no worker name=%r %s action=leave out", name[:100], error)
        return None


def _state(worker: Worker, kept: Mapping[bytes, bytes]) -> WorkerState | None:
    """None where its life is not told; what else cannot be read is left out."""
    number = _number(kept.get(b"e"))
    if number is None:
        return None
    epoch = Epoch(number)
    words = ((field[2:], value) for field, value in kept.items() if field.startswith(b"k:"))
    told = tuple(_known(worker, epoch, by, value) for by, value in words)
    known = tuple(one for one in told if one is not None)
    heard = _number(kept.get(b"h", b"").partition(b"-")[0])
    gaps = _number(kept.get(b"o")) or 0
    at = None if heard is None else heard / 1000
    return WorkerState(worker, epoch, _number(kept.get(b"l")), known, gaps=gaps, heard=at)


def _number(text: bytes | None) -> int | None:
    """As the scripts read it: all else is none."""
    return int(text) if text and text.isdigit() and len(text) < 20 else None


def _known(worker: Worker, epoch: Epoch, by: bytes, kept: bytes) -> Known | None:
    try:
        state, reason, since = msgspec.msgpack.decode(kept, type=tuple[str, str, float])
        return Known(worker, epoch, Knowledge(state), reason, since, by.decode())
    except (ValueError, msgspec.MsgspecError):
        return None

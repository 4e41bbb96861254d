"""Tables: what does a Redis store keep of its workers?

Edge: reads of one worker's facts and rows, and of whole shards for a snapshot; nothing is decoded
here but numbers and Known. redis.py makes it. Open it to change how a snapshot is read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kvplane.vocabulary import Epoch, Knowledge, Known, Worker

from ..errors import StoreDown
from .base import WorkerState
from .layout import Layout
from .line import Line

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
        if b"e" not in kept or b"g" in kept:
            return None
        epoch = Epoch(int(kept[b"e"]))
        known = tuple(
            _known(worker, epoch, field[2:].decode(), value)
            for field, value in kept.items()
            if field.startswith(b"k:")
        )
        last = int(kept[b"l"]) if b"l" in kept else None
        heard = int(kept[b"h"].partition(b"-")[0]) / 1000 if b"h" in kept else None
        gaps = int(kept.get(b"o", 0))
        return WorkerState(worker, epoch, last, known, gaps=gaps, heard=heard)

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
        workers = sorted(Worker.parse(name.decode()) for some in names for name in some)
        turn = asyncio.Semaphore(self._scans)

        async def read(worker: Worker) -> WorkerState | None:
            async with turn:
                state = await self.state(worker)
                return replace(state, table=await self.rows(state)) if state else None

        found = await asyncio.gather(*map(read, workers))
        return tuple(state for state in found if state is not None)


def _known(worker: Worker, epoch: Epoch, by: str, kept: bytes) -> Known:
    state, reason, since = msgspec.msgpack.decode(kept)
    return Known(worker, epoch, Knowledge(state), reason, since, by)

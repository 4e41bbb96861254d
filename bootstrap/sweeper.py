"""Sweeper: rooms go when their time is over, also when nobody asks any more.

Edge: one small task per directory. Started and stopped by whoever runs the directory's port. Open
it to change how often a room table is swept.
"""

from __future__ import annotations

import asyncio

from kvplane.runtime import Clock, cancel

from .rooms import SWEEP, RoomTable


class RoomSweeper:
    """A Part that drops expired rooms every `every_s`."""

    def __init__(self, rooms: RoomTable, clock: Clock, every_s: float = 30.0) -> None:
        self._rooms, self._clock, self._every_s = rooms, clock, every_s
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin sweeping."""
        self._task = asyncio.create_task(self._sweep(), name="sweep rooms")

    async def stop(self) -> None:
        """End sweeping."""
        await cancel(self._task)
        self._task = None

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(self._every_s)
            for _ in range(len(self._rooms) // SWEEP + 1):
                if self._rooms.expire(self._clock.now(), SWEEP) < SWEEP:
                    break
                await asyncio.sleep(0)  # others run between two handfuls

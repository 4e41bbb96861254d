"""Pulse: when do all streams of a process look at their sockets again?

Edge: one timer for all. Each wake of the loop costs more than what one batch brings (65 us against
some 20, measured), so streams that are busy wake together, and what they write goes to the store
together (index/stores/lane.py). Used by subscriber.py. Open it to change how waits are shared.

    first who waits     ..|----every_s----|  all go on
    who comes meanwhile     ......|-------|
"""

from __future__ import annotations

import asyncio


class Pulse:
    """Of one loop."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s  # 0: only a turn of the loop
        self._beat: asyncio.Event | None = None

    async def wait(self) -> None:
        """Until the beat that is under way, or one that begins now; at most `every_s`."""
        if not self._every_s:
            await asyncio.sleep(0)
            return
        if self._beat is None:
            self._beat = asyncio.Event()
            asyncio.get_running_loop().call_later(self._every_s, self._fire)
        await self._beat.wait()

    def _fire(self) -> None:
        beat, self._beat = self._beat, None
        assert beat is not None, "a timer fires once"
        beat.set()

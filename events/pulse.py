"""Pulse: when is what streams say written?

Edge: one timer for all of a process. Each wake of the loop costs more than what one batch brings
(65 us against some 20, measured), so streams that have heard something look once more together, and
what they write goes to the store together (index/stores/lane.py). Beats are so far apart from begin
to begin: who worked for longer goes on at once, and so does the first after a silence. Used by
subscriber.py. Open it to change how waits are shared.

    a beat   |--every_s--|--every_s--|       who waits in between goes on with the next
                                             nobody waits: no beat, and the next wait is none
"""

from __future__ import annotations

import asyncio


class Pulse:
    """Of one loop."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s  # 0: only a turn of the loop
        self._beat: asyncio.Event | None = None
        self._last = float("-inf")  # loop time of the last one

    async def wait(self) -> None:
        """Until the next beat; at most `every_s`, and at least a turn of the loop."""
        if self._beat is None:
            self._beat = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._last + self._every_s - loop.time()), self._fire)
        await self._beat.wait()

    def _fire(self) -> None:
        beat, self._beat = self._beat, None
        assert beat is not None, "a timer fires once"
        self._last = asyncio.get_running_loop().time()
        beat.set()

"""Pulse: when do streams that have heard something look?

Edge: one timer for all of a process. Each wake of the loop costs more than what one batch brings
(65 us against some 20, measured), so streams wake together, take what came, and what they write
goes to the store together (index/stores/lane.py). Beats are so far apart from begin to begin: who
worked for longer goes on at once, and so does the first after a silence. Used by live.py. Open it
to change how waits are shared.

    a beat   |--every_s--|--every_s--|       who asks in between is called with the next
                                             nobody asks: no beat, and the next wait is none
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pulse:
    """Of one loop."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s  # 0: only a turn of the loop
        self._asked: list[Callable[[], None]] = []
        self._last = float("-inf")  # loop time of the last one

    def call(self, back: Callable[[], None]) -> None:
        """Call it at the next beat: in `every_s` at most, and not before the loop's next turn."""
        if not self._asked:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._last + self._every_s - loop.time()), self._fire)
        self._asked.append(back)

    def _fire(self) -> None:
        asked, self._asked = self._asked, []
        self._last = asyncio.get_running_loop().time()
        for back in asked:
            back()

"""FakeClock: time that moves only when a test says so."""

from __future__ import annotations

import asyncio


class FakeClock:
    """A Clock whose sleepers wake when `advance` passes their time."""

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        sleeper = (self._now + seconds, woken)
        self._sleepers.append(sleeper)
        try:
            await woken.wait()
        finally:
            if sleeper in self._sleepers:  # cancelled
                self._sleepers.remove(sleeper)

    def sleeping(self) -> int:
        """How many wait for a later time."""
        return len(self._sleepers)

    def advance(self, seconds: float) -> None:
        self._now += seconds
        due = [event for at, event in self._sleepers if at <= self._now]
        self._sleepers = [(at, event) for at, event in self._sleepers if at > self._now]
        for event in due:
            event.set()

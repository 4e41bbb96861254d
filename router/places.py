"""Places: who may run now, who waits, and who is next?

Pure: no waiting here, admission.py does that. Places are given out by turns between keys, so that
one key's flood holds up itself. Open it to change who goes first, or who is turned away.

    most 2, queue 3:   a a | a a a     b comes: a's newest is turned away, b waits
                       one leaves:     the first of a's line runs, then b's, then a's
"""

from __future__ import annotations

import math
from enum import StrEnum


class Turn(StrEnum):
    """What became of one who waits."""

    WAITING = "waiting"
    CALLED = "called"  # has a place
    PUSHED_OUT = "pushed out"  # another key had less


class Waiting:
    """One request in line. admission.py sets what rings it."""

    __slots__ = ("line", "ring", "turn")

    def __init__(self, line: str) -> None:
        self.line, self.turn = line, Turn.WAITING
        self.ring = _nobody


def _nobody() -> None:
    """Nobody listens yet."""


class Places:
    """Counts those who run, and keeps those who wait in order."""

    def __init__(self, most: int, queue: int) -> None:
        self._most, self._queue = most if most >= 0 else math.inf, queue  # -1: no limit
        self._lines: dict[str, dict[Waiting, None]] = {}  # by key, none empty; in order of turns
        self.running = 0
        self.waiting = 0

    @property
    def free(self) -> bool:
        """Is there a place? Then nobody waits."""
        return self.running < self._most

    def full(self, line: str) -> bool:
        """Would `join` turn this one away now?"""
        return self.waiting >= self._queue and self._longest(line) is None

    def take(self) -> bool:
        """Have a place where one is free; each is given back by one `leave`. Tells whether."""
        if (running := self.running) < self._most:
            self.running = running + 1
            return True
        return False

    def join(self, line: str) -> Waiting | None:
        """Wait for a place; None where there is no room to wait either."""
        if self.waiting >= self._queue:
            longest = self._longest(line)
            if longest is None:
                return None
            self._push_out(longest)
        newcomer = Waiting(line)
        self._lines.setdefault(line, {})[newcomer] = None
        self.waiting += 1
        return newcomer

    def leave(self) -> None:
        """One that ran is done; the next in turn has its place at once."""
        if not self._lines:
            self.running -= 1
            return
        line = next(iter(self._lines))
        held = self._lines.pop(line)
        called = next(iter(held))
        del held[called]
        if held:
            self._lines[line] = held  # its next turn is after the others'
        self.waiting -= 1
        called.turn = Turn.CALLED
        called.ring()

    def withdraw(self, one: Waiting) -> None:
        """Give up waiting, or the place that was given meanwhile."""
        if one.turn is Turn.CALLED:
            self.leave()
        elif one.turn is Turn.WAITING:
            self._drop(one)

    def _longest(self, line: str) -> str | None:
        """The line whose newest should make room for a newcomer of `line`; None where it is his."""
        own = len(self._lines.get(line, ())) + 1
        name, most = "", own
        for other, held in self._lines.items():
            if other != line and len(held) > most:
                name, most = other, len(held)
        return name if most > own else None

    def _push_out(self, line: str) -> None:
        newest = next(reversed(self._lines[line]))
        self._drop(newest)
        newest.turn = Turn.PUSHED_OUT
        newest.ring()

    def _drop(self, one: Waiting) -> None:
        held = self._lines[one.line]
        del held[one]
        if not held:
            del self._lines[one.line]
        self.waiting -= 1

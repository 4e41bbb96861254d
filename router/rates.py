"""Rates: has this key a request left to spend?

Pure: time is an argument. keys.py holds one Bucket per key, admission.py one for all of them.
Open it to change how a rate is counted.

    60 a minute, burst 10:   ten at once, then one a second
"""

from __future__ import annotations


class Bucket:
    """Requests that may be spent now; it fills at a steady rate and never holds more than `burst`.

    A rate of 0 is no limit.
    """

    __slots__ = ("_burst", "_filled", "_left", "_per_s", "limited")

    def __init__(self, per_s: float, burst: int = 0) -> None:
        self._per_s, self.limited = per_s, bool(per_s)
        self._burst = float(burst or max(1, round(per_s * 10)))
        self._left, self._filled = self._burst, 0.0

    def take(self, now: float) -> float:
        """0 where a request was spent; else seconds until there is one. Refusals cost nothing."""
        if not self.limited:
            return 0.0
        passed = max(0.0, now - self._filled)
        self._left = min(self._burst, self._left + passed * self._per_s)
        self._filled = now
        if self._left >= 1.0:
            self._left -= 1.0
            return 0.0
        return (1.0 - self._left) / self._per_s

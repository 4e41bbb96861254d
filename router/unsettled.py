"""Unsettled: requests that seem wrong, until the news on its way has had time to come.

Pure: times are arguments. closed_loop.py puts them in and judges them when they are due. Open it to
change how long is waited, and for what.

    routed --- answered --settle_s--> due, once the store answered what was asked after `answered`
                                      due anyway after unsettled_s: then nobody can judge it
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .foretold import Foretold
from .settings import DriftSettings


@dataclass(frozen=True, slots=True)
class Waiting:
    """One of them."""

    told: Foretold
    actual: int
    routed: float  # not earlier; the request began then
    answered: float


class Unsettled:
    """All of one gateway, oldest first; bounded in number and in tokens."""

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._all: deque[Waiting] = deque()
        self._tokens = 0  # of their prompts

    def add(self, one: Waiting) -> bool:
        """False where there is no room; one prompt may be as long as it likes."""
        settings, tokens = self._settings, self._tokens + one.told.tokens
        full = len(self._all) >= settings.most_waiting or tokens > settings.most_tokens
        if self._all and full:
            return False
        self._all.append(one)
        self._tokens = tokens
        return True

    def due(self, now: float, in_touch_at: float) -> Waiting | None:
        """The next one that is due; it is out then."""
        if not self._all:
            return None
        one, settings = self._all[0], self._settings
        settled = now - one.answered >= settings.settle_s and in_touch_at > one.answered
        if not settled and now - one.answered < settings.unsettled_s:
            return None
        self._all.popleft()
        self._tokens -= one.told.tokens
        return one

"""Leg engine: the connections of one origin, and how long it keeps them.

Edge: holds open sockets, and does nothing to them. legs.py has one per engine. Open it to change
what an engine teaches that closes idle connections sooner than we do.
"""

from __future__ import annotations

from collections import deque

from .legs_connection import Connection
from .legs_exchange import Exchange
from .legs_wire import Origin

LESSON_LEAST_S = 0.1  # an engine that closes sooner than this is ending, not tidying up
SOON_TIMES, SOON_APART_S = 3, 0.05  # but one that does so at so many moments keeps none, unsaid
LESSON_SHARE = 0.7  # of the time after which it was seen to close: we let go first


class Engine:
    """The connections of one origin."""

    def __init__(self) -> None:
        self.idle: list[Connection] = []  # last in, first out: the warmest is used, the rest age
        self.open = 0  # connections made or being made
        self.waiters: deque[Exchange] = deque()
        self.removed = False
        self.kept_s = self.kept_until = 0.0  # how long it keeps connections, and how long we know
        self._soon, self._soon_at = 0, float("-inf")  # moments when it closed at once, the last one

    @property
    def unused(self) -> bool:
        """Nothing is lost where it is forgotten."""
        return not self.open and not self.waiters and not self.kept_until

    def learn(self, age: float, usual_s: float, now: float, lesson_s: float) -> None:
        """It closed one that had idled this long: others go sooner from now on."""
        if age < LESSON_LEAST_S:
            if now - self._soon_at >= SOON_APART_S:
                self._soon, self._soon_at = self._soon + 1, now
            if self._soon < SOON_TIMES:
                return
            age = 0.0
        if age >= usual_s:
            return
        self.kept_s, self.kept_until = age * LESSON_SHARE, now + lesson_s
        for other in self.idle:
            other.expire_s = min(other.expire_s, self.kept_s)

    def drop_idle(self) -> None:
        """Close what idles: it is not wanted any more, or one like them was dead when it was used,
        as all are behind a firewall that forgot them. The next attempt would only meet another."""
        idle, self.idle = self.idle, []  # first, or each would teach that engines close
        for connection in idle:
            connection.abort()


class Engines(dict[Origin, Engine]):
    """By where they listen; there as soon as one is asked for."""

    def __missing__(self, origin: Origin) -> Engine:
        engine = self[origin] = Engine()
        return engine

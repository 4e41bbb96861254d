"""Errands: small requests to engines that nobody waits for.

Edge: no task and no sleep; each errand is one leg that ends by itself or at its deadline, and
tells its outcome once. sending.py runs them: aborts, clean-ups, looks at an engine's counters.
Open it to change how many may be out, or how long.

    begin -> (answer read as it comes) -> then(status, body)     status 0: no whole answer
      ^----- once more where a kept connection died: all of them may be done twice
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .legs import Legs
from .legs_errors import Stale
from .legs_exchange import Bell, Exchange
from .legs_wire import Headers, Origin

MOST_ERRANDS = 1024  # out at once; engines answer these in milliseconds
MOST_BYTES = 4 * 1024 * 1024  # of one answer; a big engine's metrics are some 300 kB

Then = Callable[[int, bytes], None]


class Errands:
    """Errands over the gateway's legs; all that is out is closed with them."""

    def __init__(self, legs: Legs) -> None:
        self._legs = legs
        self.out = 0

    def run(
        self,
        url: str,
        target: str,
        headers: Headers | bytes = (),
        body: bytes = b"",
        method: str = "POST",
        deadline_s: float = 2.0,
        then: Then = lambda status, body: None,
    ) -> bool:
        """Begin one; False where too many are out: `then` hears of nothing."""
        if self.out >= MOST_ERRANDS:
            return False
        self.out += 1
        origin = Origin.parse(url)

        def begin(bell: Bell) -> Exchange:
            return self._legs.begin(origin, target, headers, body, bell, method)

        errand = _Errand(begin, self._over, then)
        errand.timer = asyncio.get_running_loop().call_later(deadline_s, errand.give_up)
        errand.begin()
        return True

    def _over(self) -> None:
        self.out -= 1


class _Errand(Bell):
    """The bell of one errand: rung as its answer comes."""

    __slots__ = ("_again", "_begin", "_body", "_over", "_told", "leg", "then", "timer")

    def __init__(
        self, begin: Callable[[Bell], Exchange], over: Callable[[], None], then: Then
    ) -> None:
        super().__init__()
        self.leg: Exchange | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.then, self._begin, self._over = then, begin, over
        self._again, self._told, self._body = True, False, bytearray()

    def begin(self) -> None:
        """The request leaves; it may be over at once."""
        self.leg = self._begin(self)
        self.ring()

    def ring(self) -> None:
        """Take what came; at the end, tell."""
        leg = self.leg
        if leg is None or self._told:
            return
        self._body += leg.take()
        if leg.over:
            self._end(leg)
        elif len(self._body) > MOST_BYTES:
            asyncio.get_running_loop().call_soon(self.give_up)  # not from within its own bytes

    def _end(self, leg: Exchange) -> None:
        if isinstance(leg.error, Stale) and self._again:
            self._again, self.leg = False, None
            self.begin()
            return
        self._told, self.leg = True, None  # each holds the other: they would be garbage
        if self.timer is not None:
            self.timer.cancel()
        self._over()
        self.then(leg.status if leg.complete else 0, bytes(self._body))

    def give_up(self) -> None:
        """It takes too long, or says too much."""
        self._again = False
        if self.leg is not None:
            self.leg.abort()

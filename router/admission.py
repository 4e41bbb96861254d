"""Admission: may this request begin now, and how much may it bring?

Edge: waits in line, with a deadline, and hears when the client leaves. places.py says who is next,
keys.py who asks, rates.py how often. api.py asks before a body is read, and before the request is
routed; all that is taken is given back on every path. Open it to change what is refused, and how.

    over a rate            429 rate_limit_exceeded   retry-after: when there is one left
    the line is full       429 overloaded            retry-after: 1
    too long in line       503 overloaded            retry-after: 1
    bodies fill memory     503 overloaded            retry-after: 1
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Protocol

from .dispatch import ClientGone
from .errors import GatewayError
from .keys import Key
from .legs_exchange import Bell
from .places import Places, Turn, Waiting
from .rates import Bucket
from .settings import AdmissionSettings

SOON_S = "1"  # Retry-After where nobody can tell


class Asking(Protocol):
    """Who waits: its bell is rung when it leaves."""

    bell: Bell
    gone: bool


class Admission:
    """Places, rates and memory of one gateway."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._rate = Bucket(settings.requests_per_s)
        self._most_held = max(settings.most_held_bytes, settings.most_body_bytes)
        self.places = Places(settings.most_requests, settings.queue)
        # A place where one is free; `leave` gives it back. Else `enter` waits for one.
        self.enter_at_once, self.leave = self.places.take, self.places.leave
        # Can anybody be turned away before his body is read, whatever his key may?
        self.bounded = self._rate.limited or settings.most_requests >= 0
        self.held_bytes = 0  # of bodies of requests under way: `hold` adds, who is done subtracts
        self.refused: Counter[tuple[str, str]] = Counter()  # (key, why); read by a scrape
        self.waited: Counter[str] = Counter()  # of those who had to wait, by what came of it

    def look(self, key: Key, now: float) -> None:
        """Before a body is read: raises GatewayError where it would be read for nothing. Only
        where this or the key is bounded."""
        if key.bucket.limited and (wait_s := key.bucket.take(now)):
            raise self._over_rate(key, "of this key", wait_s)
        if self._rate.limited and (wait_s := self._rate.take(now)):
            raise self._over_rate(key, "of all keys together", wait_s)
        if 0 <= key.most <= key.running:
            text = f"{key.running} requests of this key are under way; it may have {key.most}"
            raise self._refuse(key, "key", text, 429)
        if not self.places.free and self.places.full(key.name):
            raise self._full(key)

    async def enter(self, key: Key, client: Asking) -> None:
        """A place, now or in turn; `leave` gives it back. Raises GatewayError and ClientGone."""
        if self.enter_at_once():
            return
        waiting = self.places.join(key.name)
        if waiting is None:
            raise self._full(key)
        waiting.ring = client.bell.ring
        await self._wait(waiting, client)
        if client.gone:
            self._give_up(waiting, "gone")
            raise ClientGone
        if waiting.turn is Turn.CALLED:
            self.waited["served"] += 1
            return
        pushed_out = waiting.turn is Turn.PUSHED_OUT
        self._give_up(waiting, "pushed out" if pushed_out else "late")
        raise self._full(key) if pushed_out else self._late(key)

    def hold(self, key: Key, size: int) -> None:
        """Count bytes of a body that came; raises GatewayError where all together are too many."""
        held = self.held_bytes + size
        if held > self._most_held:
            text = f"the bodies of all requests under way have {self.held_bytes} bytes"
            raise self._refuse(key, "memory", text, 503)
        self.held_bytes = held

    async def _wait(self, waiting: Waiting, client: Asking) -> None:
        """Until called, pushed out, late, or left alone."""
        try:
            async with asyncio.timeout(self._settings.queue_s):
                while waiting.turn is Turn.WAITING and not client.gone:
                    await client.bell.wait()
        except TimeoutError:
            return
        except BaseException:
            self._give_up(waiting, "gone")
            raise

    def _give_up(self, waiting: Waiting, why: str) -> None:
        self.waited[why] += 1
        self.places.withdraw(waiting)

    def _over_rate(self, key: Key, whose: str, wait_s: float) -> GatewayError:
        self.refused[key.name, "rate"] += 1
        text = f"too many requests {whose}; the next may come in {wait_s:.1f} s"
        return GatewayError("rate_limit_exceeded", text, retry_after=str(math.ceil(wait_s)))

    def _full(self, key: Key) -> GatewayError:
        running, queue = self.places.running, self.places.waiting
        return self._refuse(key, "full", f"{running} requests are running, {queue} wait", 429)

    def _late(self, key: Key) -> GatewayError:
        waited = f"no place came free within {self._settings.queue_s:g} s"
        return self._refuse(key, "late", f"{waited}: {self.places.running} requests run", 503)

    def _refuse(self, key: Key, why: str, text: str, status: int) -> GatewayError:
        self.refused[key.name, why] += 1
        return GatewayError("overloaded", text, status=status, retry_after=SOON_S)

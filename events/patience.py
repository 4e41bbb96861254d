"""Patience: a call of the store that is made until the store answers.

Edge: pauses that grow, and end at once for all where anybody heard that the store is back: what it
does not know yet must not be called exact for longer than it takes to write. Used by writer.py and
subscriptions.py. Open it to change what is done while the store is down. Meanwhile the socket's
bounded queue fills, then gaps tell.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvplane.index import StoreDown
from kvplane.runtime import Clock, backoff, cancel
from kvplane.vocabulary import Worker

from .metrics import EventsMetrics
from .settings import EventsSettings

log = logging.getLogger(__name__)
T = TypeVar("T")


class Outage:
    """Of the store, as one process sees it: whoever hears it again wakes those who wait."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    def end(self) -> None:
        """The store answers."""
        self._over.set()
        self._over = asyncio.Event()

    async def wait(self, most_s: float, clock: Clock) -> None:
        """Until it answers somebody, or so long: then it is asked again."""
        pause = asyncio.ensure_future(clock.sleep(most_s))
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((pause, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(pause, over)


class Patience:
    """Of one worker's writer."""

    def __init__(
        self,
        worker: Worker,
        clock: Clock,
        metrics: EventsMetrics,
        settings: EventsSettings,
        outage: Outage | None = None,
    ) -> None:
        self._worker, self._clock = worker, clock
        self._metrics, self._settings = metrics, settings
        self._outage = outage or Outage()

    async def __call__(self, call: Callable[[], Awaitable[T]]) -> T:
        """What the store answers at last."""
        settings = self._settings
        waits = backoff(settings.store_retry_s, most_s=settings.store_retry_most_s)
        since: float | None = None
        while True:
            try:
                answer = await call()
            except StoreDown as error:
                self._metrics.store_errors.inc()
                if since is None:  # once: there may be a thousand workers
                    since = self._clock.now()
                    log.warning("store down worker=%s %s action=retry", self._worker, error)
                await self._outage.wait(next(waits), self._clock)
                continue
            if since is not None:
                self._outage.end()
                after = self._clock.now() - since
                log.info("store is back worker=%s after_s=%.1f", self._worker, after)
            return answer

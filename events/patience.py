"""Patience: a call of the store that is made until the store answers.

Edge: pauses that grow. Used by writer.py. Open it to change what is done while the store is down.
Meanwhile the socket's bounded queue fills, then gaps tell.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvplane.index import StoreDown
from kvplane.runtime import Clock, backoff
from kvplane.vocabulary import Worker

from .metrics import EventsMetrics
from .settings import EventsSettings

log = logging.getLogger(__name__)
T = TypeVar("T")


class Patience:
    """Of one worker's writer."""

    def __init__(
        self, worker: Worker, clock: Clock, metrics: EventsMetrics, settings: EventsSettings
    ) -> None:
        self._worker, self._clock = worker, clock
        self._metrics, self._settings = metrics, settings

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
                await self._clock.sleep(next(waits))
                continue
            if since is not None:
                after = self._clock.now() - since
                log.info("store is back worker=%s after_s=%.1f", self._worker, after)
            return answer

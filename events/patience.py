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
        while True:
            try:
                return await call()
            except StoreDown as error:
                self._metrics.store_errors.inc()
                wait = next(waits)
                log.warning("store down worker=%s %s retry_in_s=%.1f", self._worker, error, wait)
                await self._clock.sleep(wait)

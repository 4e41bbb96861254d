"""Telling: what has the store been told about one stream?

Edge: says state and reason once per change, again where the store forgot it, and moves the gauges.
Used by writer.py (which life it is) and subscriber.py (what happened). Open it to change how often
something is said.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvplane.index import Store, StoreDown
from kvplane.runtime import Clock
from kvplane.vocabulary import Epoch, Knowledge, Known, Worker

from .metrics import EventsMetrics
from .states import Signal, State, Stream

log = logging.getLogger(__name__)


class Telling:
    """One stream's words in the store, signed by one ingest."""

    def __init__(
        self,
        worker: Worker,
        stream: Stream,
        store: Store,
        clock: Clock,
        metrics: EventsMetrics,
        ingest: str,
    ) -> None:
        self.worker, self.stream = worker, stream
        self._store, self._clock, self._metrics, self._ingest = store, clock, metrics, ingest
        self._epoch = Epoch(0)
        self._told: tuple[Knowledge, str] | None = None  # heard by the store, in this life
        self._counted: tuple[State, Knowledge | None] | None = None  # where the gauges have us

    @property
    def told(self) -> Knowledge | None:
        """What the store heard last of this life."""
        return self._told[0] if self._told else None

    def begin(self, epoch: Epoch) -> None:
        """A life the store has not heard about, or has forgotten what it heard."""
        self._epoch, self._told = epoch, None
        self._count()

    def end(self) -> None:
        """This stream is not followed any more."""
        self._told = None
        self._move(None)

    async def say(self, signal: Signal, why: str = "") -> None:
        """Something happened to the stream."""
        if self.stream.hear(signal, why):
            await self.tell()

    async def settle(self, heard: bool, silent: bool, doubt: str, caveat: str) -> None:
        """What it amounts to now; see states.py."""
        self.stream.settle(heard, silent, doubt, caveat)
        await self.tell()

    async def verify(self, kept: Mapping[str, Knowledge]) -> None:
        """Tell again what a store that switched over, or that was down, does not know."""
        if self._told is None or kept.get(self._ingest) is not self._told[0]:
            self._told = None
            await self.tell()

    async def tell(self) -> None:
        """Once per change; a store that is down hears it at the next verify()."""
        state, reason = self.stream.knowledge, self.stream.reason
        self._count()
        if not self._epoch or self._told == (state, reason):
            return
        wall = self._clock.wall()
        try:
            await self._store.known(
                Known(self.worker, self._epoch, state, reason, wall, self._ingest)
            )
        except StoreDown as error:
            self._metrics.store_errors.inc()
            log.warning("knowledge not told worker=%s %s", self.worker, error)
            return
        if self._told is None or self._told[0] is not state:
            log.info("knowledge worker=%s state=%s reason=%r", self.worker, state, reason)
        self._told = state, reason
        self._count()

    def _count(self) -> None:
        self._move((self.stream.state, self.told))

    def _move(self, after: tuple[State, Knowledge | None] | None) -> None:
        """Move this worker in the gauges; None takes it out."""
        if after == self._counted:
            return
        for step, at in ((-1, self._counted), (1, after)):
            if at is not None:
                self._metrics.streams.labels(at[0].value).inc(step)
                if at[1] is not None:
                    self._metrics.workers.labels(at[1].value).inc(step)
        self._counted = after

"""Subscriptions: one subscriber per living worker; the dead are cleared.

Edge: starts and stops subscribers as discovery says. Made by kvplane/wiring.py. Open it to change
what follows from a pod that comes, changes or goes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import zmq.asyncio

from kvplane.index import Store, StoreDown
from kvplane.runtime import Clock, backoff, cancel
from kvplane.vocabulary import Epoch, Knowledge, Pod, Worker, WorkerUp

from .dialects import dialect_of
from .dialects.base import Dialect
from .endpoints import ranks
from .metrics import EventsMetrics
from .settings import EventsSettings
from .subscriber import Subscriber

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Following:
    """What is known here of one followed worker, for pages and tests."""

    worker: Worker
    endpoint: str
    sequence: int | None  # last batch taken
    state: Knowledge | None
    last_event_age_s: float | None


class Subscriptions:
    """All workers this process follows. `up` and `down` may come in any order and twice."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        metrics: EventsMetrics,
        settings: EventsSettings | None = None,
    ) -> None:
        self._store, self._clock, self._metrics = store, clock, metrics
        self._settings = settings or EventsSettings()
        self._context: zmq.asyncio.Context | None = None
        self._pods: dict[Pod, tuple[WorkerUp, tuple[Subscriber, ...]]] = {}
        self._forgetting: dict[Pod, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # one pod's coming and going at a time

    async def start(self) -> None:
        """Nothing to do before the first worker comes."""

    async def stop(self) -> None:
        """Stop following all; the store keeps what it knows."""
        async with self._turn:
            await cancel(*self._forgetting.values())
            self._forgetting.clear()
            followed = [one for _, many in self._pods.values() for one in many]
            self._pods.clear()
            await asyncio.gather(*(one.stop() for one in followed))
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = None

    async def up(self, worker: WorkerUp) -> None:
        """Follow every dp rank of a pod. The same news twice changes nothing; new facts restart.

        A pod whose events cannot be understood or reached by its endpoints is not followed.
        """
        async with self._turn:
            before = self._pods.get(worker.pod)
            if before is not None and _alike(before[0], worker):
                return
            await cancel(self._forgetting.pop(worker.pod, None))
            if before is not None:
                await self._leave(worker.pod, forget=before[0].generation != worker.generation)
            try:
                dialect, places = dialect_of(worker.event_form or worker.engine), ranks(worker)
            except ValueError as error:
                log.error("not followed pod=%s %s", worker.pod, error)
                return
            followed = tuple(
                self._subscriber(worker, rank, events, replay, dialect)
                for rank, (events, replay) in enumerate(places)
            )
            self._pods[worker.pod] = worker, followed
            for one in followed:
                await one.start()
                log.info("following worker=%s endpoint=%s", one.worker, one.endpoint)

    def _subscriber(
        self, up: WorkerUp, rank: int, events: str, replay: str | None, dialect: Dialect
    ) -> Subscriber:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        return Subscriber(
            Worker(up.pod, rank),
            events,
            replay,
            dialect,
            self._store,
            up.model,
            self._clock,
            self._metrics,
            self._settings,
            self._context,
        )

    async def down(self, pod: Pod) -> None:
        """A pod is gone: stop following and clear what it held; unknown pods are ignored."""
        async with self._turn:
            if pod in self._pods:
                await self._leave(pod, forget=True)

    async def _leave(self, pod: Pod, forget: bool) -> None:
        _, followed = self._pods.pop(pod)
        await asyncio.gather(*(one.stop() for one in followed))
        workers = {one.worker: one.epoch for one in followed}
        if not forget or await self._forget(workers):
            return
        log.warning("store down, to be cleared later pod=%s", pod)
        self._forgetting[pod] = asyncio.create_task(self._forget_later(workers))

    async def _forget(self, workers: Mapping[Worker, Epoch]) -> bool:
        """Only the lives that were followed here: another ingest may have begun the next one."""
        try:
            for worker, epoch in workers.items():
                position = await self._store.position(worker)
                if position is not None and epoch in (0, position.epoch):
                    await self._store.forget(worker, position.epoch)
                    log.info("cleared worker=%s reason=gone", worker)
        except StoreDown as error:
            self._metrics.store_errors.inc()
            log.warning("not cleared yet workers=%d %s", len(workers), error)
            return False
        return True

    async def _forget_later(self, workers: Mapping[Worker, Epoch]) -> None:
        waits = backoff(self._settings.store_retry_s, most_s=self._settings.store_retry_most_s)
        while not await self._forget(workers):  # gone is gone: until the store hears it, or stop
            await self._clock.sleep(next(waits))

    def following(self) -> tuple[Following, ...]:
        """Who is followed now, in order of pods and ranks."""
        now = self._clock.now()
        return tuple(
            Following(
                one.worker,
                one.endpoint,
                one.sequence,
                one.state,
                None if one.last_event is None else now - one.last_event,
            )
            for _, followed in self._pods.values()
            for one in followed
        )


def _alike(old: WorkerUp, new: WorkerUp) -> bool:
    """Nothing changed that matters for events."""
    names = ("url", "engine", "event_form", "model", "events", "replay", "dp_size", "generation")
    return all(getattr(old, name) == getattr(new, name) for name in names)

"""Subscriptions: one subscriber per living worker; the dead are cleared.

Edge: starts and stops subscribers as discovery says, and keeps this ingest's sign of life in the
store. Made by kvplane/plane.py. Open it to change what follows from a pod that comes, changes or
goes, or from a store that threw something away.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import zmq.asyncio

from kvplane.index import Store, StoreDown
from kvplane.runtime import Clock, backoff, cancel, supervise
from kvplane.vocabulary import Epoch, Knowledge, Pod, Worker, WorkerUp

from .metrics import EventsMetrics
from .patience import Outage
from .places import Place, alike, another_life, places_of
from .pulse import Pulse
from .settings import EventsSettings
from .sockets import roomy
from .states import State
from .subscriber import Subscriber

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Following:
    """What is known here of one followed worker, for pages and tests."""

    worker: Worker
    endpoint: str
    sequence: int | None  # last batch taken
    state: Knowledge | None  # as the store was told
    last_event_age_s: float | None
    stream: State = State.DARK
    reason: str = ""


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
        self.ingest = secrets.token_hex(4)  # signs what is told; a new one in each life
        self._context: zmq.asyncio.Context | None = None
        self._pods: dict[Pod, tuple[WorkerUp, tuple[Subscriber, ...]]] = {}
        self._forgetting: dict[Pod, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # one pod's coming and going at a time
        self._replays = asyncio.Semaphore(self._settings.replays_at_once)
        self._evicted: int | None = None  # keys the store threw away, when last asked
        self._heard = True  # the last sign of life was taken
        self._outage = Outage()
        self._pulse = Pulse(self._settings.linger_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Say that we live, from now on; workers come later."""
        log.info("what is told here is signed ingest=%s", self.ingest)
        for name, work in (("beat", self._beat), ("evictions", self._watch)):
            task = asyncio.create_task(supervise(f"events {name}", work, self._clock))
            self._tasks.append(task)

    async def stop(self) -> None:
        """Stop following all; the store keeps what it knows, and hears that we left."""
        async with self._turn:
            await cancel(*self._tasks, *self._forgetting.values())
            self._tasks.clear()
            self._forgetting.clear()
            followed = [one for _, many in self._pods.values() for one in many]
            self._pods.clear()
            await asyncio.gather(*(one.stop() for one in followed))
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = None
        await self._sign(0)

    async def _beat(self) -> None:
        while True:
            await self._sign(self._settings.beat_ttl_s)
            # one asks often whether the store is back, so that all others may ask seldom
            pause = self._settings.beat_s if self._heard else self._settings.outage_check_s
            await self._clock.sleep(pause)

    async def _sign(self, ttl_s: float) -> None:
        """One sign of life; a store that is down is no reason to end."""
        try:
            async with asyncio.timeout(self._settings.beat_ttl_s):
                await self._store.beat(self.ingest, ttl_s)
        except (StoreDown, TimeoutError) as error:
            self._metrics.beats.labels("failed").inc()
            if self._heard:  # once, until one is taken again
                log.warning("no sign of life given ingest=%s %s", self.ingest, error)
            self._heard = False
        else:
            self._metrics.beats.labels("heard").inc()
            if not self._heard:
                self._outage.end()
                log.info("signs of life are given again ingest=%s", self.ingest)
            self._heard = True

    async def _watch(self) -> None:
        """A store that evicts keys has lost something of somebody: nothing in it is believed."""
        while True:
            try:
                evicted = await self._store.evicted()
            except StoreDown:
                self._metrics.store_errors.inc()
            else:
                before, self._evicted = self._evicted, evicted
                if before is not None and evicted != before:
                    self._distrust(evicted)
            await self._clock.sleep(self._settings.evicted_check_s)

    def _distrust(self, evicted: int) -> None:
        self._metrics.evictions.inc()
        log.error("store evicts keys so_far=%d action=read all streams again", evicted)
        for _, followed in self._pods.values():
            for one in followed:
                one.distrust("evicted")

    async def up(self, worker: WorkerUp) -> None:
        """Follow every dp rank of a pod. The same news twice changes nothing; new facts restart.

        A pod whose events cannot be understood or reached by its endpoints is not followed.
        """
        async with self._turn:
            before = self._pods.get(worker.pod)
            if before is not None and alike(before[0], worker):
                self._pods[worker.pod] = worker, before[1]
                await asyncio.gather(*(one.sleeps(worker.asleep) for one in before[1]))
                return
            await cancel(self._forgetting.pop(worker.pod, None))
            if before is not None:
                await self._leave(worker.pod, forget=another_life(before[0], worker))
            try:
                places = places_of(worker)
            except ValueError as error:
                log.error("not followed pod=%s %s", worker.pod, error)
                return
            followed = tuple(
                self._subscriber(worker, rank, place) for rank, place in enumerate(places)
            )
            self._pods[worker.pod] = worker, followed
            for one in followed:
                await one.sleeps(worker.asleep)
                await one.start()
                log.info("following worker=%s endpoint=%s", one.worker, one.endpoint)

    def _subscriber(self, up: WorkerUp, rank: int, place: Place) -> Subscriber:
        if self._context is None:
            self._context = roomy(self._settings.sockets)
        return Subscriber(
            Worker(up.pod, rank), place, self._store, self._clock, self._metrics, self._settings,
            self._context, self.ingest, self._replays, self._outage, self._pulse,
        )  # fmt: skip

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
                *one.stream,
            )
            for _, followed in self._pods.values()
            for one in followed
        )

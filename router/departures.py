"""Departures: a deleted worker gets nothing new, finishes what it has, and is forgotten then.

Edge: one task per leaving worker, bounded by a deadline. Stands before discovery's desk for the
admin routes; fleet.py keeps new requests away meanwhile. Open it to change how a worker leaves.

    DELETE   idle: forgotten at once     busy: draining ... its last request ends, or the deadline
    PUT draining false   takes it back before that
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from kvplane.runtime import Clock, cancel
from kvplane.vocabulary import Pod, WorkerUp

from .credentials import Credentials
from .fleet import Fleet, Waited

log = logging.getLogger(__name__)

LOOK_S = 0.1  # between two looks at what a leaving worker still has


class WorkerDesk(Protocol):
    """What the admin routes need of discovery."""

    def add(self, worker: WorkerUp) -> None: ...
    async def remove(self, pod: Pod) -> bool: ...
    def waiting(self) -> Sequence[Waited]: ...
    def named(self) -> Mapping[Pod, WorkerUp]: ...  # as a person named them


class Departures:
    """A desk whose `remove` waits for nobody. A Part."""

    def __init__(
        self,
        desk: WorkerDesk,
        fleet: Fleet,
        clock: Clock,
        drain_s: float,
        credentials: Credentials | None = None,
    ) -> None:
        self._desk, self._fleet, self._clock = desk, fleet, clock
        self._drain_s = drain_s
        self._credentials = credentials if credentials is not None else Credentials()
        self._leaving: dict[Pod, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Nobody leaves yet."""

    async def stop(self) -> None:
        """Wait for nobody any more."""
        await cancel(*self._leaving.values())
        self._leaving.clear()

    def add(self, worker: WorkerUp) -> None:
        """Look for a worker from now on. Raises ValueError for one that is there, also leaving."""
        if worker.pod in self._leaving:
            requests = self._busy(worker.pod)
            raise ValueError(
                f"worker {worker.pod}: is leaving, {requests} requests are under way there; add it "
                'when it is gone, or take it back: PUT {"draining": false}'
            )
        self._desk.add(worker)  # it asks in another turn of the loop, with the key of below
        self._credentials.learn(worker.pod, worker.url, worker.api_key)

    def change_key(self, pod: Pod, key: str) -> None:
        """Another key of its own, from the next request on; "" = none."""
        waiting = [one.declared for one in self._desk.waiting()]
        for up in [*waiting, *self._fleet.pods()]:
            if up.pod == pod:
                self._credentials.learn(pod, up.url, key)

    def waiting(self) -> Sequence[Waited]:
        """Workers that do not serve yet."""
        return self._desk.waiting()

    def named(self) -> Mapping[Pod, WorkerUp]:
        """All workers as a person named them."""
        return self._desk.named()

    def leaving(self, pod: Pod) -> bool:
        """Was it deleted, and still has requests?"""
        return pod in self._leaving

    async def remove(self, pod: Pod) -> bool:
        """Forget a worker: now where it is idle, else when its last request ended."""
        if pod in self._leaving:
            return True
        if not self._busy(pod):
            return await self._forget(pod)
        self._fleet.drain(pod)
        task = asyncio.create_task(self._see_off(pod), name=f"leaving {pod}")
        self._leaving[pod] = task
        task.add_done_callback(lambda _: self._leaving.pop(pod, None))
        return True

    async def take_back(self, pod: Pod) -> None:
        """It stays after all."""
        await cancel(self._leaving.get(pod))

    async def _see_off(self, pod: Pod) -> None:
        deadline = self._clock.now() + self._drain_s
        while (busy := self._busy(pod)) and self._clock.now() < deadline:
            await self._clock.sleep(LOOK_S)
        if busy:
            log.warning("worker not drained pod=%s requests=%d action=forget", pod, busy)
        await self._forget(pod)

    async def _forget(self, pod: Pod) -> bool:
        self._credentials.forget(pod)
        self._fleet.drains.forget(pod)
        return await self._desk.remove(pod)

    def _busy(self, pod: Pod) -> int:
        targets = self._fleet.targets()
        return sum(t.inflight_requests for t in targets if t.worker.pod == pod)

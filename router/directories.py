"""Directories: can a decode find each prefill where its bootstrap triple points?

Edge, over bootstrap's client. The roof calls up and down as discovery does; the fleet hears what
was seen. Open it to change how often a rank directory is looked at, or which failures count.

    up --> lost: not looked at yet --look ok--> found, in the shape its ranks registered
             ^                                    |   a look at intervals
             +---- failures in a row, each named --+   by stage and host:port

One look is out per address, whoever waits for it; an address that fails is asked ever more seldom.
A prefill that is lost gets no requests: they would only wait for a meeting that cannot be. So is
one whose directory is elsewhere: what answers where it was named is another prefill's.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvplane.bootstrap import Address, BootstrapError, Silent, Topology
from kvplane.runtime import Clock, backoff, cancel, supervise
from kvplane.vocabulary import Generation, Pod, Role, Shape, Stage, WorkerUp

from .facts import BOOTSTRAP_PORT
from .fleet import Fleet
from .handoffs import HANDOFFS, way
from .settings import WatchSettings
from .target import Lost, bootstrap_host

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Elsewhere(BootstrapError):
    """Somebody else's directory answers where this prefill was named: a decode would look for its
    room among ranks that never heard of it."""

    address: str
    own: int
    stage: Stage = Stage.RESOLVE_TOPOLOGY

    def __str__(self) -> str:
        named = self.address.rpartition(":")[2]
        return (
            f"the rank directory at {self.address} is another engine's: it was named with "
            f"bootstrap port {named}, the engine itself says that its own is {self.own}"
        )


class Asking(Protocol):
    """What is needed of a BootstrapClient."""

    async def topology(
        self, address: str, deadline_s: float | None = None
    ) -> tuple[Topology, Generation | None]: ...


class Directories:
    """One task per prefill. A Part."""

    def __init__(
        self,
        client: Asking,
        fleet: Fleet,
        clock: Clock,
        settings: WatchSettings | None = None,
        on_look: Callable[[str], None] = lambda outcome: None,
    ) -> None:
        self._client, self._fleet, self._clock = client, fleet, clock
        self._settings, self._on_look = settings or WatchSettings(), on_look
        self._tasks: dict[Pod, asyncio.Task[None]] = {}
        self._shapes: dict[Pod, Shape] = {}  # of those that can be found
        self._lines: weakref.WeakValueDictionary[str, asyncio.Lock]
        self._lines = weakref.WeakValueDictionary()  # one look at a time per address

    async def start(self) -> None:
        """Nothing to prepare."""

    async def stop(self) -> None:
        """Look no more."""
        await cancel(*self._tasks.values())
        self._tasks.clear()

    def up(self, worker: WorkerUp) -> None:
        """The fleet has this worker, or new facts of it. A newcomer is lost until it was found."""
        how, pod = HANDOFFS.get(way(worker)), worker.pod
        if worker.role is not Role.PREFILL or how is None or how.directory != "route":
            if (task := self._tasks.pop(pod, None)) is not None:  # it was another engine before
                task.cancel()
                self._shapes.pop(pod, None)
                self._fleet.mark_found(pod, worker.shape)
            return  # no decode looks for it there
        if pod in self._shapes:
            self._fleet.mark_found(pod, self._shapes[pod])
        else:
            where = f"{bootstrap_host(worker)}:{worker.bootstrap_port or BOOTSTRAP_PORT}"
            not_yet = f"the rank directory at {where} was not looked at yet"
            self._fleet.mark_lost(pod, Lost(Stage.RESOLVE_TOPOLOGY, not_yet))
        if (before := self._tasks.get(pod)) is not None:
            before.cancel()
        work = supervise(f"directory {pod}", lambda: self._watch(worker), self._clock)
        self._tasks[pod] = asyncio.create_task(work, name=f"directory {pod}")

    async def down(self, pod: Pod) -> None:
        """The fleet has it no more."""
        self._shapes.pop(pod, None)
        await cancel(self._tasks.pop(pod, None))

    async def _watch(self, worker: WorkerUp) -> None:
        settings, failures = self._settings, 0
        waits = self._waits()
        while True:
            try:
                topology, life = await self._look(worker)
            except BootstrapError as error:
                failures += 1
                if failures >= settings.failures or worker.pod not in self._shapes:
                    self._lose(worker.pod, error)
                wait = next(waits)
                if not isinstance(error, Silent):
                    wait = min(wait, settings.most_wait_told_s)
            else:
                failures, waits, wait = 0, self._waits(), settings.interval_s
                self._find(worker.pod, topology.shape, life)
            await self._clock.sleep(wait)

    async def _look(self, worker: WorkerUp) -> tuple[Topology, Generation | None]:
        """One question. Raises BootstrapError."""
        outcome = "cancelled"
        try:
            host, port = bootstrap_host(worker), worker.bootstrap_port or BOOTSTRAP_PORT
            address = str(Address.of(host, port))
            line = self._lines.setdefault(address, asyncio.Lock())
            async with line:
                found = await self._client.topology(address, self._settings.deadline_s)
            if worker.own_bootstrap_port not in (None, port) and not _its_own(worker, found[1]):
                raise Elsewhere(address, worker.own_bootstrap_port or 0)
            outcome = "found"
            return found
        except BootstrapError as error:
            outcome = type(error).__name__
            raise
        finally:
            self._on_look(outcome)

    def _lose(self, pod: Pod, error: BootstrapError) -> None:
        self._shapes.pop(pod, None)
        lost = Lost(error.stage, str(error))
        if self._fleet.mark_lost(pod, lost):
            log.warning("prefill lost pod=%s why=%s action=no requests", pod, lost)

    def _find(self, pod: Pod, shape: Shape, life: Generation | None) -> None:
        self._shapes[pod] = shape
        if self._fleet.mark_found(pod, shape):
            log.info("prefill found pod=%s generation=%s", pod, life)

    def _waits(self) -> Iterator[float]:
        return backoff(self._settings.first_wait_s, most_s=self._settings.most_wait_s)


def _its_own(worker: WorkerUp, life: Generation | None) -> bool:
    """Is a directory at another port than the engine tells still its own, behind a forwarded port?
    Its life says so, where both tell theirs; else a host that was named for the directory alone."""
    if life is not None and worker.generation is not None and worker.engine == "kvplane":
        return life == worker.generation
    return worker.bootstrap_host is not None

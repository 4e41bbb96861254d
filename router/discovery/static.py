"""Static: the workers a person named, found when they answer and watched from then on.

Edge, member of discovery/. One task per worker: probe until it lives, then look at intervals. Also
the hand of the admin routes: add() and remove() at runtime. Open it to change how a named worker
is found, watched, or seen to have restarted.

    declared --probe ok--> up --interval--> well?  -> on_health
                            |               another generation -> down, up      facts -> up again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import aiohttp

from kvplane.runtime import Clock, backoff, cancel, supervise
from kvplane.vocabulary import Pod, WorkerUp

from ..settings import ProbeSettings
from .base import OnDown, OnHealth, OnUp, Waiting, another_life, tell
from .probe import Probed, ProbeFailed, alive, probe

log = logging.getLogger(__name__)


class Static:
    """Named workers. A Part; start() returns at once, whoever is down."""

    def __init__(
        self,
        workers: Iterable[WorkerUp],
        session: aiohttp.ClientSession,
        clock: Clock,
        on_up: OnUp,
        on_down: OnDown,
        on_health: OnHealth | None = None,
        settings: ProbeSettings | None = None,
    ) -> None:
        self._first = tuple(workers)
        self._session, self._clock = session, clock
        self._on_up, self._on_down = on_up, on_down
        self._on_health = on_health
        self._settings = settings or ProbeSettings()
        self._together = asyncio.Semaphore(self._settings.together)
        self._tasks: dict[Pod, asyncio.Task[None]] = {}
        self._up: dict[Pod, WorkerUp] = {}  # told, and not taken back
        self._waiting: dict[Pod, Waiting] = {}
        self._named: dict[Pod, WorkerUp] = {}  # as a person did

    async def start(self) -> None:
        """Begin to look for all of them."""
        for worker in self._first:
            self.add(worker)

    async def stop(self) -> None:
        """Look no more. Nobody is told down: the process ends, the engines do not."""
        await cancel(*self._tasks.values())
        self._tasks.clear()

    def add(self, worker: WorkerUp) -> None:
        """Look for a worker from now on. Raises ValueError for a pod or URL that is already there:
        one engine under two names would get twice its load, and its key from whoever came last."""
        if worker.pod in self._tasks:
            raise ValueError(f"worker {worker.pod}: is already there")
        for pod, other in self._named.items():
            if other.url == worker.url:
                raise ValueError(f"worker {worker.pod}: {other.url} is already there as {pod}")
        self._named[worker.pod] = worker
        self._waiting[worker.pod] = Waiting(worker, "not asked yet")
        follow = supervise(f"worker {worker.pod}", lambda: self._follow(worker), self._clock)
        self._tasks[worker.pod] = asyncio.create_task(follow, name=f"worker {worker.pod}")

    async def remove(self, pod: Pod) -> bool:
        """Forget a worker. False where it was not there."""
        task = self._tasks.pop(pod, None)
        await cancel(task)
        self._waiting.pop(pod, None)
        self._named.pop(pod, None)
        await self._tell_down(pod)
        return task is not None

    def named(self) -> dict[Pod, WorkerUp]:
        """All of them as a person named them, whatever they say of themselves."""
        return dict(self._named)

    def waiting(self) -> tuple[Waiting, ...]:
        """Workers that do not serve yet."""
        return tuple(self._waiting[pod] for pod in sorted(self._waiting))

    async def _follow(self, declared: WorkerUp) -> None:
        found = await self._find(declared)
        while True:
            await self._tell_up(found.up)
            found = await self._watch(declared, found)

    async def _find(self, declared: WorkerUp) -> Probed:
        """Ask until it answers."""
        settings = self._settings
        for wait in backoff(settings.first_wait_s, most_s=settings.most_wait_s):
            try:
                return await self._probe(declared)
            except ProbeFailed as error:
                if self._waiting.get(declared.pod, Waiting(declared, "")).reason != str(error):
                    log.info("worker does not serve yet pod=%s reason=%s", declared.pod, error)
                self._waiting[declared.pod] = Waiting(declared, str(error), error.stage)
            await self._clock.sleep(wait)
        raise AssertionError("backoff is endless")

    async def _watch(self, declared: WorkerUp, found: Probed) -> Probed:
        """Look at intervals until the engine says something new about itself."""
        well = settled = True
        while True:
            wait = self._settings.interval_s
            await self._clock.sleep(wait if settled else min(wait, self._settings.again_s))
            was_well = well
            well, settled = await self._look(found.up)
            if not well:
                continue
            if not (found.pending or found.changing or not was_well):
                continue  # nothing to learn from an engine that never went away
            try:
                again = await self._probe(declared)
            except ProbeFailed:
                continue  # the next look tells
            if again.pending or again == found:
                continue
            return again

    async def _look(self, worker: WorkerUp) -> tuple[bool, bool]:
        """Is it well, and is there no reason to look again soon?"""
        reason = ""
        try:
            async with self._together:
                await alive(self._session, worker, self._settings)
        except ProbeFailed as error:
            reason = str(error)
        if self._on_health is None:
            return not reason, not reason
        settled = await tell(self._on_health, worker.pod, not reason, reason)
        return not reason, bool(settled)

    async def _probe(self, declared: WorkerUp) -> Probed:
        async with self._together:
            before = self._up.get(declared.pod)
            return await probe(self._session, declared, self._settings, before)

    async def _tell_up(self, worker: WorkerUp) -> None:
        before = self._up.get(worker.pod)
        if before is not None and another_life(before, worker):
            log.info("worker restarted pod=%s action=down-and-up", worker.pod)
            await self._tell_down(worker.pod)
        self._up[worker.pod] = worker
        self._waiting.pop(worker.pod, None)
        log.info(
            "worker up pod=%s role=%s engine=%s model=%s block_size=%s events=%d",
            *(worker.pod, worker.role, worker.engine, worker.model or "?"),
            *(worker.block_size, len(worker.events)),
        )
        await tell(self._on_up, worker)

    async def _tell_down(self, pod: Pod) -> None:
        if self._up.pop(pod, None) is not None:
            log.info("worker down pod=%s", pod)
            await tell(self._on_down, pod)

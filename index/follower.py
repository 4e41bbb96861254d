"""Follower: a fresh view of the store, kept fresh.

Edge: snapshot, then the stream's tail, into the view that router and api ask. Open it to change
what happens when the store is away or the stream has moved on.

    snapshot -> a new view, in the background -> tail up to the snapshot's end -> swapped in whole
    StoreDown     the view stays and ages; go on from the same cursor when the store is back
    CursorGone    the stream moved on without us: snapshot again; the old view serves meanwhile
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvplane.runtime import Clock, backoff, cancel, supervise
from kvplane.vocabulary import Cursor

from .errors import CursorGone, StoreDown
from .view import View

if TYPE_CHECKING:
    from .metrics import IndexMetrics
    from .stores.base import Entry, Store

log = logging.getLogger(__name__)

IDLE_S = 0.1  # a read that takes longer than this waits for news: we are at the end
SWEEP_S = 1.0  # how often void bits are looked for beside what apply wipes itself
BREATH = 64  # entries applied before other tasks get their turn
NOWHERE = Cursor("")


class Follower:
    """Keeps one view; a Part. `ready` is set once the view equals the store, and stays set."""

    def __init__(
        self, store: Store, view: View, clock: Clock, metrics: IndexMetrics | None = None
    ) -> None:
        self.ready = asyncio.Event()
        self.cursor = NOWHERE  # what the view is true at
        self._store, self._view, self._clock, self._metrics = store, view, clock, metrics
        self._at = NOWHERE  # where to tail from: ahead of `cursor` while a new view is built
        self._down_since: float | None = None  # monotonic
        self._late_ms = 0.0  # age of the last entry when it was applied
        self._asked = 0.0  # monotonic; when the read we wait for began
        self._tasks: list[asyncio.Task[None]] = []
        if metrics:
            metrics.watch(view, self.lag_ms)

    async def start(self) -> None:
        """Begin to follow; wait for `ready` to have a view."""
        for name, work in (("follow", self._follow), ("sweep", self._sweep)):
            task = asyncio.create_task(supervise(f"index {name}", work, self._clock))
            self._tasks.append(task)

    async def stop(self) -> None:
        """The view stays as it is."""
        await cancel(*self._tasks)
        self._tasks.clear()

    def lag_ms(self) -> float:
        """How old the view's knowledge of the store is."""
        now = self._clock.now()
        if self._down_since is not None:
            return self._late_ms + (now - self._down_since) * 1000
        return 0.0 if now - self._asked > IDLE_S else self._late_ms

    def down_s(self) -> float:
        """How long the store has been away; 0 while it answers."""
        return 0.0 if self._down_since is None else self._clock.now() - self._down_since

    async def _follow(self) -> None:
        waits = backoff(0.05, most_s=2.0)
        while True:
            try:
                await self._read()
            except CursorGone as error:
                self._count("cursor_gone")
                log.warning("stream moved on why=%s action=snapshot", error)
                self._at = NOWHERE
            except StoreDown as error:
                self._count("down")
                if self._down_since is None:
                    self._down_since, waits = self._clock.now(), backoff(0.05, most_s=2.0)
                    log.warning("store down why=%s action=keep the view and retry", error)
            await self._clock.sleep(next(waits))

    async def _read(self) -> None:
        """Follow until something goes wrong."""
        fresh, goal = None, self._at
        if self._at == NOWHERE:
            snapshot = await self._store.snapshot()
            fresh, goal, self._at = View(), snapshot.until, snapshot.cursor
            fresh.load(snapshot)
        else:
            await self._store.head()  # answers: the store is back
        self._back()
        if fresh is not None and self._store.reached(self._at, goal):
            self._swap(fresh)
            fresh = None
        self._asked = self._clock.now()
        try:
            async with aclosing(self._store.tail(self._at)) as entries:
                count = 0
                async for entry in entries:
                    self._take(entry, fresh if fresh is not None else self._view)
                    if fresh is None:
                        self.cursor = entry.cursor
                    elif self._store.reached(entry.cursor, goal):
                        self._swap(fresh)
                        fresh = None
                    count += 1
                    if count % BREATH == 0:
                        await asyncio.sleep(0)
        finally:
            if fresh is not None:
                self._at = NOWHERE  # half-built: begin again
        raise StoreDown("stream", "the tail ended")

    def _take(self, entry: Entry, view: View) -> None:
        for change in entry.changes:
            view.apply(change)
        view.note(entry.worker, entry.epoch, entry.last, entry.at)
        self._at = entry.cursor
        self._asked = self._clock.now()
        self._late_ms = max(0.0, (self._clock.wall() - entry.at) * 1000)
        if self._metrics:
            self._metrics.entries.inc()

    def _swap(self, fresh: View) -> None:
        self._view.become(fresh)
        self.cursor = self._at
        self.ready.set()
        if self._metrics:
            self._metrics.snapshots.inc()
        log.info("snapshot loaded workers=%d cursor=%s", len(self._view.workers()), self.cursor)

    def _back(self) -> None:
        if self._down_since is not None:
            log.info("store is back after_s=%.1f", self.down_s())
        self._down_since = None

    def _count(self, kind: str) -> None:
        if self._metrics:
            self._metrics.store_errors.labels(kind).inc()

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(SWEEP_S)
            while self._view.sweep():  # noqa: ASYNC110 - a pause, not a wait
                await asyncio.sleep(0)

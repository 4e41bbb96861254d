"""Broadcast: the change stream of one process, read from the store once and told to many.

Edge: a Part. It follows the store's tail into ring.py while anybody listens, and hands out readers
(reader.py). Nothing is queued for a reader, so a slow one costs no memory, and their number is
none of the store's business. Open it to change when the store is followed, or how many may read.

    store --one tail--> ring <--each at its own pace-- readers --> api.py --> clients
      ^---- tails of the few readers that are older than the ring ----'
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from prometheus_client import CollectorRegistry, Counter, Gauge

from kvplane.index import CursorGone, Store, StoreDown
from kvplane.runtime import Clock, SystemClock, backoff, cancel, supervise
from kvplane.vocabulary import Cursor

from .errors import EventsError
from .reader import Reader
from .ring import Ring
from .settings import EventsSettings

log = logging.getLogger(__name__)

_BREATH = 64  # entries taken before other tasks get their turn


@dataclass(eq=False)
class TooMany(EventsError):
    """No place is free now. Ask again in `again_s`; the cursor stays good meanwhile."""

    what: str
    again_s: int

    def __str__(self) -> str:
        return f"{self.what}; ask again in {self.again_s} s"


class ChangesMetrics:
    """Names: kvplane_events_changes_<thing>."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvplane_events_changes_{name}", text, labels, registry=registry)

        self.sent = count("sent_total", "Changes handed to readers of the change stream")
        self.behind = count("behind_total", "Times a reader was older than what is kept ready")
        self.refused = count("refused_total", "Readers that found no place", "reason")
        self.gone = count("gone_total", "Times the stream moved on without us, readers with it")
        text = "Readers of the change stream now"
        self.readers = Gauge("kvplane_events_changes_readers", text, registry=registry)
        text = "Age of the oldest change that some reader has not taken yet"
        self.lag = Gauge("kvplane_events_changes_lag_seconds", text, registry=registry)


class Broadcast:
    """One tail of the store for all readers; begun by the first, ended some time after the last."""

    def __init__(
        self,
        store: Store,
        clock: Clock | None = None,
        settings: EventsSettings | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.store, self.settings = store, settings or EventsSettings()
        self.metrics = ChangesMetrics(registry or CollectorRegistry())
        self.ring = self._new_ring()
        self.behind = asyncio.Semaphore(self.settings.changes_behind)
        self.closed = False
        self._clock: Clock = clock or SystemClock()
        self._readers: set[Reader] = set()
        self._grown = asyncio.Event()  # set and replaced at each entry
        self._tasks: list[asyncio.Task[None]] = []  # the last one follows; others are ending
        self._retiring: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[object] | None = None
        self.metrics.readers.set_function(lambda: len(self._readers))
        self.metrics.lag.set_function(self.lag_s)

    def _new_ring(self) -> Ring:
        return Ring(self.store, self.settings.changes_entries, self.settings.changes_bytes)

    async def start(self) -> None:
        """Nothing yet: the store is followed when somebody reads."""

    async def stop(self) -> None:
        """Readers end; begun after the door it is behind, so that no answer holds that open."""
        self.closed = True
        self._stay()
        self._wake()
        await cancel(*(cast("asyncio.Task[object]", task) for task in self._tasks), self._asking)

    async def join(self, after: Cursor | None) -> Reader:
        """A reader of what follows a cursor, or of what happens from now on; `leave` ends it.

        Raises TooMany, CursorGone or StoreDown.
        """
        if self.closed:
            raise StoreDown("change stream", "it was closed")
        most = self.settings.changes_readers
        if len(self._readers) >= most:
            self.metrics.refused.labels("readers").inc()
            raise TooMany(f"{most} readers follow here, and no more may", 5)
        reader = Reader(self)
        self._readers.add(reader)
        try:
            await reader.begin(after)
        except BaseException:
            await self.leave(reader)
            raise
        return reader

    async def leave(self, reader: Reader) -> None:
        """This reader goes; whatever it had is free."""
        self._readers.discard(reader)
        if not self._readers and not self.closed:
            self._stay()
            loop = asyncio.get_running_loop()
            self._retiring = loop.call_later(self.settings.changes_linger_s, self._retire)
        await reader.close()

    def lag_s(self) -> float:
        """How far the slowest reader is behind what is kept ready, or behind in the store."""
        waits = [at for one in self._readers if (at := one.waiting_since()) is not None]
        return max(0.0, self._clock.wall() - min(waits)) if waits else 0.0

    # -- what readers ask --------------------------------------------------------------------

    async def followed(self) -> None:
        """The store is followed from here on; returns when it is, or does not answer."""
        self._stay()
        self._tasks = [task for task in self._tasks if not task.done()]
        if not self.ring.followed:
            self.ring.followed = True
            work = partial(self._follow, self.ring)
            self._tasks.append(asyncio.create_task(supervise("changes", work, self._clock)))
        if not self.ring.life:
            await self.news(self.settings.changes_wait_s)

    async def now(self) -> Cursor:
        """The store's end; asked once for all who ask at the same time."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._head())
            self._asking.add_done_callback(lambda asked: asked.cancelled() or asked.exception())
        return cast("Cursor", await asyncio.shield(self._asking))

    async def news(self, wait_s: float) -> None:
        """Returns when the ring has grown, the stream moved on or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._grown.wait()

    async def may_be_behind(self) -> None:
        """One of the few places of readers that are older than the ring; TooMany without one."""
        self.metrics.behind.inc()
        try:
            async with asyncio.timeout(self.settings.changes_wait_s):
                await self.behind.acquire()
        except TimeoutError:
            self.metrics.refused.labels("behind").inc()
            most = self.settings.changes_behind
            raise TooMany(f"{most} readers with older cursors are catching up", 1) from None

    # -- the store's tail --------------------------------------------------------------------

    async def _head(self) -> object:
        return await self.store.head()

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()

    async def _follow(self, ring: Ring) -> None:
        """Into the ring for ever. A store that is away is waited for: readers only hear nothing."""
        waits, why, down = backoff(0.05, most_s=2.0), "", False
        while True:
            try:
                if not ring.life or why:
                    ring.begin(await self.store.head(), why)
                    why = ""
                    self._wake()
                count = 0
                async with aclosing(self.store.tail(ring.head)) as entries:
                    async for entry in entries:
                        ring.add(entry)
                        self._wake()
                        if count % _BREATH == 0:
                            waits, down = backoff(0.05, most_s=2.0), False
                            await asyncio.sleep(0)
                        count += 1
            except CursorGone as error:
                self.metrics.gone.inc()
                why = error.reason
                log.warning("stream moved on why=%s action=readers begin again", error)
            except StoreDown as error:
                if not down:
                    log.warning("store down why=%s action=retry, readers wait", error)
                down = True
            await self._clock.sleep(next(waits))

    def _stay(self) -> None:
        if self._retiring is not None:
            self._retiring.cancel()
            self._retiring = None

    def _retire(self) -> None:
        """Nobody listens any more: nothing is followed or kept. The next reader begins a new one;
        what the old task may still add goes into its own, which nobody reads."""
        if self._readers:
            return
        for task in self._tasks:
            task.cancel()
        self.ring = self._new_ring()

"""Unit: one dp rank: its pages, its cache, its voice, its ranks.

Edge, on the event loop. prefill.py, decode.py and sequence.py work with leases it hands out. Open
it to change who gets pages first, or when the world is told.

    lease: pages at once, or in line (first come first served) until somebody gives back
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from .cache import Cache, Lease
from .compute import Compute
from .errors import BadRequest, Overloaded
from .metrics import EngineMetrics
from .model import PAGE_TOKENS, Context, Model
from .publisher import Publisher
from .settings import EngineSettings
from .team import Team

Wanted = tuple[Sequence[int], int, str]  # tokens, room for more, salt


class Unit:
    """What one dp rank is made of; everything but `compute` and `model` is its own."""

    def __init__(
        self,
        dp_rank: int,
        settings: EngineSettings,
        model: Model,
        compute: Compute,
        publisher: Publisher,
        metrics: EngineMetrics,
    ) -> None:
        self.dp_rank = dp_rank
        self.model, self.compute, self.publisher = model, compute, publisher
        self.pool = model.pool(settings.blocks)
        self.cache = Cache(settings.blocks, PAGE_TOKENS, settings.event_form)
        self.team: Team | None = None  # network.py, where the role needs one
        self._settings, self._metrics = settings, metrics
        self._line: deque[tuple[Wanted, asyncio.Future[Lease]]] = deque()

    async def lease(
        self,
        tokens: Sequence[int],
        room: int,
        salt: str = "",
        meanwhile: AbstractAsyncContextManager[None] | None = None,
    ) -> Lease:
        """Pages for a sequence; waits in line. Raises Overloaded, or BadRequest for too much.

        `meanwhile` is entered only if it has to wait.
        """
        need = self.cache.pages_for(len(tokens) + room)
        if need > self.cache.total:
            have = f"{self.cache.total} pages of {PAGE_TOKENS} tokens are all there are"
            raise BadRequest("prompt", f"{len(tokens)} + {room} tokens need {need} pages; {have}")
        lease = None if self._line else self.cache.lease(tokens, room, salt)
        if lease is None:
            lease = await self._waited((tokens, room, salt), meanwhile or nullcontext())
        self.tell()
        return lease

    def give_back(self, lease: Lease) -> None:
        """The sequence is over; safe to call twice."""
        self.cache.give_back(lease)
        self._serve_line()

    def quarantine(self, lease: Lease, pages: Sequence[int]) -> None:
        """The sequence failed and these pages may still be hit by late bytes."""
        self.cache.quarantine(lease, pages)
        self._serve_line()

    def unquarantine(self, pages: Iterable[int]) -> None:
        """No late byte can hit these pages any more."""
        self.cache.unquarantine(pages)
        self._serve_line()

    def computed(self, lease: Lease, tokens: int) -> None:
        """The first so many tokens have their KV; full blocks are published."""
        self.cache.computed(lease, tokens)
        self.tell()

    def tell(self) -> None:
        """Publish what the cache did since the last time."""
        self.publisher.publish(self.cache.drain())

    async def open(self, lease: Lease, held: int) -> Context:
        """Take up a sequence whose first `held` tokens lie in its pages."""
        return await self.compute.run(self.model.open, self.pool, lease.pages, held)

    def measure(self) -> None:
        """Set the gauges; called when metrics are read."""
        pages, rank = self.cache.pages(), str(self.dp_rank)
        for state in ("free", "used", "quarantined"):
            self._metrics.pages.labels(rank, state).set(getattr(pages, state))
        self._metrics.evicted.labels(rank).set(self.cache.evicted_blocks)
        self._metrics.waiting.labels(rank).set(len(self._line))

    async def _waited(self, wanted: Wanted, meanwhile: AbstractAsyncContextManager[None]) -> Lease:
        lease: Lease | None = None
        try:
            async with meanwhile:
                lease = await self._in_line(wanted)
        except BaseException:
            if lease is not None:  # the pages came, and we were cancelled while `meanwhile` ended
                self.give_back(lease)
            raise
        return lease

    async def _in_line(self, wanted: Wanted) -> Lease:
        if len(self._line) >= self._settings.most_waiting:
            raise Overloaded(f"{len(self._line)} samples wait for pages already")
        entry = wanted, asyncio.get_running_loop().create_future()
        self._line.append(entry)
        try:
            async with asyncio.timeout(self._settings.queue_s):
                return await asyncio.shield(entry[1])
        except BaseException as error:
            self._leave(entry)
            if isinstance(error, TimeoutError):
                raise Overloaded(f"no pages within {self._settings.queue_s:g} s") from error
            raise

    def _leave(self, entry: tuple[Wanted, asyncio.Future[Lease]]) -> None:
        """Out of the line; pages that came in the same moment go back."""
        if entry in self._line:
            self._line.remove(entry)
            entry[1].cancel()
        elif entry[1].done() and not entry[1].cancelled():
            self.give_back(entry[1].result())
        self._serve_line()  # who was behind may fit where this one did not

    def _serve_line(self) -> None:
        while self._line:
            (tokens, room, salt), future = self._line[0]
            lease = self.cache.lease(tokens, room, salt)
            if lease is None:
                return
            self._line.popleft()
            self.tell()  # of what made room: whom it is for may be leaving just now
            future.set_result(lease)

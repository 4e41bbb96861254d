"""Resolver: from an address to the ranks behind it, asked no more often than needed.

Edge, decode side, over client.py; transfer/ asks it for every room. Open it to change how long an
answer is believed, or how soon a directory that failed is asked again.

One call is outstanding per address and question, whoever waits for it; rooms that are asked for
meanwhile go into the next call together. An answer is reused for
`fresh_s` only, so a prefill that came back is not reached on an old port; a new generation drops
everything of its address at once. A failure is repeated from memory until its wait is over; the
waits double. Addresses are whole texts: h:9998 is not h:99980.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvplane.runtime import Clock, SystemClock, backoff, cancel
from kvplane.vocabulary import Generation, Room, Stage

from .client import BootstrapClient, Endpoint
from .errors import BootstrapError, NewLife, RankUnknown, Refused, Silent
from .metrics import BootstrapMetrics
from .settings import ResolverSettings
from .topology import Topology

log = logging.getLogger(__name__)

T = TypeVar("T")
Place = tuple[int, int, int, int]  # dp, cp, tp, pp


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an instance looks like and which life of it said so (None: it does not tell)."""

    topology: Topology
    generation: Generation | None
    checked_at: float  # when the question was sent; monotonic seconds


@dataclass(slots=True)
class _Known:
    """What is remembered of one address."""

    resolved: Resolved | None = None
    ranks: dict[Place, tuple[Endpoint, float]] = field(default_factory=dict)  # and when asked
    failure: BootstrapError | None = None
    again_at: float = 0.0  # not asked before
    waits: Iterator[float] | None = None
    batch: _Batch | None = None  # rooms that the next question will name
    line: asyncio.Lock = field(default_factory=asyncio.Lock)  # one question about rooms at a time


@dataclass(slots=True)
class _Batch:
    """Rooms asked for in one call."""

    rooms: set[Room] = field(default_factory=set)
    task: asyncio.Task[dict[Room, int]] | None = None


class Resolver:
    """Single flight, short memory, backoff after failures. Call `close` at the end."""

    def __init__(
        self,
        client: BootstrapClient,
        clock: Clock | None = None,
        settings: ResolverSettings | None = None,
        metrics: BootstrapMetrics | None = None,
    ) -> None:
        self._client, self._clock = client, clock or SystemClock()
        self._settings, self._metrics = settings or ResolverSettings(), metrics
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._flights: dict[Hashable, asyncio.Task[Any]] = {}
        self._batches: set[asyncio.Task[Any]] = set()

    async def topology(self, address: str) -> Resolved:
        """What the instance behind `address` looks like now.

        Raises a BootstrapError whose `stage` names the step: register while ranks are missing.
        """
        known = self._of(address)
        if known.resolved is not None and self._fresh(known.resolved.checked_at):
            return known.resolved
        self._hold_back(known)
        return await self._flight((address,), lambda: self._ask_topology(address, known))

    async def endpoint(
        self,
        address: str,
        dp: int,
        cp: int,
        tp: int,
        pp: int,
        expected: Generation | None = None,
    ) -> Endpoint:
        """Where one rank listens now; NewLife where the instance is not the `expected` one."""
        known, place = self._of(address), (dp, cp, tp, pp)
        found, asked_at = known.ranks.get(place, (None, 0.0))
        if found is None or not self._fresh(asked_at):
            self._hold_back(known)
            key = (address, place)
            found = await self._flight(key, lambda: self._ask_rank(address, known, place))
        if expected is not None and found.generation not in (None, expected):
            self.forget(address)
            raise NewLife(address, expected, found.generation)
        return found

    async def dp_ranks(self, address: str, rooms: Iterable[Room]) -> dict[Room, int]:
        """Which dp ranks the prefill gave these rooms to; unknown rooms are absent. Not kept."""
        known, asked = self._of(address), tuple(rooms)
        self._hold_back(known)
        batch = known.batch
        if batch is None:
            batch = known.batch = _Batch()
            batch.task = asyncio.create_task(self._ask_rooms(address, known, batch))
            self._batches.add(batch.task)
            batch.task.add_done_callback(self._told)
        batch.rooms.update(asked)
        assert batch.task is not None, "a batch has its task from the start"
        found = await asyncio.shield(batch.task)
        return {room: found[room] for room in asked if room in found}

    def forget(self, address: str) -> None:
        """Ask anew next time; for a caller whose connection to a rank failed."""
        self._known.pop(address, None)
        for key in [key for key in self._flights if isinstance(key, tuple) and key[0] == address]:
            del self._flights[key]  # it runs to its end, but nobody new waits for it

    async def close(self) -> None:
        """End all calls that are still out."""
        await cancel(*self._flights.values(), *self._batches)
        self._flights.clear()

    async def _ask_topology(self, address: str, known: _Known) -> Resolved:
        sent_at = self._clock.now()
        async with _Watched(self, known, Stage.RESOLVE_TOPOLOGY):
            topology, life = await self._client.topology(address, self._settings.topology_s)
        old = known.resolved
        if old is not None and old.generation != life:
            log.info("instance changed address=%s old=%s new=%s", address, old.generation, life)
            known.ranks.clear()
        known.resolved = Resolved(topology, life, sent_at)
        return known.resolved

    async def _ask_rank(self, address: str, known: _Known, place: Place) -> Endpoint:
        sent_at = self._clock.now()
        async with _Watched(self, known, Stage.RESOLVE_RANK):
            found = await self._client.rank(address, *place, self._settings.rank_s)
        if known.resolved is not None and known.resolved.generation != found.generation:
            known.resolved = None  # the topology was another life's
            known.ranks.clear()
        known.ranks[place] = (found, sent_at)
        return found

    async def _ask_rooms(self, address: str, known: _Known, batch: _Batch) -> dict[Room, int]:
        async with known.line:
            known.batch = None  # who comes from now on waits for the next call
            self._hold_back(known)
            async with _Watched(self, known, Stage.RESOLVE_RANK):
                rooms = sorted(batch.rooms)
                return await self._client.dp_ranks(address, rooms, self._settings.rank_s)

    def _told(self, task: asyncio.Task[Any]) -> None:
        self._batches.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where every waiter has left

    async def _flight(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Join the call that is out for `key`, or make it; a waiter that leaves stops nobody."""
        task = self._flights.get(key)
        if task is None:
            task = asyncio.create_task(ask(), name=f"resolve {key}")
            self._flights[key] = task
            task.add_done_callback(lambda done: self._landed(key, done))
        result: T = await asyncio.shield(task)
        return result

    def _landed(self, key: Hashable, task: asyncio.Task[Any]) -> None:
        if self._flights.get(key) is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # seen, also where every waiter has left

    def _of(self, address: str) -> _Known:
        known = self._known.setdefault(address, _Known())
        self._known.move_to_end(address)
        if len(self._known) > self._settings.most_addresses:
            self._known.popitem(last=False)
        return known

    def _fresh(self, asked_at: float) -> bool:
        return self._clock.now() - asked_at < self._settings.fresh_s

    def _hold_back(self, known: _Known) -> None:
        if known.failure is not None and self._clock.now() < known.again_at:
            raise copy.copy(known.failure)

    def _went_well(self, known: _Known) -> None:
        known.failure, known.waits = None, None

    def _failed(self, known: _Known, error: BootstrapError) -> None:
        if isinstance(error, RankUnknown | Refused):
            return  # the directory itself is well
        if known.waits is None:
            settings = self._settings
            known.waits = backoff(settings.first_wait_s, most_s=settings.most_wait_s)
        wait = next(known.waits)
        if not isinstance(error, Silent):
            wait = min(wait, self._settings.most_wait_told_s)
        known.failure, known.again_at = error, self._clock.now() + wait

    def _count(self, stage: Stage, outcome: str, duration_s: float) -> None:
        if self._metrics is not None:
            self._metrics.resolutions.labels(stage.value, outcome).inc()
            self._metrics.resolve_s.labels(stage.value).observe(duration_s)


class _Watched:
    """Around one call: its outcome is counted and remembered for the address."""

    def __init__(self, resolver: Resolver, known: _Known, stage: Stage) -> None:
        self._resolver, self._known, self._stage = resolver, known, stage
        self._began = resolver._clock.now()

    async def __aenter__(self) -> None:
        """Nothing to prepare."""

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._resolver._went_well(self._known)
        elif isinstance(error, BootstrapError):
            self._resolver._failed(self._known, error)
        outcome = "ok" if error is None else type(error).__name__
        took = self._resolver._clock.now() - self._began
        self._resolver._count(self._stage, outcome, took)

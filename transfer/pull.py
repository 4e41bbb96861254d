"""Pull, the decode side: find the prefill, let exactly this room land, and believe nothing.

Edge. The engine calls pull() with pages it reserved; it gets Metadata back only after room,
generation, attempt, counts and page sums agreed. resolve.py finds the prefill's ranks, attempt.py
meets one of them, verifying.py reads and compares. Open it to change what happens around one room.

    resolve-topology, resolve-rank -> landing open (slot poisoned) -> connect: bind -> bound
    -> verify: commit -> slot read once, compared -> verdict -> the caller has the pages
    several prefill ranks: all verified, or the room failed; only then any of them hears a verdict
    any failure: connections closed, landings fenced, and only then released(pages)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvplane.runtime import Clock, backoff, cancel
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape, Stage, StageRecord

from .attempt import Attempt, Side, Wanted, agreed
from .backends.base import Backend
from .errors import PeerGone, Refused, TransferError
from .frames import MOST_REASON, AbortFrame, Frame, VerdictFrame
from .holding import Holder
from .metadata import Layout, Metadata
from .metrics import TransferMetrics
from .quarantine import Quarantine
from .resolve import Rank, Resolver, resolve
from .settings import TransferSettings
from .shards import Grid
from .waiting import Step, Steps, all_of, unless

log = logging.getLogger(__name__)
Released = Callable[[Sequence[int]], None]


def _random63() -> int:
    return secrets.randbelow(2**63 - 1) + 1


class Puller:
    """One per decode rank."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        resolver: Resolver,
        generation: Generation,
        record: Callable[[StageRecord], None],
        clock: Clock,
        settings: TransferSettings,
        metrics: TransferMetrics,
        shape: Shape,
        by: str = "",  # goes into every StageRecord
        random63: Callable[[], int] = _random63,
        tp_rank: int = 0,  # which of the shape's ranks this is
        pp_rank: int = 0,
    ) -> None:
        self._side = Side(backend, layout, generation, settings)
        self._rank = Rank(layout, Grid(shape.tp, shape.pp, tp_rank, pp_rank))
        self._resolver, self._shape = resolver, shape
        self._holder = Holder(resolver, shape, self._rank, clock, settings)
        self._record, self._clock, self._by = record, clock, by
        self._settings, self._metrics, self._random63 = settings, metrics, random63
        self._numbers = itertools.count(1)
        self._open: set[_Pull] = set()
        self._pulls: set[asyncio.Task[Any]] = set()
        self._fences: set[asyncio.Task[None]] = set()
        self.quarantine = Quarantine()

    async def pull(
        self,
        triple: BootstrapTriple,
        pages: Sequence[int],
        tokens: int,
        *,
        deadline_s: float,
        released: Released,
        dp_rank: int | None = None,
        held_pages: int = 0,
        prompt: str = "",
    ) -> Metadata:
        """Fill `pages` with the KV of this room; returns only what was verified.

        `pages` are ours, in prompt order, without the first `held_pages` of the prompt that we hold
        already; `tokens` = prompt tokens, `prompt` = their prompt_sum(), which must be that of
        the prefill unless one does not say. On any failure (cancel included) raises, and the pages
        come back through `released(pages)`, exactly once, as soon as no late byte can hit them:
        before this raises, or later. On success they are the caller's.
        """
        task = asyncio.current_task()
        assert task is not None
        self._pulls.add(task)
        self._metrics.rooms.labels("decode").inc()
        pull = _Pull(next(self._numbers), triple, tuple(pages), tokens, held_pages, prompt)
        self._open.add(pull)
        try:
            metadata = await self._attempt(pull, dp_rank, deadline_s)
        except BaseException as error:
            kind = error.kind if isinstance(error, TransferError) else "other"
            self._metrics.failures.labels("decode", kind).inc()
            self._give_back(pull, released)
            raise
        finally:
            self._metrics.rooms.labels("decode").dec()
            self._pulls.discard(task)
            self._open.discard(pull)
        self._spawn_fence(pull, None)
        return metadata

    @contextlib.asynccontextmanager
    async def holding(
        self, triple: BootstrapTriple, dp_rank: int | None = None
    ) -> AsyncIterator[None]:
        """While inside, the prefill keeps this room's KV: for a request that waits for pages."""
        task = asyncio.create_task(self._holder.keep(triple, dp_rank))
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)  # also where we are cancelled below
        try:
            yield
        finally:
            await cancel(task)

    async def _attempt(self, pull: _Pull, dp_rank: int | None, deadline_s: float) -> Metadata:
        triple = pull.triple
        steps = Steps(triple.room, deadline_s, self._record, self._clock, self._by)
        reach = await resolve(steps, self._resolver, triple, self._shape, self._rank, dp_rank)
        wanted = Wanted(
            triple, pull.pages, pull.tokens, pull.held_pages,
            self._rank.grid.tp_rank % reach.shards, reach.shards, len(reach.sources), pull.prompt,
        )  # fmt: skip
        pull.attempts = [
            Attempt(self._side, self._random63(), wanted, source) for source in reach.sources
        ]
        where = ", ".join(attempt.where for attempt in pull.attempts[:4])
        last: Frame = AbortFrame(reason="the decode gave up")
        try:
            metadata = await unless(self._met(pull, steps, where), pull.lost)
            last = VerdictFrame(ok=True)
            return metadata
        except TransferError as error:
            if error.stage is Stage.CONNECT:
                self._resolver.forget(triple.address)  # it may have moved: ask anew next time
            last = _bad(error)
            raise
        except asyncio.CancelledError:
            if pull.why is not None:  # another rank's failure, said before we were cancelled
                last = _bad(pull.why)
            raise
        finally:
            for attempt in pull.attempts:
                attempt.say(last)

    async def _met(self, pull: _Pull, steps: Steps, where: str) -> Metadata:
        """Bound at all prefill ranks, then verified from all of them."""
        attempts, connect_s = pull.attempts, self._settings.connect_s
        async with steps.stage(Stage.CONNECT, where, "an answer to our bind", connect_s) as step:
            left_s = steps.left_s()
            await all_of(*(_bound(each, step.part(each.shown), left_s) for each in attempts))
        with self._metrics.seconds.labels("decode").time():
            async with steps.stage(Stage.VERIFY, where, "the prefill's commit") as step:
                said = await all_of(*(_landed(each, step.part(each.shown)) for each in attempts))
                return agreed(said)

    def gone(self, address: str, generation: Generation | None, reason: str) -> None:
        """The prefill behind this bootstrap address died or was replaced: its rooms end now."""
        for pull in self._open:
            if pull.triple.address == address:
                pull.lose(PeerGone(f"prefill {address}", reason))

    def give_up(self, room: Room, reason: str) -> None:
        """Another rank of ours failed this room: the prefill ranks we hear are told its reason."""
        for pull in self._open:
            if pull.triple.room == room:
                pull.lose(Refused("decode", reason, Stage.VERIFY))

    def _give_back(self, pull: _Pull, released: Released) -> None:
        """The pages: at once if nothing could ever land, else after the fence."""
        if all(attempt.landing is None for attempt in pull.attempts):
            released(pull.pages)
            return
        self.quarantine.hold(pull.number, pull.pages)
        self._metrics.quarantined.inc(len(pull.pages))
        self._spawn_fence(pull, released)

    def _spawn_fence(self, pull: _Pull, released: Released | None) -> None:
        task = asyncio.create_task(self._fence(pull, released))
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def _fence(self, pull: _Pull, released: Released | None) -> None:
        """Until no late byte can land from any prefill rank; then the pages are free again."""
        await asyncio.gather(*(self._fenced(attempt, pull) for attempt in pull.attempts))
        pages = self.quarantine.release(pull.number)
        self._metrics.quarantined.dec(len(pages))
        if released is not None:
            released(pages)

    async def _fenced(self, attempt: Attempt, pull: _Pull) -> None:
        for wait in backoff(0.1, most_s=self._settings.fence_s):
            try:
                await attempt.fence()
                return
            except TransferError as error:
                room, peer = pull.triple.room, attempt.where
                log.warning(
                    "not fenced room=%d peer=%s why=%r action=again", room, peer, str(error)
                )
                await self._clock.sleep(wait)

    async def close(self) -> None:
        """End every pull; waits for fences, bounded. Does not stop the backend."""
        await cancel(*self._pulls)
        if self._fences:
            await asyncio.wait(self._fences, timeout=self._settings.fence_s)
        await cancel(*self._fences)

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        held = len(self.quarantine)
        return {"pulls": len(self._pulls), "fences": len(self._fences), "quarantined": held}


class _Pull:
    """What one pull is about."""

    def __init__(
        self,
        number: int,
        triple: BootstrapTriple,
        pages: tuple[int, ...],
        tokens: int,
        held: int,
        prompt: str,
    ) -> None:
        self.number, self.triple, self.pages = number, triple, pages
        self.tokens, self.held_pages, self.prompt = tokens, held, prompt
        self.attempts: list[Attempt] = []
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def why(self) -> TransferError | None:
        """What it was lost for."""
        error = self.lost.exception() if self.lost.done() else None
        return error if isinstance(error, TransferError) else None

    def lose(self, error: TransferError) -> None:
        """It cannot succeed any more; the first reason counts."""
        if not self.lost.done():
            self.lost.set_exception(error)
            self.lost.exception()  # whoever waits will see it; nobody must


async def _bound(attempt: Attempt, step: Step, left_s: float) -> None:
    """Agreed to meet; a failure says with whom."""
    try:
        await attempt.bind(step, left_s)
    except TransferError as error:
        attempt.blame(error)
        raise


def _bad(error: TransferError) -> VerdictFrame:
    return VerdictFrame(ok=False, kind=error.kind, reason=error.sentence()[:MOST_REASON])


async def _landed(attempt: Attempt, step: Step) -> Metadata:
    """Verified, unless its data path breaks first; a failure says whose part it was."""
    assert attempt.landing is not None, "bound before"
    try:
        return await unless(attempt.verified(step), attempt.landing.broken)
    except TransferError as error:
        attempt.blame(error)
        raise

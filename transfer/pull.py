"""Pull, the decode side: find the prefill, let exactly this room land, and believe nothing.

Edge. The engine calls pull() with pages it reserved; it gets Metadata back only after room,
generation, attempt, counts and page sums agreed. resolve.py finds the prefill's rank, verifying.py
reads and compares. Open it to change what happens around one room on the decode side.

    resolve-topology, resolve-rank -> landing open (slot poisoned) -> connect: bind -> bound
    -> verify: commit -> slot read once, compared -> verdict -> the caller has the pages
    any failure: connection closed, landing fenced, and only then released(pages)
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence

from kvplane.runtime import Clock, backoff, cancel
from kvplane.vocabulary import BootstrapTriple, Generation, Shape, Stage, StageRecord

from .backends.base import Backend, Landing, Ticket
from .control import Channel, address_text
from .errors import GenerationMismatch, LayoutMismatch, PrefillFailed, Refused, TransferError
from .frames import (
    MOST_REASON,
    PROTOCOL,
    AbortFrame,
    BadFrame,
    BindFrame,
    BoundFrame,
    Frame,
    RefusedFrame,
    VerdictFrame,
)
from .metadata import Expected, Layout, Metadata, record_bytes
from .metrics import TransferMetrics
from .quarantine import Quarantine
from .resolve import Endpoint, Resolver, resolve
from .settings import TransferSettings
from .verifying import verified
from .waiting import Steps, unless

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
    ) -> None:
        self._backend, self._layout, self._resolver = backend, layout, resolver
        self._generation, self._shape = generation, shape
        self._record, self._clock, self._by = record, clock, by
        self._settings, self._metrics, self._random63 = settings, metrics, random63
        self._pulls: set[asyncio.Task[object]] = set()
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
    ) -> Metadata:
        """Fill `pages` with the KV of this room; returns only what was verified.

        `pages` are ours, in prompt order, without the first `held_pages` of the prompt that we hold
        already; `tokens` = prompt tokens. On any failure (cancel included) raises, and the pages
        come back through `released(pages)`, exactly once, as soon as no late byte can hit them:
        before this raises, or later. On success they are the caller's.
        """
        task = asyncio.current_task()
        assert task is not None
        self._pulls.add(task)
        self._metrics.rooms.labels("decode").inc()
        attempt = _Attempt(self._random63(), triple, tuple(pages), tokens, held_pages)
        try:
            metadata = await self._attempt(attempt, dp_rank, deadline_s)
        except BaseException as error:
            kind = error.kind if isinstance(error, TransferError) else "other"
            self._metrics.failures.labels("decode", kind).inc()
            self._give_back(attempt, released)
            raise
        finally:
            self._metrics.rooms.labels("decode").dec()
            self._pulls.discard(task)
        self._spawn_fence(attempt, None)
        return metadata

    async def _attempt(self, attempt: _Attempt, dp_rank: int | None, deadline_s: float) -> Metadata:
        triple = attempt.triple
        steps = Steps(triple.room, deadline_s, self._record, self._clock, self._by)
        [endpoint] = await resolve(steps, self._resolver, triple, self._shape, dp_rank)
        where = address_text(endpoint.host, endpoint.port)
        channel: Channel | None = None
        last: Frame = AbortFrame(reason="the decode gave up")
        try:
            connect_s = self._settings.connect_s
            async with steps.stage(Stage.CONNECT, where, "an answer to our bind", connect_s):
                landing = self._open_landing(attempt, where, steps.left_s())
                channel = await Channel.dial(endpoint.host, endpoint.port)
                prefill = await self._bind(channel, attempt, endpoint)
            with self._metrics.seconds.labels("decode").time():
                async with steps.stage(Stage.VERIFY, where, "the prefill's commit") as step:
                    work = verified(
                        channel, landing, attempt.expected(prefill), self._backend.regions,
                        self._settings.checksums, step,
                    )  # fmt: skip
                    metadata = await unless(work, landing.broken)
            last = VerdictFrame(ok=True)
            return metadata
        except TransferError as error:
            if error.stage is Stage.CONNECT:
                self._resolver.forget(triple.address)  # it may have moved: ask anew next time
            last = VerdictFrame(ok=False, kind=error.kind, reason=str(error)[:MOST_REASON])
            raise
        finally:
            if channel is not None:
                channel.finish(last)

    def _open_landing(self, attempt: _Attempt, where: str, left_s: float) -> Landing:
        ticket = Ticket(
            attempt.number, attempt.triple.room, self._generation, attempt.pages,
            record_bytes(len(attempt.pages)), where,
        )  # fmt: skip
        attempt.landing = self._backend.landing(ticket, left_s)
        return attempt.landing

    async def _bind(self, channel: Channel, attempt: _Attempt, endpoint: Endpoint) -> Generation:
        """Ask for the room; the prefill's generation."""
        bind = BindFrame(
            protocol=PROTOCOL,
            room=attempt.triple.room,
            attempt=attempt.number,
            expected=endpoint.generation,
            generation=self._generation,
            layout=self._layout,
            offer=self._backend.offer(),
            pages=attempt.pages,
            tokens=attempt.tokens,
            aux_bytes=record_bytes(len(attempt.pages)),
            held_pages=attempt.held_pages,
            sums=self._settings.checksums,
        )
        channel.post(bind)
        await channel.drain(Stage.CONNECT)
        try:
            answer = await channel.read(stage=Stage.CONNECT)
        except BadFrame as error:
            raise Refused(channel.peer, f"speaks something else: {error}") from error
        if isinstance(answer, BoundFrame):
            return Generation(answer.generation)
        raise _refused(channel.peer, attempt, answer, endpoint)

    def _give_back(self, attempt: _Attempt, released: Released) -> None:
        """The pages: at once if nothing could ever land, else after the fence."""
        if attempt.landing is None:
            released(attempt.pages)
            return
        self.quarantine.hold(attempt.number, attempt.pages)
        self._metrics.quarantined.set(len(self.quarantine))
        self._spawn_fence(attempt, released)

    def _spawn_fence(self, attempt: _Attempt, released: Released | None) -> None:
        task = asyncio.create_task(self._fence(attempt, released))
        self._fences.add(task)
        task.add_done_callback(self._fences.discard)

    async def _fence(self, attempt: _Attempt, released: Released | None) -> None:
        """Until no late byte can land; then the pages are free again."""
        assert attempt.landing is not None
        for wait in backoff(0.1, most_s=self._settings.fence_s):
            try:
                await self._backend.fence(attempt.landing)
                break
            except TransferError as error:
                room = attempt.triple.room
                log.warning("not fenced room=%d why=%r action=try again", room, str(error))
                await self._clock.sleep(wait)
        pages = self.quarantine.release(attempt.number)
        self._metrics.quarantined.set(len(self.quarantine))
        if released is not None:
            released(pages)

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


class _Attempt:
    """What one pull is about."""

    def __init__(
        self, number: int, triple: BootstrapTriple, pages: tuple[int, ...], tokens: int, held: int
    ) -> None:
        self.number, self.triple, self.pages = number, triple, pages
        self.tokens, self.held_pages = tokens, held
        self.landing: Landing | None = None

    def expected(self, prefill: Generation) -> Expected:
        """What the record must say."""
        return Expected(self.triple.room, prefill, self.number, len(self.pages), self.tokens)


def _refused(peer: str, attempt: _Attempt, answer: Frame, endpoint: Endpoint) -> TransferError:
    """The error that an answer other than bound means."""
    room = attempt.triple.room
    if not isinstance(answer, RefusedFrame):
        reason = getattr(answer, "reason", "") or f"sent {type(answer).__name__}"
        return PrefillFailed(peer, room, reason, Stage.CONNECT)
    if answer.kind == LayoutMismatch.kind:
        return LayoutMismatch(peer, answer.fields)
    if answer.kind == GenerationMismatch.kind:
        expected = str(endpoint.generation)
        return GenerationMismatch(expected, answer.reason, peer, Stage.CONNECT)
    if answer.kind == PrefillFailed.kind:
        return PrefillFailed(peer, room, answer.reason, Stage.CONNECT)
    return Refused(peer, answer.reason)

"""Attempt: one decode rank meets one prefill rank for one room: a connection and a landing.

Edge, decode side. pull.py makes one for every prefill rank that has a part of our pages, and ends
them together. Open it to change what is said to one prefill rank, or when it counts as clean.

    dial -> bind -> bound -> (pages and record land) -> commit -> verified -> verdict
    failed: abort or verdict -> `failed` of the prefill says whether anything can still land
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvplane.vocabulary import BootstrapTriple, Generation, Stage

from .backends.base import Backend, Landing, Ticket
from .control import Channel, address_text
from .errors import (
    GenerationMismatch,
    LayoutMismatch,
    LeaseExpired,
    PeerGone,
    PrefillFailed,
    Refused,
    TransferError,
)
from .frames import PROTOCOL, BadFrame, BindFrame, BoundFrame, FailedFrame, Frame, RefusedFrame
from .metadata import Expected, Layout, Metadata, record_bytes
from .resolve import Source
from .settings import TransferSettings
from .verifying import committed, verified
from .waiting import Step


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a room is to bring, to all prefill ranks alike."""

    triple: BootstrapTriple
    pages: tuple[int, ...]  # ours, in prompt order
    tokens: int
    held_pages: int
    shard: int  # which decode rank we are to each prefill rank
    shards: int  # decode ranks that each prefill rank serves
    sources: int  # prefill ranks we hear
    prompt: str = ""  # prompt_sum() of the tokens


@dataclass(frozen=True, slots=True)
class Side:
    """What this decode rank is, in all its rooms."""

    backend: Backend
    layout: Layout
    generation: Generation
    settings: TransferSettings


class Attempt:
    """One prefill rank's part of a room. `number` names the data session and is never reused."""

    def __init__(self, side: Side, number: int, wanted: Wanted, source: Source) -> None:
        self._side, self._wanted, self._source = side, wanted, source
        self.number = number
        self.where = address_text(source.endpoint.host, source.endpoint.port)
        self.landing: Landing | None = None
        self._channel: Channel | None = None
        self._prefill = Generation("")
        self._clean: bool | None = True  # None: not known, only the prefill can tell

    async def bind(self, step: Step, left_s: float) -> None:
        """Open the landing, dial, ask for the room. Raises TransferError of stage connect."""
        wanted, source = self._wanted, self._source
        ticket = Ticket(
            self.number, wanted.triple.room, self._side.generation, wanted.pages,
            record_bytes(len(wanted.pages)), self.where, source.regions,
        )  # fmt: skip
        self.landing = self._side.backend.landing(ticket, left_s)
        self._channel = await Channel.dial(source.endpoint.host, source.endpoint.port)
        self._clean = None
        self._channel.post(self._frame(self.landing))
        await self._channel.drain(Stage.CONNECT)
        try:
            answer = await self._channel.read(stage=Stage.CONNECT)
        except BadFrame as error:
            raise Refused(self.where, f"speaks something else: {error}") from error
        if not isinstance(answer, BoundFrame):
            self._clean = True  # it never let us in
            raise self._refused(answer)
        self._prefill = Generation(answer.generation)
        step.over = True

    async def verified(self, step: Step) -> Metadata:
        """What arrived, once it is known to be ours. Raises TransferError of stage verify."""
        assert self._channel is not None and self.landing is not None, "bind() comes first"
        wanted = self._wanted
        expected = Expected(
            wanted.triple.room, self._prefill, self.number, len(wanted.pages), wanted.tokens
        )
        regions = self._side.backend.regions.select(self._source.regions)
        checksums = self._side.settings.checksums
        try:
            await committed(self._channel, expected)
        except PrefillFailed as error:
            self._clean = error.clean
            raise
        self._clean = True  # whatever is wrong with the bytes, no more of them are under way
        step.waiting_for = "our own checks"
        got = await verified(self.landing, expected, regions, checksums, self._channel.peer)
        step.over = True
        return got

    @property
    def shown(self) -> str:
        """Whom we meet, for sentences."""
        return f"{self._source.name} at {self.where}" if self._source.name else self.where

    def blame(self, error: TransferError) -> None:
        """It began at this prefill rank, and says so from now on."""
        error.part, error.where = self._source.name, self.where

    def say(self, last: Frame) -> None:
        """The last word of ours. Where it matters the connection stays for the prefill's."""
        if self._channel is None:
            return
        if self._clean is None and self._side.backend.one_sided:
            self._channel.post(last)
        else:
            self._channel.finish(last)

    async def fence(self) -> None:
        """Until no late byte can land. Raises Stalled; try again then."""
        if self.landing is None:
            return
        clean = await self._is_clean()
        await self._side.backend.fence(self.landing, clean)

    async def _is_clean(self) -> bool:
        """Has the prefill confirmed that nothing of it is under way? Bounded."""
        if self._clean is None and self._side.backend.one_sided and self._channel is not None:
            try:
                async with asyncio.timeout(self._side.settings.fence_s):
                    while self._clean is None:
                        frame = await self._channel.read()
                        if isinstance(frame, FailedFrame):
                            self._clean = frame.clean
            except (TimeoutError, BadFrame, PeerGone):
                self._clean = False
            self._channel.finish()
        return bool(self._clean)

    def _frame(self, landing: Landing) -> BindFrame:
        side, wanted, source = self._side, self._wanted, self._source
        return BindFrame(
            protocol=PROTOCOL,
            room=wanted.triple.room,
            attempt=self.number,
            expected=source.endpoint.generation,
            generation=side.generation,
            layout=side.layout,
            offer=landing.offer,
            grant=landing.ticket.grant,
            pages=wanted.pages,
            tokens=wanted.tokens,
            aux_bytes=landing.ticket.aux_bytes,
            held_pages=wanted.held_pages,
            sums=side.settings.checksums,
            regions=source.regions,
            shard=wanted.shard,
            shards=wanted.shards,
            sources=wanted.sources,
            prompt=wanted.prompt,
        )

    def _refused(self, answer: Frame) -> TransferError:
        """The error that an answer other than bound means."""
        room, peer = self._wanted.triple.room, self.where
        if not isinstance(answer, RefusedFrame):
            reason = getattr(answer, "reason", "") or f"sent {type(answer).__name__}"
            return PrefillFailed(peer, room, reason, Stage.CONNECT)
        if answer.kind == LayoutMismatch.kind:
            return LayoutMismatch(peer, answer.fields)
        if answer.kind == GenerationMismatch.kind:
            expected = str(self._source.endpoint.generation)
            return GenerationMismatch(expected, answer.reason, peer, Stage.CONNECT)
        if answer.kind == LeaseExpired.kind:
            return Refused(peer, answer.reason, Stage.VERIFY)
        if answer.kind == PrefillFailed.kind:
            return PrefillFailed(peer, room, answer.reason, Stage.CONNECT)
        return Refused(peer, answer.reason)


def agreed(all_said: list[Metadata]) -> Metadata:
    """One record of several prefill ranks; raises TransferError where they differ on the answer."""
    first = all_said[0]
    for other in all_said[1:]:
        if other.first_token != first.first_token:
            said = f"first token {first.first_token} and {other.first_token}"
            raise Refused("prefill", f"its ranks disagree: {said}", Stage.VERIFY)
    return first

"""Delivery: the pages of one room leave, in the order that makes them safe.

Edge, prefill side. Runs when both sides are there; offer.py brings deadline and clean-up. Open it
to change the order, which is the promise:

    sums of our own memory -> pages -> confirmed -> record (its own write) -> confirmed
    -> commit on the control connection -> the decode's verdict
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from kvplane.vocabulary import Generation, Room, Stage

from .backends.base import Backend, Ticket
from .errors import DeadlineExceeded, OtherPrompt, PeerGone, PrefillFailed, ShortData, TransferError
from .meeting import Meeting
from .metadata import Metadata
from .session import Happened
from .settings import TransferSettings
from .tamper import Tamper
from .waiting import Step, page_sums


class Delivery:
    """How this prefill delivers; one for all rooms."""

    def __init__(
        self,
        backend: Backend,
        generation: Generation,
        tamper: Tamper,
        settings: TransferSettings,
    ) -> None:
        self._backend, self._generation = backend, generation
        self._tamper, self._settings = tamper, settings

    async def run(
        self,
        meeting: Meeting,
        pages: Sequence[int],
        metadata: Metadata,
        step: Step,
        left_s: Callable[[], float],
    ) -> None:
        """Return on a good verdict of this decode rank. `step` is told what we wait for."""
        bind = meeting.bind
        room, mine = Room(bind.room), pages[bind.held_pages :]
        if len(mine) != len(bind.pages):
            raise ShortData(f"pages reserved by {meeting.peer}", len(mine), len(bind.pages))
        said_both = "" not in (bind.prompt, metadata.prompt) and bind.tokens == metadata.tokens
        if said_both and bind.prompt != metadata.prompt:  # other counts: the decode will say so
            raise OtherPrompt(meeting.peer)
        await self._disturb(meeting)
        regions = self._backend.regions.select(bind.regions)
        sums = await page_sums(regions, mine) if bind.sums else ()
        said = dataclasses.replace(
            metadata, room=room, generation=self._generation, pages=len(mine), page_sums=sums,
            attempt=bind.attempt,
        )  # fmt: skip
        await self._move(meeting, mine, said, step, left_s)
        step.waiting_for = "its verdict"
        await self._verdict(meeting, len(mine), left_s)
        step.over = True

    async def _disturb(self, meeting: Meeting) -> None:
        """Where a test may break us before anything leaves."""
        try:
            await self._tamper.before(Stage.VERIFY, Room(meeting.bind.room))
        except ConnectionResetError as error:
            meeting.reset()
            raise PeerGone("itself", "reset on purpose") from error
        except TransferError:
            raise
        except Exception as error:
            raise PrefillFailed("itself", meeting.bind.room, str(error)) from error

    async def _move(
        self,
        meeting: Meeting,
        mine: Sequence[int],
        said: Metadata,
        step: Step,
        left_s: Callable[[], float],
    ) -> None:
        backend, tamper, bind, room = self._backend, self._tamper, meeting.bind, said.room
        ticket = Ticket(
            bind.attempt, room, Generation(bind.generation), bind.pages, bind.aux_bytes,
            meeting.peer, bind.regions, bind.grant,
        )  # fmt: skip
        believed = tamper.generation(room, ticket.generation)
        step.waiting_for = "its data port"
        peer = await backend.connect(bind.offer, ticket, believed, left_s())
        meeting.clean = False  # until the peer says so: whatever ends us in between must not
        try:
            meeting.moved(Happened.FIRST_PAGE)
            step.waiting_for = "confirmation of the pages"
            regions = backend.regions.select(bind.regions)
            out = tamper.pages(room, regions.out(mine, bind.pages))
            await backend.write(peer, out, left_s())
            step.waiting_for = "confirmation of the metadata record"
            await backend.write_record(peer, tamper.metadata(room, said).encode(), left_s())
        finally:
            try:
                await backend.close_peer(peer)
            finally:
                meeting.clean = peer.clean

    async def _verdict(self, meeting: Meeting, pages: int, left_s: Callable[[], float]) -> None:
        """A decode rank that hears several of us speaks when the last of us has delivered."""
        allowed = self._settings.verdict_s if meeting.bind.sources == 1 else left_s()
        try:
            async with asyncio.timeout(allowed):
                await meeting.commit(pages)
        except TimeoutError as error:
            raise DeadlineExceeded(meeting.peer, "its verdict", allowed) from error

"""onesided_ends: both ends of one attempt of a one-sided backend.

Edge (futures). Made by onesided.py. The landing sees nothing of what arrives: room, generation
and pages of a ticket are verified from the record and the page sums alone. Open it to change when
a sender counts as clean.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from kvplane.vocabulary import Generation

from ..errors import Refused
from ..regions import Regions
from .base import Ticket
from .onesided_plan import Grant, Target, encode
from .onesided_session import Session
from .onesided_slots import Slot


class OneSidedLanding:
    """Decode side; see base.Landing. Its deadline is the pull's: memory has none."""

    landed: int | None = None  # only the sender knows

    def __init__(self, ticket: Ticket, regions: Regions, session: Session, slot: Slot) -> None:
        grant = Grant(session.life, slot.address, len(slot.view))
        self.ticket = replace(ticket, grant=encode(grant))
        self.regions = regions
        self.session, self.slot, self.offer = session, slot, session.offer
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.moving = asyncio.Event()  # never set: the first byte is not seen

    def take(self) -> bytes:
        """The record, once; the slot is poisoned again."""
        data = bytes(self.slot.view)
        self.slot.poison()
        return data


class OneSidedPeer:
    """Prefill side; see base.Peer."""

    def __init__(
        self, session: Session, target: Target, ticket: Ticket, generation: Generation, address: str
    ) -> None:
        self.session, self.target, self.ticket = session, target, ticket
        self.generation, self.address = generation, address
        self.where: str | None = None  # what the engine calls the remote process
        self.written: set[int] = set()  # pages
        self.open = True
        self.jobs = 0  # calls that a thread may be in
        self.idle = asyncio.Event()  # none: nobody reads our pages for it
        self.idle.set()
        self.posted = self.failed = self.recorded = False

    @property
    def clean(self) -> bool:
        """Nothing is under way, and no write failed that had left."""
        return not self.jobs and not self.failed

    def begun(self) -> None:
        """A thread may be in a call now."""
        self.jobs += 1
        self.idle.clear()

    def ended(self, error: BaseException | None) -> None:
        """One call less. Refused is said before anything leaves."""
        self.jobs -= 1
        if not self.jobs:
            self.idle.set()
        if error is not None and self.posted and not isinstance(error, Refused):
            self.failed = True

    async def quiet(self, most_s: float) -> None:
        """Until no thread is in a call, at most so long, however often we are cancelled."""
        waiting = asyncio.ensure_future(self.idle.wait())
        loop, cancelled = asyncio.get_running_loop(), None
        until = loop.time() + most_s
        while not waiting.done() and loop.time() < until:
            try:
                await asyncio.wait({waiting}, timeout=until - loop.time())
            except asyncio.CancelledError as error:
                cancelled = error  # said again once our pages are our own
        waiting.cancel()
        if cancelled is not None:
            raise cancelled

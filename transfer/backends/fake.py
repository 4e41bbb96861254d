"""fake: pages by memory copy inside this process; named fake because nothing travels.

Edge, a member of this seam, for tests of what stands around a transfer. The same checks as tcp
against the same ticket, no sockets, no threads. Ports are numbers of living instances.
Open it to let tests break a peer: `gone` refuses as a dead one would, `stalled` never confirms.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakValueDictionary

from kvplane.vocabulary import Generation, Stage

from ..errors import GenerationMismatch, PeerGone, Refused, Stalled
from ..metrics import TransferMetrics
from ..regions import PageOut, Region, Regions
from ..settings import TransferSettings
from .base import Landing, Offer, Peer, Ticket
from .landing import OpenLanding
from .tcp_frames import pages_fault

_ports = itertools.count(1)


class FakePeer:
    """A way to one landing of another instance."""

    def __init__(self, offer: Offer, ticket: Ticket, generation: Generation) -> None:
        self.address, self.clean = f"{offer.host}:{offer.port}", True
        self.port, self.ticket, self.generation = offer.port, ticket, generation


class FakeBackend:
    """See base.Backend."""

    name, one_sided = "fake", False
    _living: ClassVar[WeakValueDictionary[int, FakeBackend]] = WeakValueDictionary()

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._landings: dict[int, OpenLanding] = {}
        self._peers: set[FakePeer] = set()
        self.gone = self.stalled = False

    async def start(self, advertise: str, regions: Sequence[Region], host: str = "") -> None:
        """Register memory and become reachable in this process."""
        self._regions = Regions(regions)
        self._offer = _offer(advertise, self._regions)
        FakeBackend._living[self._offer.port] = self

    @property
    def regions(self) -> Regions:
        """The registered memory."""
        return self._regions

    def offer(self) -> Offer:
        """For the peer's connect."""
        return self._offer

    def landing(self, ticket: Ticket, deadline_s: float) -> OpenLanding:
        """Allow exactly this to land."""
        landing = OpenLanding(ticket, self._regions, self._offer, deadline_s)
        self._landings[ticket.session] = landing
        return landing

    async def fence(self, landing: Landing, clean: bool = False) -> None:
        """Forget it; a copy never spans an await, so none is on its way."""
        assert isinstance(landing, OpenLanding)
        landing.fenced = True
        self._landings.pop(landing.ticket.session, None)

    async def connect(
        self, offer: Offer, ticket: Ticket, generation: Generation, deadline_s: float
    ) -> FakePeer:
        """Look the other instance up."""
        peer = FakePeer(offer, ticket, generation)
        self._other(peer, Stage.CONNECT)
        self._peers.add(peer)
        return peer

    async def write(self, peer: Peer, pages: Sequence[PageOut], deadline_s: float) -> None:
        """Copy, after the checks a tcp receiver makes."""
        assert isinstance(peer, FakePeer)
        landing = await self._target(peer, deadline_s, record=False)
        numbers = tuple(page.page for page in pages)
        mine = self._regions.select(peer.ticket.regions)
        fault = pages_fault(numbers, mine.items, landing.wanted, landing.regions.items)
        if fault is not None:
            landing.break_off(Refused(peer.ticket.peer, fault, Stage.VERIFY))
            raise Refused(peer.address, fault, Stage.VERIFY)
        landing.moving.set()
        for page in pages:
            for target, part in zip(landing.regions.parts(page.page), page.parts, strict=True):
                target[:] = part
        landing.landed_pages(numbers)
        self._metrics.writes.labels("ok").inc()
        self._metrics.bytes.labels("sent").inc(len(pages) * mine.page_bytes)

    async def write_record(self, peer: Peer, record: bytes, deadline_s: float) -> None:
        """Fill the aux slot."""
        assert isinstance(peer, FakePeer)
        landing = await self._target(peer, deadline_s, record=True)
        if not 1 <= len(record) <= peer.ticket.aux_bytes:
            raise Refused(peer.address, f"record of {len(record)} bytes", Stage.VERIFY)
        landing.slot[: len(record)] = record
        landing.recorded = True

    async def _target(self, peer: FakePeer, deadline_s: float, record: bool) -> OpenLanding:
        if peer not in self._peers:
            raise Refused(peer.address, "this peer is closed", Stage.VERIFY)
        other = self._other(peer, Stage.VERIFY)
        if other.stalled:
            await asyncio.sleep(min(deadline_s, self._settings.stall_s))
            raise Stalled(peer.address, "nothing moved while sending")
        await asyncio.sleep(0)
        landing = other._landings.get(peer.ticket.session)
        if landing is None:
            raise Refused(peer.address, f"session of room {peer.ticket.room} is unknown")
        if peer.generation != landing.ticket.generation:
            wrong = GenerationMismatch(
                landing.ticket.generation, peer.generation, "data for decode"
            )
            landing.break_off(wrong)
            raise Refused(peer.address, str(wrong), Stage.VERIFY)
        again = landing.fault_of(record)
        if again is not None:
            landing.break_off(again)
            raise again
        return landing

    def _other(self, peer: FakePeer, stage: Stage) -> FakeBackend:
        other = FakeBackend._living.get(peer.port)
        if other is None or other.gone:
            raise PeerGone(peer.address, "no such instance", stage)
        return other

    async def close_peer(self, peer: Peer) -> None:
        """No byte leaves through it afterwards."""
        assert isinstance(peer, FakePeer)
        self._peers.discard(peer)

    async def stop(self) -> None:
        """Nobody reaches this instance any more."""
        self._peers.clear()
        self._landings.clear()
        if hasattr(self, "_offer"):
            FakeBackend._living.pop(self._offer.port, None)

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        return {"landings": len(self._landings), "peers": len(self._peers)}


def _offer(advertise: str, regions: Regions) -> Offer:
    return Offer("fake", 1, advertise, next(_ports), regions.items, regions.names)

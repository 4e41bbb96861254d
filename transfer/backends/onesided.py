"""onesided: a backend over a library whose sender writes into our memory without asking.

Edge: what mooncake and nixl share, each brings its Engine. The ticket cannot be enforced here: a
foreign room, generation or page is noticed by the decode's verify, and by our own sender before it
writes. A failure is fenced by ending the session (onesided_session.py), unless the sender said it
is clean. Open it to change what a one-sided backend promises.

    landing: slot poisoned, grant   connect: reach   write: moves -> batches -> thread -> applied
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvplane.vocabulary import Generation, Stage

from ..errors import GenerationMismatch, Refused, Stalled
from ..metrics import TransferMetrics
from ..regions import PageOut, Region, Regions
from ..settings import TransferSettings
from .base import Landing, Offer, Peer, Ticket
from .onesided_ends import OneSidedLanding, OneSidedPeer
from .onesided_plan import BadReach, Move, batches, moves, target, write_fault
from .onesided_session import MakeEngine, Session, Sessions
from .onesided_slots import Staging
from .onesided_work import Stop, Workers

log = logging.getLogger(__name__)


class OneSidedBackend:
    """See base.Backend."""

    one_sided = True

    def __init__(
        self,
        name: str,
        most_batch: int,
        make_engine: MakeEngine,
        settings: TransferSettings,
        metrics: TransferMetrics,
    ) -> None:
        self.name, self._most_batch = name, most_batch
        self._settings, self._metrics = settings, metrics
        self._sessions = Sessions(make_engine, name, settings)
        self._landings: set[OneSidedLanding] = set()
        self._peers: set[OneSidedPeer] = set()
        self._workers = Workers(settings.send_threads, f"kv-{name}")
        self._leaving: set[asyncio.Task[None]] = set()

    async def start(self, advertise: str, regions: Sequence[Region], host: str = "") -> None:
        """Register memory and begin; `host` is not used, both libraries listen everywhere."""
        self._regions = Regions(regions)
        await self._sessions.start(advertise, self._regions)

    @property
    def regions(self) -> Regions:
        """The registered memory."""
        return self._regions

    def offer(self) -> Offer:
        """How new landings are reached; another one after a failure was fenced."""
        return self._sessions.current.offer

    # --- decode ---

    def landing(self, ticket: Ticket, deadline_s: float) -> OneSidedLanding:
        """A poisoned slot, and the address of it. Raises Refused when no slot is free."""
        self._regions.check(ticket.pages)
        regions, session = self._regions.select(ticket.regions), self._sessions.current
        slot = session.slots.take(ticket.aux_bytes)
        if slot is None:
            text = f"no free slot of {ticket.aux_bytes} bytes, {len(session.slots)} are taken"
            raise Refused("itself", text)
        landing = OneSidedLanding(ticket, regions, session, slot)
        self._landings.add(landing)
        session.users.add(landing)
        return landing

    async def fence(self, landing: Landing, clean: bool = False) -> None:
        """Clean: at once. Else its session is replaced and destroyed first; raises Stalled."""
        assert isinstance(landing, OneSidedLanding)
        session = landing.session
        if clean and landing in session.users:
            session.slots.give(landing.slot)
        elif landing in self._landings:
            await self._sessions.rotate(session, landing.ticket.peer)
            session.leave(landing)
            await self._destroyed(session, landing.ticket.peer)
        session.leave(landing)
        self._landings.discard(landing)

    async def _destroyed(self, session: Session, peer: str) -> None:
        try:
            async with asyncio.timeout(self._settings.fence_s):
                await session.closed.wait()
        except TimeoutError as error:
            text = f"{len(session.users)} others still use the session to be destroyed"
            raise Stalled(peer, text) from error

    # --- prefill ---

    async def connect(
        self, offer: Offer, ticket: Ticket, generation: Generation, deadline_s: float
    ) -> OneSidedPeer:
        """Read the offer, and make its engine known to ours."""
        address = f"{offer.host}:{offer.port}" if offer.port else offer.host
        try:
            theirs = target(offer, ticket)
        except BadReach as error:
            raise Refused(address, str(error)) from error
        session = self._sessions.current
        peer = OneSidedPeer(session, theirs, ticket, generation, address)
        session.users.add(peer)
        self._peers.add(peer)

        def call(stop: Stop) -> None:
            peer.where = session.engine.reach(theirs.reach, address)

        try:
            most_s = min(deadline_s, self._settings.connect_s)
            await self._run(peer, call, most_s, Stage.CONNECT)
        except BaseException:
            await self.close_peer(peer)
            raise
        return peer

    async def write(self, peer: Peer, pages: Sequence[PageOut], deadline_s: float) -> None:
        """Return when all of it is applied at the peer."""
        assert isinstance(peer, OneSidedPeer)
        self._demand(peer, tuple(page.page for page in pages))
        if not pages:
            return
        regions = self._regions.select(peer.ticket.regions)
        peer.written.update(page.page for page in pages)
        outcome = "failed"
        try:
            with Staging(peer.session.slots, peer.address) as staging:
                made = moves(regions, peer.target, pages, staging.put)
                await self._write(peer, made, deadline_s, staging)
            outcome = "ok"
        finally:
            self._metrics.writes.labels(outcome).inc()
        self._metrics.bytes.labels("sent").inc(len(pages) * regions.page_bytes)

    async def write_record(self, peer: Peer, record: bytes, deadline_s: float) -> None:
        """Fill the aux slot; its own transfer, since nothing inside one has an order."""
        assert isinstance(peer, OneSidedPeer)
        self._demand(peer, None)
        if not 1 <= len(record) <= peer.ticket.aux_bytes:
            text = f"record of {len(record)} bytes, the slot has {peer.ticket.aux_bytes}"
            raise Refused(peer.address, text, Stage.VERIFY)
        with Staging(peer.session.slots, peer.address) as staging:
            address = staging.put(memoryview(record))
            made = [Move(address, peer.target.grant.address, len(record))]
            peer.recorded = True
            await self._write(peer, made, deadline_s, staging)

    def _demand(self, peer: OneSidedPeer, pages: tuple[int, ...] | None) -> None:
        """What a receiver of another backend would refuse, a sender of this one has to.

        `pages` None: it is the record.
        """
        if not peer.open:
            raise Refused(peer.address, "this peer is closed", Stage.VERIFY)
        if peer.generation != peer.ticket.generation:
            wrong = (peer.ticket.generation, peer.generation)
            raise GenerationMismatch(*wrong, "data for decode", Stage.VERIFY)
        if peer.recorded:
            fault: str | None = "a second record" if pages is None else "pages after the record"
        else:
            items = self._regions.select(peer.ticket.regions).items
            fault = write_fault(peer.ticket, items, peer.target, peer.written, pages or ())
        if fault is not None:
            raise Refused(peer.address, fault, Stage.VERIFY)

    async def _write(
        self, peer: OneSidedPeer, made: list[Move], deadline_s: float, staging: Staging
    ) -> None:
        engine, where = peer.session.engine, peer.where
        assert where is not None, "connect() made the remote process known"

        def call(stop: Stop) -> None:
            for batch in batches(made, self._most_batch):
                if stop.over:
                    raise Stalled(peer.address, "stopped between two batches")
                engine.write(where, batch, peer.address, stop)

        peer.posted = True
        staging.keep()  # until the thread is out of the call, which may be after our deadline
        await self._run(peer, call, deadline_s, Stage.VERIFY, staging.give)

    async def _run(
        self,
        peer: OneSidedPeer,
        call: Callable[[Stop], None],
        deadline_s: float,
        stage: Stage,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        def ended(error: BaseException | None) -> None:
            after()
            peer.ended(error)
            self._drop(peer)

        peer.begun()
        whom = peer.target.reach.session
        await self._workers.run(whom, peer.address, call, deadline_s, ended, stage)

    async def close_peer(self, peer: Peer) -> None:
        """Nothing new leaves through it, and our pages are not read for it any more.

        A call that a library does not end within `fence_s` is left behind and counted: it goes to
        a landing that the decode has fenced, whatever our pages hold by then.
        """
        assert isinstance(peer, OneSidedPeer)
        if not peer.open:
            return
        peer.open = False
        self._peers.discard(peer)
        self._drop(peer)
        try:
            await peer.quiet(self._settings.fence_s)
        finally:
            if not peer.idle.is_set():
                self._metrics.abandoned.inc()
                log.warning("library call left behind backend=%s peer=%s", self.name, peer.address)

    def _drop(self, peer: OneSidedPeer) -> None:
        """Closed, and no thread is in a call: the session may go on without it."""
        if peer.open or peer.jobs or peer not in peer.session.users:
            return
        task = asyncio.create_task(self._leave(peer))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, peer: OneSidedPeer) -> None:
        if peer.where is not None:
            await asyncio.to_thread(peer.session.engine.leave, peer.where, peer.failed)
        peer.session.leave(peer)
        if peer.session.engine.worn:
            with suppress(Stalled):  # asked again by the next peer
                await self._sessions.rotate(peer.session, peer.address)

    async def stop(self) -> None:
        """End peers, threads and sessions; bounded."""
        for peer in list(self._peers):
            await self.close_peer(peer)
        await self._workers.stop(self._settings.fence_s)
        if self._leaving:
            await asyncio.wait(self._leaving, timeout=self._settings.fence_s)
        await self._sessions.stop()
        self._landings.clear()

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        return {
            "landings": len(self._landings),
            "peers": len(self._peers) + len(self._leaving),
            "writing": len(self._workers),
            "retired": len(self._sessions),
        }

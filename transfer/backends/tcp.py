"""tcp: pages over plain sockets, no dependency, exact errors.

Edge, a member of this seam and the default. Blocking sockets in worker threads, scatter and gather
without a copy; the receiver checks every head before it reads payload. tcp_frames.py draws the
wire form, tcp_receiver.py decides what lands, tcp_payload.py moves it. One connection per
attempt, so cutting it *is* the fence. Open it to change how a write is run off the event loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvplane.vocabulary import Generation, Stage

from ..errors import PeerGone, Refused, Stalled
from ..metrics import TransferMetrics
from ..regions import PageOut, Region, Regions
from ..settings import TransferSettings
from .base import Landing, Offer, Peer, Ticket
from .tcp_frames import VERSION, Head, Kind, body_bytes, digest, encode_pages
from .tcp_payload import close, send
from .tcp_receiver import Receiver, TcpLanding


class TcpPeer:
    """An open connection to one landing."""

    def __init__(
        self, sock: socket.socket, offer: Offer, ticket: Ticket, generation: Generation
    ) -> None:
        host = f"[{offer.host}]" if ":" in offer.host else offer.host
        self.address = f"{host}:{offer.port}"
        self.sock, self.ticket, self.generation = sock, ticket, generation
        self.clean = True  # cutting the connection ends it: nothing can land later


class TcpBackend:
    """See base.Backend."""

    name, one_sided = "tcp", False

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._peers: set[TcpPeer] = set()
        self._sending = 0
        self._receiver: Receiver | None = None
        self._pool: ThreadPoolExecutor | None = None

    async def start(self, advertise: str, regions: Sequence[Region], host: str = "") -> None:
        """Register memory and listen."""
        self._regions = Regions(regions)
        self._receiver = Receiver(self._settings, self._metrics)
        port = self._receiver.listen(host or advertise)
        self._pool = ThreadPoolExecutor(self._settings.send_threads, "kv-send")
        self._offer = Offer(
            "tcp", VERSION, advertise, port, self._regions.items, self._regions.names
        )

    @property
    def regions(self) -> Regions:
        """The registered memory."""
        return self._regions

    def offer(self) -> Offer:
        """Where to dial."""
        return self._offer

    def landing(self, ticket: Ticket, deadline_s: float) -> TcpLanding:
        """Allow exactly this to land."""
        assert self._receiver is not None, "start() comes first"
        landing = TcpLanding(ticket, self._regions, self._offer, deadline_s)
        self._receiver.admit(landing)
        return landing

    async def fence(self, landing: Landing, clean: bool = False) -> None:
        """Cut the connection and wait until no thread reads into the pages."""
        assert isinstance(landing, TcpLanding) and self._receiver is not None
        job = self._receiver.forbid(landing)
        if job is None or job.done():
            return
        done, _ = await asyncio.wait([asyncio.wrap_future(job)], timeout=self._settings.fence_s)
        if not done:
            raise Stalled(landing.ticket.peer, "a receiver thread does not end")

    async def connect(
        self, offer: Offer, ticket: Ticket, generation: Generation, deadline_s: float
    ) -> TcpPeer:
        """Dial the decode's data port."""
        loop = asyncio.get_running_loop()
        where = f"{offer.host}:{offer.port}"
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(min(deadline_s, self._settings.connect_s)):
                found = await loop.getaddrinfo(offer.host, offer.port, type=socket.SOCK_STREAM)
                family, kind, proto, _, address = found[0]
                sock = socket.socket(family, kind, proto)
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException as error:
            if sock is not None:
                close(sock)
            if isinstance(error, TimeoutError):
                raise Stalled(where, "data port does not answer", Stage.CONNECT) from error
            if isinstance(error, OSError | UnicodeError):  # the latter: no name of a host
                why = getattr(error, "strerror", None) or str(error)
                raise PeerGone(where, f"data port: {why}", Stage.CONNECT) from error
            raise
        peer = TcpPeer(sock, offer, ticket, generation)
        self._peers.add(peer)
        return peer

    async def write(self, peer: Peer, pages: Sequence[PageOut], deadline_s: float) -> None:
        """Return when all of it is applied at the peer."""
        assert isinstance(peer, TcpPeer)
        if not pages:
            return
        regions = self._regions.select(peer.ticket.regions)
        items, numbers = regions.items, tuple(page.page for page in pages)
        total = len(pages) * regions.page_bytes
        size = body_bytes(len(pages), len(items))
        head = self._head(peer, Kind.PAGES, len(pages), len(items), size, total)
        front = head.encode() + encode_pages(numbers, items)
        await self._run(peer, front, regions.gather(pages), deadline_s)
        self._metrics.bytes.labels("sent").inc(total)

    async def write_record(self, peer: Peer, record: bytes, deadline_s: float) -> None:
        """Fill the aux slot."""
        assert isinstance(peer, TcpPeer)
        head = self._head(peer, Kind.RECORD, 0, 0, 0, len(record))
        await self._run(peer, head.encode(), [memoryview(record)], deadline_s)

    def _head(
        self, peer: TcpPeer, kind: Kind, pages: int, regions: int, body: int, total: int
    ) -> Head:
        ticket = peer.ticket
        return Head(
            kind, ticket.room, ticket.session, digest(peer.generation), pages, regions, body, total
        )

    async def _run(
        self, peer: TcpPeer, front: bytes, pieces: Iterable[memoryview], deadline_s: float
    ) -> None:
        if peer not in self._peers or self._pool is None:
            raise Refused(peer.address, "this peer is closed", Stage.VERIFY)
        deadline = time.monotonic() + deadline_s
        stall_s = self._settings.stall_s
        job = self._pool.submit(send, peer.sock, front, pieces, peer.address, deadline, stall_s)
        self._sending += 1
        outcome, waiter = "failed", asyncio.wrap_future(job)
        try:
            await asyncio.wait([waiter])
            waiter.result()
            outcome = "ok"
        finally:
            if not waiter.done() and not job.cancel():
                self._cut(peer)
            await _ended(waiter)
            self._sending -= 1
            self._metrics.writes.labels(outcome).inc()

    def _cut(self, peer: TcpPeer) -> None:
        with suppress(OSError):
            peer.sock.shutdown(socket.SHUT_RDWR)

    async def close_peer(self, peer: Peer) -> None:
        """No byte leaves through this peer afterwards."""
        assert isinstance(peer, TcpPeer)
        self._peers.discard(peer)
        close(peer.sock)

    async def stop(self) -> None:
        """Close sockets and end threads."""
        for peer in list(self._peers):
            self._cut(peer)
            await self.close_peer(peer)
        receiver, pool = self._receiver, self._pool
        self._receiver = self._pool = None
        if receiver is not None:
            await asyncio.to_thread(receiver.stop)
        if pool is not None:
            await asyncio.to_thread(pool.shutdown)

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        received = self._receiver.counts() if self._receiver else {}
        return {**received, "peers": len(self._peers), "sending": self._sending}


async def _ended(waiter: asyncio.Future[None]) -> None:
    """Until the thread let go of the pages; bounded, for its socket is cut."""
    while not waiter.done():
        with suppress(asyncio.CancelledError):  # the caller is being cancelled and re-raises
            await asyncio.wait([waiter])
    if not waiter.cancelled():
        waiter.exception()  # looked at: whatever it is, the caller has a better reason

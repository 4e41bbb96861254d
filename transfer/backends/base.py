"""Backends, base: what must a way of moving pages do?

Seam. Members are in the table of this folder; tests/contracts/test_backends.py runs all of them.
offer.py writes through a Peer, pull.py waits on a Landing; neither knows how bytes travel.
Open it to change what every backend promises.

    decode                                        prefill
    landing(ticket) ---- offer, ticket, grant -->  connect(offer, ticket) -> Peer
    pages land, only those of the ticket  <-----  write(pages): returns = applied at the peer
    aux slot filled                       <-----  write_record(bytes): only after the pages
    take() once; fence() after a failure          close()

1. `write` returning means *applied at the peer*. Nothing inside one write has an order, so the
   record is always its own write.
2. No silent retry: a retry is a new attempt in a new room.
3. After `fence` returned no late byte can reach the landing's pages. Time alone is no proof. A
   one-sided backend needs to know whether the sender is *clean*: nothing of it is under way.
4. Failures are PeerGone, Stalled, Refused, NotRegistered. When close_peer returned the source pages
   are no longer read, also where a write was cancelled (one-sided: or it is counted, see onesided).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvplane.vocabulary import Generation, Room

from ..metrics import TransferMetrics
from ..regions import PageOut, Region, Regions
from ..settings import TransferSettings

MOST_NAMED = 16  # regions that are named where all of them differ


@dataclass(frozen=True, slots=True)
class Offer:
    """How a peer reaches the memory of this process; once per process and generation."""

    backend: str
    version: int  # of the backend's own wire form
    host: str  # as peers see it; never a wildcard
    port: int
    items: tuple[int, ...]  # bytes of one page, region by region
    names: tuple[str, ...]  # of the regions, in the same order
    blob: bytes = b""  # what else a backend needs

    def differences(self, other: Offer, regions: Sequence[str] = ()) -> tuple[str, ...]:
        """What keeps these two from moving `regions` (() = all there); `self` is 'here'."""
        wrong = [
            f"{name} {getattr(self, name)} here, {getattr(other, name)} there"
            for name in ("backend", "version")
            if getattr(self, name) != getattr(other, name)
        ]
        here = dict(zip(self.names, self.items, strict=False))
        there = dict(zip(other.names, other.items, strict=False))
        names = regions or other.names
        differ = [n for n in names if here.get(n) != there.get(n) or n not in here]
        for name in differ[:MOST_NAMED]:
            sizes = (_size(side.get(name)) for side in (here, there))
            wrong.append("region {} {} here, {} there".format(name, *sizes))
        if len(differ) > MOST_NAMED:
            wrong.append(f"{len(differ) - MOST_NAMED} regions more")
        return tuple(wrong)


def _size(item: int | None) -> str:
    return "missing" if item is None else f"of {item} bytes a page"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What exactly may land: the decode makes one per room, attempt and prefill rank."""

    session: int  # random 63 bit, 1 or more: names the attempt; only who knows it may write
    room: Room
    generation: Generation  # of the decode
    pages: tuple[int, ...]  # page numbers of the decode, in prompt order
    aux_bytes: int  # size of the slot for the metadata record
    peer: str = "prefill"  # host:port of the prefill, for sentences
    regions: tuple[str, ...] = ()  # which part of each page; () = all of it
    grant: bytes = b""  # what the sender must know of this landing alone; the landing's to say


class Landing(Protocol):
    """Decode side of one attempt."""

    ticket: Ticket

    @property
    def offer(self) -> Offer:
        """How the sender reaches this landing."""

    @property
    def landed(self) -> int | None:
        """How many pages are complete; None where only the sender knows."""

    @property
    def broken(self) -> asyncio.Future[None]:
        """Gets an exception when the data path failed; never a result."""

    @property
    def moving(self) -> asyncio.Event:
        """Set once the first payload is announced."""

    def take(self) -> bytes:
        """The record, once; the slot is poisoned again."""


class Peer(Protocol):
    """Prefill side of one attempt: an open way to one landing."""

    @property
    def address(self) -> str:
        """host:port, for sentences."""

    @property
    def clean(self) -> bool:
        """No write is unconfirmed: whatever was begun is applied or can never be."""


class Backend(Protocol):
    """One per rank. Regions are registered before anything is offered."""

    name: str
    one_sided: bool  # the sender writes without asking; see promise 3

    async def start(self, advertise: str, regions: Sequence[Region], host: str = "") -> None:
        """Register memory and listen on `host` ("" = advertise); peers are told `advertise`."""

    @property
    def regions(self) -> Regions:
        """The registered memory."""

    def offer(self) -> Offer:
        """For the peer's connect."""

    def landing(self, ticket: Ticket, deadline_s: float) -> Landing:
        """Allow exactly this to land, for so long. Raises NotRegistered, NoRegion."""

    async def fence(self, landing: Landing, clean: bool = False) -> None:
        """Forbid it again; after this no late byte lands. Idempotent; raises Stalled.

        `clean`: the sender confirmed that nothing of it is under way, or will be.
        """

    async def connect(
        self, offer: Offer, ticket: Ticket, generation: Generation, deadline_s: float
    ) -> Peer:
        """Prefill: reach the landing. `generation` is what we believe the decode's to be."""

    async def write(self, peer: Peer, pages: Sequence[PageOut], deadline_s: float) -> None:
        """Return when all of it is applied at the peer."""

    async def write_record(self, peer: Peer, record: bytes, deadline_s: float) -> None:
        """Fill the aux slot; its own write, after the pages are confirmed."""

    async def close_peer(self, peer: Peer) -> None:
        """No byte leaves through this peer afterwards. Idempotent, never raises."""

    async def stop(self) -> None:
        """Close sockets and end threads."""

    def counts(self) -> dict[str, int]:
        """What is held now: sockets, landings, jobs; all 0 when idle."""


class MakeBackend(Protocol):
    """How a member of the table is built."""

    def __call__(self, settings: TransferSettings, metrics: TransferMetrics) -> Backend: ...

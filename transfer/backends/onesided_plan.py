"""onesided_plan: which bytes go where, when a sender writes into foreign memory by itself.

Pure. Shared by mooncake and nixl; onesided.py acts on it. Reach and Grant are what the sender must
know: one travels in Offer.blob, the other in Ticket.grant. Open it to change how pages become
the moves of a library, or what is checked before the first of them.

    sources 4 5 9 -> pages 7 8 2:   each region: [4 5 -> 7 8] [9 -> 2]     neighbours on both sides
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import msgspec

from ..regions import PageOut, Region, Regions
from .base import Offer, Ticket
from .tcp_frames import pages_fault

VERSION = 1  # of Reach and Grant


class BadReach(ValueError):
    """Not what a one-sided peer sends; says what is wrong first."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """A piece of registered memory."""

    address: int
    size: int  # bytes
    device: str = "cpu"


class Reach(msgspec.Struct, frozen=True):
    """One life of the decode's engine: its name, and where its regions lie."""

    session: str  # Mooncake: host:port; NIXL: the agent's name
    life: int  # random; the grant of a landing repeats it
    spans: tuple[Span, ...]  # in the order of Offer.names
    library: bytes = b""  # what the library itself wants to know (NIXL: agent metadata)


class Grant(msgspec.Struct, frozen=True):
    """The aux slot of one landing, and the life it belongs to."""

    life: int
    address: int
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Move:
    """Neighbouring bytes of ours that become neighbouring bytes of theirs."""

    local: int  # address
    remote: int
    size: int  # bytes
    local_device: str = "cpu"
    remote_device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Target:
    """What a sender believes of one landing, read from its offer and ticket."""

    reach: Reach
    grant: Grant
    spans: tuple[Span, ...]  # of the ticket's regions, in its order
    items: tuple[int, ...]  # bytes of one page in each


_encode = msgspec.msgpack.Encoder().encode
_reach = msgspec.msgpack.Decoder(Reach)
_grant = msgspec.msgpack.Decoder(Grant)


def encode(what: Reach | Grant) -> bytes:
    """For Offer.blob or Ticket.grant."""
    return _encode(what)


def target(offer: Offer, ticket: Ticket) -> Target:
    """Read and compare; raises BadReach, never anything else."""
    try:
        reach, grant = _reach.decode(offer.blob), _grant.decode(ticket.grant)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadReach(f"offer or grant: {error}") from error
    if reach.life != grant.life:
        raise BadReach("grant: is of another life of the decode than its offer")
    if not len(reach.spans) == len(offer.names) == len(offer.items):
        raise BadReach(f"offer: {len(reach.spans)} spans for {len(offer.names)} regions")
    if grant.size < ticket.aux_bytes:
        raise BadReach(f"grant: slot of {grant.size} bytes, the ticket says {ticket.aux_bytes}")
    known = dict(zip(offer.names, zip(reach.spans, offer.items, strict=True), strict=True))
    names = ticket.regions or offer.names
    missing = [name for name in names if name not in known]
    if missing:
        raise BadReach(f"ticket: region {missing[0]!r} is not in the offer")
    chosen = [known[name] for name in names]
    for span, item in chosen:
        if item < 1 or any((page + 1) * item > span.size for page in ticket.pages):
            raise BadReach("ticket: a page lies outside the offered memory")
    return Target(reach, grant, tuple(s for s, _ in chosen), tuple(item for _, item in chosen))


def write_fault(
    ticket: Ticket, items: tuple[int, ...], theirs: Target, written: set[int], pages: Sequence[int]
) -> str | None:
    """What our own write would do against the ticket. The receiver cannot refuse it, so we do."""
    wanted = {page for page in ticket.pages if page not in written}
    return pages_fault(tuple(pages), items, wanted, theirs.items)


def moves(
    regions: Regions,
    theirs: Target,
    pages: Sequence[PageOut],
    stage: Callable[[memoryview], int],
) -> list[Move]:
    """Region by region; `stage` puts bytes that are not registered (a test's) where they are."""
    made: list[Move] = []
    for at, (region, span, item) in enumerate(
        zip(regions, theirs.spans, theirs.items, strict=True)
    ):
        for first, count in _runs(pages):
            page = pages[first]
            remote = span.address + page.page * item
            if page.source is None:
                local, device = stage(page.parts[at]), "cpu"
            else:
                local, device = region.address + page.source * item, region.device
            made.append(Move(local, remote, count * item, device, span.device))
    return made


def _runs(pages: Sequence[PageOut]) -> Iterator[tuple[int, int]]:
    """(index, count) of pages that follow each other on both sides."""
    start = 0
    for end in range(1, len(pages) + 1):
        before = pages[end - 1]
        if end < len(pages) and before.source is not None:
            here = pages[end]
            if here.source == before.source + 1 and here.page == before.page + 1:
                continue
        yield start, end - start
        start = end


def batches(made: Sequence[Move], most: int) -> Iterator[list[Move]]:
    """At most so many a call, each of one kind of memory on either side."""
    for _, alike in groupby(made, key=lambda move: (move.local_device, move.remote_device)):
        each = list(alike)
        for start in range(0, len(each), most):
            yield each[start : start + most]


def spans_of(regions: Iterable[Region]) -> tuple[Span, ...]:
    """One by one, for a Reach."""
    return tuple(Span(region.address, region.size, region.device) for region in regions)


def merged(spans: Iterable[Span]) -> list[Span]:
    """What to register: no range twice (Mooncake refuses that), host neighbours as one.

    Device memory is joined only where it overlaps: neighbours may be two allocations.
    """
    made: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.device, span.address, span.size)):
        last = made[-1] if made and made[-1].device == span.device else None
        end = last.address + last.size if last else 0
        touches = last is not None and span.address < end + (span.device == "cpu")
        if last is not None and touches:
            size = max(end, span.address + span.size) - last.address
            made[-1] = Span(last.address, size, last.device)
        else:
            made.append(span)
    return made

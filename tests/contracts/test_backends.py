"""Every transfer backend, one suite: what lands, what does not, and what is left behind.

Where the receiver decides what lands (`one_sided` is False) it refuses and its landing breaks.
Where the sender writes by itself the same mistake is refused on the sending side, and a foreign
sender is noticed by the decode's verify (tests/transfer).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kit.onesided import StandInBackend
from kit.wait import until

from kvplane.transfer import (
    BACKENDS,
    Backend,
    Region,
    TransferMetrics,
    TransferSettings,
    flip_byte,
)
from kvplane.transfer.backends import Landing, Peer, Ticket, why_unavailable
from kvplane.transfer.errors import (
    GenerationMismatch,
    NotAvailable,
    NotRegistered,
    PeerGone,
    Refused,
    TransferError,
)
from kvplane.transfer.metadata import POISON
from kvplane.vocabulary import Generation, Room

PAGES, ITEM = 16, 192  # pages a side, float16 numbers of one page in one layer
SETTINGS = TransferSettings(stall_s=1.0, connect_s=3.0, fence_s=10.0)
MEMBERS = {**BACKENDS, "stand-in": StandInBackend}  # one-sided without a library
EXITS_HARD = "KVPLANE_TEST_EXITS_HARD" in os.environ  # this process ends with os._exit
sessions = itertools.count(1)


@dataclass
class Side:
    """One process's memory and backend."""

    backend: Backend
    layers: list[np.ndarray]

    def page(self, number: int) -> bytes:
        return b"".join(layer[number].tobytes() for layer in self.layers)


async def side(name: str, seed: int) -> Side:
    random = np.random.default_rng(seed)
    layers = [random.random((PAGES, 2, ITEM // 2)).astype(np.float16) for _ in range(3)]
    backend = MEMBERS[name](SETTINGS, TransferMetrics())
    await backend.start("127.0.0.1", [Region.of(layer) for layer in layers])
    return Side(backend, layers)


@dataclass
class Pair:
    """A prefill (sends) and a decode (lands)."""

    prefill: Side
    decode: Side

    def ticket(self, *pages: int, aux: int = 64) -> Ticket:
        return Ticket(next(sessions), Room(71), Generation("d1"), pages, aux, "prefill:1")

    async def connect(self, landing: Landing, generation: str = "d1") -> Peer:
        ticket, backend = landing.ticket, self.prefill.backend
        return await backend.connect(landing.offer, ticket, Generation(generation), 3.0)

    async def breaks(
        self, landing: Landing, error: type[TransferError], match: str | None = None
    ) -> None:
        """Where the decode can see it."""
        if self.decode.backend.one_sided:
            assert not landing.broken.done()
            return
        with pytest.raises(error, match=match):
            await asyncio.wait_for(asyncio.shield(landing.broken), 5)

    def out(self, sources: list[int], pages: list[int]):
        return self.prefill.backend.regions.out(sources, pages)


def members() -> list[object]:
    """Every backend; those that cannot run here are skipped and say why."""
    why = {name: why_unavailable(make) for name, make in MEMBERS.items()}
    if why["nixl"] is None and not EXITS_HARD:
        why["nixl"] = "it crashes a process that exits: make test-transfer runs it in its own"
    return [
        pytest.param(name, marks=pytest.mark.skipif(why[name] is not None, reason=f"{why[name]}"))
        for name in sorted(why)
    ]


@pytest.fixture(params=members())
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    try:
        made = Pair(await side(request.param, 1), await side(request.param, 2))
    except NotAvailable as error:
        pytest.skip(str(error))
    yield made
    await made.prefill.backend.stop()
    await made.decode.backend.stop()


async def idle(pair: Pair) -> None:
    """Nothing is held on either side."""
    for one in (pair.prefill, pair.decode):
        await until(lambda one=one: not any(one.backend.counts().values()), what=str(one))


async def test_pages_arrive_under_the_decodes_own_numbers(pair: Pair) -> None:
    ticket = pair.ticket(9, 3, 4, 5)
    untouched = pair.decode.page(8)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.write(peer, pair.out([2, 3, 4, 7], [9, 3, 4, 5]), 5.0)
    if not pair.decode.backend.one_sided:
        assert landing.landed == 4 and landing.moving.is_set()
    for source, page in zip([2, 3, 4, 7], [9, 3, 4, 5], strict=True):
        assert pair.decode.page(page) == pair.prefill.page(source)
    assert pair.decode.page(8) == untouched
    assert peer.clean
    await pair.prefill.backend.close_peer(peer)
    await pair.decode.backend.fence(landing, peer.clean)
    await idle(pair)


async def test_several_writes_fill_one_landing_and_the_record_follows(pair: Pair) -> None:
    ticket = pair.ticket(0, 1, 2)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.write(peer, pair.out([5], [0]), 5.0)
    assert landing.landed == (None if pair.decode.backend.one_sided else 1)
    assert landing.take() == bytes([POISON]) * 64, "no record yet"
    await pair.prefill.backend.write(peer, pair.out([6, 7], [1, 2]), 5.0)
    await pair.prefill.backend.write_record(peer, b"the record", 5.0)
    assert landing.take().startswith(b"the record\xff")
    assert landing.take() == bytes([POISON]) * 64, "read once, then poisoned again"
    assert not landing.broken.done()


@pytest.mark.parametrize(
    ("pages", "why"),
    [([0, 3], "page 3 is not expected"), ([1, 1], "twice")],
    ids=["a page outside the ticket", "a page twice"],
)
async def test_what_the_ticket_does_not_allow_is_refused(
    pair: Pair, pages: list[int], why: str
) -> None:
    ticket = pair.ticket(0, 1)
    before = [pair.decode.page(number) for number in range(PAGES)]
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    with pytest.raises(Refused, match=why):
        await pair.prefill.backend.write(peer, pair.out([4, 5], pages), 5.0)
    await pair.breaks(landing, Refused, why)
    assert peer.clean, "nothing left"
    assert [pair.decode.page(number) for number in range(PAGES)] == before


async def test_a_page_cannot_be_written_twice(pair: Pair) -> None:
    ticket = pair.ticket(0, 1)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    with pytest.raises(Refused, match="written before"):
        await pair.prefill.backend.write(peer, pair.out([5], [0]), 5.0)
    assert pair.decode.page(0) == pair.prefill.page(4)


@pytest.mark.parametrize("what", ["record", "pages"])
async def test_nothing_is_written_after_the_record(pair: Pair, what: str) -> None:
    """FR-TR-02: metadata twice; the first stays, and the room fails."""
    ticket = pair.ticket(0, 1)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    await pair.prefill.backend.write_record(peer, b"the record", 5.0)
    with pytest.raises(Refused, match=r"second record|after the record"):
        if what == "record":
            await pair.prefill.backend.write_record(peer, b"another", 5.0)
        else:
            await pair.prefill.backend.write(peer, pair.out([5], [1]), 5.0)
    await pair.breaks(landing, Refused)
    assert landing.take().startswith(b"the record\xff")


async def test_data_for_another_generation_of_the_decode_is_refused(pair: Pair) -> None:
    ticket = pair.ticket(0)
    before = pair.decode.page(0)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing, generation="d0")
    with pytest.raises(TransferError):
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    await pair.breaks(landing, GenerationMismatch)
    assert pair.decode.page(0) == before


async def test_an_unknown_session_is_refused(pair: Pair) -> None:
    before, backend = pair.decode.page(0), pair.prefill.backend
    offer, ticket = pair.decode.backend.offer(), pair.ticket(0)
    with pytest.raises(Refused, match=r"unknown|grant"):
        peer = await backend.connect(offer, ticket, Generation("d1"), 2.0)
        await backend.write(peer, pair.out([4], [0]), 5.0)
    assert pair.decode.page(0) == before


async def test_after_the_fence_nothing_lands(pair: Pair) -> None:
    ticket = pair.ticket(0, 1)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    await pair.decode.backend.fence(landing, clean=False)
    await pair.decode.backend.fence(landing, clean=False)
    before = pair.decode.page(1)
    with pytest.raises((Refused, PeerGone)):
        await pair.prefill.backend.write(peer, pair.out([5], [1]), 5.0)
    assert pair.decode.page(1) == before
    await pair.prefill.backend.close_peer(peer)
    await idle(pair)


async def test_after_an_unclean_fence_others_land_as_before(pair: Pair) -> None:
    backend = pair.decode.backend
    first, second = (backend.landing(pair.ticket(page), 10.0) for page in (0, 1))
    peer = await pair.connect(second)
    fencing = asyncio.create_task(backend.fence(first, clean=False))
    await until(lambda: fencing.done() or backend.offer() != first.offer)
    third = backend.landing(pair.ticket(2), 10.0)
    await pair.prefill.backend.write(peer, pair.out([5], [1]), 5.0)  # it was let in before
    other = await pair.connect(third)
    await pair.prefill.backend.write(other, pair.out([6], [2]), 5.0)
    assert pair.decode.page(1) == pair.prefill.page(5)
    assert pair.decode.page(2) == pair.prefill.page(6)
    assert backend.one_sided == (third.offer != second.offer)
    for one, landing in ((peer, second), (other, third)):
        await pair.prefill.backend.close_peer(one)
        await backend.fence(landing, one.clean)
    await fencing
    await idle(pair)


async def test_bytes_that_lie_in_no_region_travel_too(pair: Pair) -> None:
    ticket = pair.ticket(0, 1, 2)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    out = flip_byte(pair.out([4, 5, 6], [0, 1, 2]), at=0)
    await pair.prefill.backend.write(peer, out, 5.0)
    assert pair.decode.page(0)[1:] == pair.prefill.page(4)[1:]
    assert pair.decode.page(0)[0] == pair.prefill.page(4)[0] ^ 1
    assert [pair.decode.page(at) for at in (1, 2)] == [pair.prefill.page(at) for at in (5, 6)]


async def test_a_record_larger_than_its_slot_is_refused(pair: Pair) -> None:
    ticket = pair.ticket(0)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    with pytest.raises(Refused, match="record of 65 bytes"):
        await pair.prefill.backend.write_record(peer, b"x" * 65, 5.0)
    assert landing.take() == bytes([POISON]) * 64


async def test_a_closed_peer_writes_nothing(pair: Pair) -> None:
    ticket = pair.ticket(0)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.close_peer(peer)
    await pair.prefill.backend.close_peer(peer)
    with pytest.raises(Refused, match="closed"):
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)


async def test_a_stopped_decode_is_gone(pair: Pair) -> None:
    ticket = pair.ticket(0)
    landing = pair.decode.backend.landing(ticket, 5.0)
    await pair.decode.backend.stop()
    with pytest.raises(PeerGone):
        peer = await pair.connect(landing)
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)


async def test_pages_that_are_not_registered_are_our_own_mistake(pair: Pair) -> None:
    with pytest.raises(NotRegistered, match="page 16"):
        pair.decode.backend.landing(pair.ticket(3, 16), 5.0)
    with pytest.raises(NotRegistered, match="page -1"):
        pair.prefill.backend.regions.check([-1])


async def test_nothing_moves_when_there_is_nothing_to_move(pair: Pair) -> None:
    ticket = pair.ticket()
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(landing)
    await pair.prefill.backend.write(peer, [], 5.0)
    await pair.prefill.backend.write_record(peer, b"r", 5.0)
    assert landing.take()[:1] == b"r"


async def test_offers_of_different_memory_differ_by_name(pair: Pair) -> None:
    here = pair.decode.backend.offer()
    there = replace(here, items=(1, *here.items[1:]), version=9)
    assert here.differences(here) == ()
    assert [text.split(" ")[:2] for text in here.differences(there)] == [
        ["version", str(here.version)],
        ["region", here.names[0]],
    ]
    assert here.differences(there, ["r1"]) == (f"version {here.version} here, 9 there",)
    assert "missing here" in here.differences(replace(here, names=("x", "r1", "r2")))[0]


async def test_many_rooms_at_once_do_not_mix(pair: Pair) -> None:
    async def one(page: int) -> None:
        ticket = pair.ticket(page)
        landing = pair.decode.backend.landing(ticket, 10.0)
        peer = await pair.connect(landing)
        await pair.prefill.backend.write(peer, pair.out([PAGES - 1 - page], [page]), 10.0)
        await pair.prefill.backend.write_record(peer, b"room %d" % page, 10.0)
        assert landing.take().startswith(b"room %d\xff" % page)
        await pair.prefill.backend.close_peer(peer)
        await pair.decode.backend.fence(landing, peer.clean)

    await asyncio.gather(*(one(page) for page in range(PAGES)))
    for page in range(PAGES):
        assert pair.decode.page(page) == pair.prefill.page(PAGES - 1 - page)
    await idle(pair)

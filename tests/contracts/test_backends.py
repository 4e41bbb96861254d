"""Every transfer backend, one suite: what lands, what does not, and what is left behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from kit.wait import until

from kvplane.transfer import BACKENDS, Backend, Region, TransferMetrics, TransferSettings
from kvplane.transfer.backends import Ticket, why_unavailable
from kvplane.transfer.errors import (
    GenerationMismatch,
    NotRegistered,
    PeerGone,
    Refused,
    TransferError,
)
from kvplane.transfer.metadata import POISON
from kvplane.vocabulary import Generation, Room

PAGES, ITEM = 16, 192  # pages a side, float16 numbers of one page in one layer
SETTINGS = TransferSettings(stall_s=1.0, connect_s=1.0, fence_s=2.0)
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
    backend = BACKENDS[name](SETTINGS, TransferMetrics())
    await backend.start("127.0.0.1", [Region.of(layer) for layer in layers])
    return Side(backend, layers)


@dataclass
class Pair:
    """A prefill (sends) and a decode (lands)."""

    prefill: Side
    decode: Side

    def ticket(self, *pages: int, aux: int = 64) -> Ticket:
        return Ticket(next(sessions), Room(71), Generation("d1"), pages, aux, "prefill:1")

    async def connect(self, ticket: Ticket, generation: str = "d1"):
        offer = self.decode.backend.offer()
        return await self.prefill.backend.connect(offer, ticket, Generation(generation), 2.0)

    def out(self, sources: list[int], pages: list[int]):
        return self.prefill.backend.regions.out(sources, pages)


def members() -> list[object]:
    """Every backend; those that cannot run here are skipped and say why."""
    why = {name: why_unavailable(make) for name, make in BACKENDS.items()}
    return [
        pytest.param(name, marks=pytest.mark.skipif(why[name] is not None, reason=f"{why[name]}"))
        for name in sorted(why)
    ]


@pytest.fixture(params=members())
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    made = Pair(await side(request.param, 1), await side(request.param, 2))
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
    peer = await pair.connect(ticket)
    await pair.prefill.backend.write(peer, pair.out([2, 3, 4, 7], [9, 3, 4, 5]), 5.0)
    assert landing.landed == 4 and landing.moving.is_set()
    for source, page in zip([2, 3, 4, 7], [9, 3, 4, 5], strict=True):
        assert pair.decode.page(page) == pair.prefill.page(source)
    assert pair.decode.page(8) == untouched
    await pair.prefill.backend.close_peer(peer)
    await pair.decode.backend.fence(landing)
    await idle(pair)


async def test_several_writes_fill_one_landing_and_the_record_follows(pair: Pair) -> None:
    ticket = pair.ticket(0, 1, 2)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket)
    await pair.prefill.backend.write(peer, pair.out([5], [0]), 5.0)
    assert landing.landed == 1
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
    peer = await pair.connect(ticket)
    with pytest.raises(Refused, match=why):
        await pair.prefill.backend.write(peer, pair.out([4, 5], pages), 5.0)
    with pytest.raises(Refused, match=why):
        await asyncio.wait_for(asyncio.shield(landing.broken), 5)
    assert [pair.decode.page(number) for number in range(PAGES)] == before


async def test_a_page_cannot_be_written_twice(pair: Pair) -> None:
    ticket = pair.ticket(0, 1)
    pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket)
    await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    with pytest.raises(Refused, match="written before"):
        await pair.prefill.backend.write(peer, pair.out([5], [0]), 5.0)
    assert pair.decode.page(0) == pair.prefill.page(4)


async def test_data_for_another_generation_of_the_decode_is_refused(pair: Pair) -> None:
    ticket = pair.ticket(0)
    before = pair.decode.page(0)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket, generation="d0")
    with pytest.raises(TransferError):
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    with pytest.raises(GenerationMismatch):
        await asyncio.wait_for(asyncio.shield(landing.broken), 5)
    assert pair.decode.page(0) == before


async def test_an_unknown_session_is_refused(pair: Pair) -> None:
    peer = await pair.connect(pair.ticket(0))
    with pytest.raises(Refused, match="unknown"):
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)


async def test_after_the_fence_nothing_lands(pair: Pair) -> None:
    ticket = pair.ticket(0, 1)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket)
    await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)
    await pair.decode.backend.fence(landing)
    await pair.decode.backend.fence(landing)
    before = pair.decode.page(1)
    with pytest.raises((Refused, PeerGone)):
        await pair.prefill.backend.write(peer, pair.out([5], [1]), 5.0)
    assert pair.decode.page(1) == before
    await pair.prefill.backend.close_peer(peer)
    await idle(pair)


async def test_a_record_larger_than_its_slot_is_refused(pair: Pair) -> None:
    ticket = pair.ticket(0)
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket)
    with pytest.raises(Refused, match="record of 65 bytes"):
        await pair.prefill.backend.write_record(peer, b"x" * 65, 5.0)
    assert landing.take() == bytes([POISON]) * 64


async def test_a_closed_peer_writes_nothing(pair: Pair) -> None:
    ticket = pair.ticket(0)
    pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket)
    await pair.prefill.backend.close_peer(peer)
    await pair.prefill.backend.close_peer(peer)
    with pytest.raises(Refused, match="closed"):
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)


async def test_a_stopped_decode_is_gone(pair: Pair) -> None:
    ticket = pair.ticket(0)
    await pair.decode.backend.stop()
    with pytest.raises(PeerGone):
        peer = await pair.connect(ticket)
        await pair.prefill.backend.write(peer, pair.out([4], [0]), 5.0)


async def test_pages_that_are_not_registered_are_our_own_mistake(pair: Pair) -> None:
    with pytest.raises(NotRegistered, match="page 16"):
        pair.decode.backend.landing(pair.ticket(3, 16), 5.0)
    with pytest.raises(NotRegistered, match="page -1"):
        pair.prefill.backend.regions.check([-1])


async def test_nothing_moves_when_there_is_nothing_to_move(pair: Pair) -> None:
    ticket = pair.ticket()
    landing = pair.decode.backend.landing(ticket, 5.0)
    peer = await pair.connect(ticket)
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
        peer = await pair.connect(ticket)
        await pair.prefill.backend.write(peer, pair.out([PAGES - 1 - page], [page]), 10.0)
        await pair.prefill.backend.write_record(peer, b"room %d" % page, 10.0)
        assert landing.take().startswith(b"room %d\xff" % page)
        await pair.prefill.backend.close_peer(peer)
        await pair.decode.backend.fence(landing)

    await asyncio.gather(*(one(page) for page in range(PAGES)))
    for page in range(PAGES):
        assert pair.decode.page(page) == pair.prefill.page(PAGES - 1 - page)
    await idle(pair)

"""One-sided backends over a stand-in engine: sessions, deadlines and fences, without a library."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kit.onesided import StandInBackend, StandInEngine
from kit.wait import until

from kvplane.transfer import (
    ChecksumMismatch,
    DeadlineExceeded,
    PageOut,
    PeerGone,
    Refused,
    Region,
    Stalled,
    TransferError,
    TransferMetrics,
    TransferSettings,
    Untouched,
    flip_byte,
)
from kvplane.transfer.backends import Landing, Peer, Ticket
from kvplane.transfer.backends.onesided_session import MOST_RETIRED
from kvplane.vocabulary import Generation, Room, Stage

PAGES, BYTES = 16, 64
LATE_S = 0.5  # deadline of a write that the library has long begun by then
SETTINGS = TransferSettings(fence_s=0.2, send_threads=4, slot_bytes=4096)


class Rank:
    """Memory and its backend."""

    async def start(self, fill: int, settings: TransferSettings = SETTINGS) -> Rank:
        self.memory = np.full((PAGES, BYTES), fill, np.uint8)
        self.backend = StandInBackend(settings, TransferMetrics())
        await self.backend.start("127.0.0.1", [Region.of(self.memory)])
        return self

    @property
    def engine(self) -> StandInEngine:
        return self.backend.engine

    def landing(self, *pages: int, aux: int = 64) -> Landing:
        ticket = Ticket(1, Room(71), Generation("d1"), pages, aux, "prefill:1")
        return self.backend.landing(ticket, 5.0)

    async def connect(self, landing: Landing) -> Peer:
        return await self.backend.connect(landing.offer, landing.ticket, Generation("d1"), 2.0)

    async def write(self, peer: Peer, *pages: int, deadline_s: float = 5.0) -> None:
        await self.backend.write(peer, self.backend.regions.out(pages, pages), deadline_s)


async def fenced(rank: Rank, landing: Landing, clean: bool = False) -> None:
    """As the puller does it: again until it is."""

    async def once() -> bool:
        try:
            await rank.backend.fence(landing, clean=clean)
        except Stalled:
            return False
        return True

    await until(once)


@pytest.fixture
async def prefill() -> AsyncIterator[Rank]:
    rank = await Rank().start(7)
    yield rank
    await rank.backend.stop()


@pytest.fixture
async def decode() -> AsyncIterator[Rank]:
    rank = await Rank().start(0)
    yield rank
    for engine in list(StandInEngine.living.values()):
        engine.awake.set()
        engine.closing.set()
    await rank.backend.stop()


async def test_our_deadline_counts_and_the_peer_is_not_clean_until_the_library_answers(
    prefill: Rank, decode: Rank
) -> None:
    landing = decode.landing(0, 1)
    peer = await prefill.connect(landing)
    decode.engine.awake.clear()
    with pytest.raises(Stalled, match="not confirmed within its deadline"):
        await prefill.write(peer, 0, deadline_s=LATE_S)
    assert not peer.clean and prefill.backend.counts()["writing"] == 1
    decode.engine.awake.set()
    await until(lambda: peer.clean)
    assert decode.memory[0].tolist() == [7] * BYTES, "it landed after all"


@pytest.mark.parametrize("wakes", [True, False])
async def test_source_pages_are_given_back_when_no_library_reads_them_or_it_is_counted(
    decode: Rank, wakes: bool
) -> None:
    prefill = await Rank().start(7, replace(SETTINGS, fence_s=20.0 if wakes else 0.05))
    peer = await prefill.connect(decode.landing(0))
    decode.engine.awake.clear()
    with pytest.raises(Stalled):
        await prefill.write(peer, 0, deadline_s=LATE_S)
    closing = asyncio.ensure_future(prefill.backend.close_peer(peer))
    if wakes:
        await asyncio.wait({closing}, timeout=0.1)
        assert not closing.done(), "the library may still read the page"
        decode.engine.awake.set()
    await asyncio.wait_for(closing, 10)
    assert prefill.backend._metrics.abandoned._value.get() == (0 if wakes else 1)
    decode.engine.awake.set()
    await prefill.backend.stop()


async def test_staged_bytes_stay_until_the_library_has_read_them(
    prefill: Rank, decode: Rank
) -> None:
    landing = decode.landing(0)
    peer = await prefill.connect(landing)
    decode.engine.awake.clear()
    with pytest.raises(Stalled):
        await prefill.backend.write_record(peer, b"record", LATE_S)
    slots = prefill.backend._sessions.current.slots
    other = slots.take(64)  # who stages next
    assert other is not None
    other.view[:] = b"x" * 64
    decode.engine.awake.set()
    await until(lambda: peer.clean)
    assert landing.take().startswith(b"record\xff")
    slots.give(other)
    assert len(slots) == 0


async def test_a_cancelled_write_goes_on_in_its_thread_and_is_counted(
    prefill: Rank, decode: Rank
) -> None:
    peer = await prefill.connect(decode.landing(0))
    decode.engine.awake.clear()
    writing = asyncio.create_task(prefill.write(peer, 0))
    await until(lambda: prefill.engine.writes)
    writing.cancel()
    await asyncio.wait([writing])
    assert writing.cancelled() and not peer.clean
    await prefill.backend.close_peer(peer)
    decode.engine.awake.set()
    await until(lambda: not any(prefill.backend.counts().values()))


async def test_an_unclean_landing_is_fenced_when_its_whole_session_has_ended(
    prefill: Rank, decode: Rank
) -> None:
    first, second = decode.landing(0), decode.landing(1)
    sleeper, other = await prefill.connect(first), await prefill.connect(second)
    decode.engine.awake.clear()
    with pytest.raises(Stalled):
        await prefill.write(sleeper, 0, deadline_s=LATE_S)
    with pytest.raises(Stalled, match="1 others still use the session"):
        await decode.backend.fence(first, clean=False)
    assert decode.landing(2).offer != second.offer, "new landings use another session"
    decode_engine = StandInEngine.living[second.session.engine.session]  # type: ignore[attr-defined]
    await decode.backend.fence(second, clean=True)
    await fenced(decode, first)
    decode_engine.awake.set()  # it wakes up, and writes
    await until(lambda: prefill.backend.counts()["writing"] == 0)
    assert not decode.memory.any() and not sleeper.clean
    with pytest.raises(PeerGone):
        await prefill.write(other, 1)
    await prefill.backend.close_peer(sleeper)
    await prefill.backend.close_peer(other)


async def test_a_clean_landing_is_free_at_once_and_its_slot_too(decode: Rank) -> None:
    offer = decode.backend.offer()
    for _ in range(200):
        landing = decode.landing(0, aux=1024)
        await decode.backend.fence(landing, clean=True)
        await decode.backend.fence(landing, clean=True)
    assert decode.backend.offer() == offer
    assert not any(decode.backend.counts().values())


async def test_slots_have_an_end_and_it_is_said(decode: Rank) -> None:
    held = [decode.landing(0, aux=1024) for _ in range(4)]
    with pytest.raises(Refused, match="no free slot of 1024 bytes, 4 are taken"):
        decode.landing(0, aux=1024)
    await decode.backend.fence(held[1], clean=True)
    decode.landing(0, aux=1000)


async def test_sessions_that_cannot_end_are_bounded(decode: Rank) -> None:
    held = [decode.landing(1)]
    for _ in range(MOST_RETIRED):
        held.append(decode.landing(1))
        with pytest.raises(Stalled, match="others still use"):
            await decode.backend.fence(held[-1], clean=False)
        held.append(decode.landing(1))
    with pytest.raises(Stalled, match=f"{MOST_RETIRED} sessions wait"):
        await decode.backend.fence(held[-1], clean=False)
    assert decode.backend.counts()["retired"] == MOST_RETIRED
    for landing in held:
        await fenced(decode, landing, clean=True)
    await until(lambda: decode.backend.counts()["retired"] == 0)


async def test_a_session_that_does_not_end_keeps_its_pages(decode: Rank) -> None:
    landing = decode.landing(0)
    decode.engine.closing.clear()
    for _ in range(2):
        with pytest.raises(Stalled, match="0 others still use the session"):
            await decode.backend.fence(landing, clean=False)
    assert decode.backend.counts()["landings"] == 1
    StandInEngine.living[landing.session.engine.session].closing.set()  # type: ignore[attr-defined]
    await fenced(decode, landing)
    assert not any(decode.backend.counts().values())


async def test_a_silent_process_never_takes_all_threads(prefill: Rank, decode: Rank) -> None:
    """FR-TR-10: one sick member does not slow the others."""
    sick = await Rank().start(0)
    landings = [sick.landing(page) for page in range(8)]
    peers = [await prefill.connect(landing) for landing in landings]
    sick.engine.awake.clear()
    writes = [
        asyncio.create_task(prefill.write(peer, page, deadline_s=20))
        for page, peer in enumerate(peers)
    ]
    await until(lambda: prefill.backend.counts()["writing"] == SETTINGS.send_threads // 2)
    fine = await prefill.connect(decode.landing(3))
    await asyncio.wait_for(prefill.write(fine, 3), 5)
    assert decode.memory[3].all() and not any(write.done() for write in writes)
    sick.engine.awake.set()
    await asyncio.gather(*writes)
    assert all(peer.clean for peer in peers)
    await sick.backend.stop()


async def test_who_waited_for_a_thread_until_its_deadline_sent_nothing(
    prefill: Rank, decode: Rank
) -> None:
    peers = [await prefill.connect(decode.landing(page)) for page in range(3)]
    decode.engine.awake.clear()
    stuck = [asyncio.create_task(prefill.write(peers[at], at, deadline_s=20)) for at in (0, 1)]
    await until(lambda: prefill.backend.counts()["writing"] == 2)
    with pytest.raises(Stalled):
        await prefill.write(peers[2], 2, deadline_s=0.05)
    assert peers[2].clean
    decode.engine.awake.set()
    await asyncio.gather(*stuck)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"grant": b""}, "offer or grant"),
        ({"grant": b"\xc1"}, "offer or grant"),
        ({"blob": b"\x81\xa7session"}, "offer or grant"),
        ({"names": ("r0", "r1")}, "1 spans for 2 regions"),
        ({"items": (10**9,)}, "outside the offered memory"),
        ({"items": (0,)}, "outside the offered memory"),
        ({"pages": (PAGES,)}, "outside the offered memory"),
        ({"aux_bytes": 1000}, "slot of 64 bytes"),
        ({"regions": ("l9",)}, "region 'l9' is not in the offer"),
    ],
)
async def test_an_offer_that_cannot_be_is_refused_before_anything_is_dialled(
    prefill: Rank, decode: Rank, change: dict[str, object], why: str
) -> None:
    landing = decode.landing(0)
    ticket, offer = landing.ticket, landing.offer
    mine = {name: value for name, value in change.items() if hasattr(ticket, name)}
    theirs = {name: value for name, value in change.items() if name not in mine}
    with pytest.raises(Refused, match=why) as caught:
        await prefill.backend.connect(
            replace(offer, **theirs), replace(ticket, **mine), Generation("d1"), 1.0
        )
    assert caught.value.stage is Stage.CONNECT
    assert prefill.engine.reached == [] and prefill.backend.counts()["peers"] == 0


async def test_a_grant_of_another_life_is_refused(prefill: Rank, decode: Rank) -> None:
    old = decode.landing(0)
    await fenced(decode, old)
    mixed = replace(old.ticket, grant=old.ticket.grant)
    with pytest.raises(Refused, match="another life"):
        await prefill.backend.connect(decode.backend.offer(), mixed, Generation("d1"), 1.0)
    with pytest.raises(PeerGone):
        await prefill.connect(old)


async def test_everything_is_given_back(prefill: Rank, decode: Rank) -> None:
    landing = decode.landing(*range(PAGES))
    peer = await prefill.connect(landing)
    await prefill.write(peer, *range(PAGES))
    await prefill.backend.write_record(peer, b"record", 5.0)
    assert len(prefill.backend._sessions.current.slots) == 0, "nothing stays staged"
    assert landing.take().startswith(b"record\xff")
    await prefill.backend.close_peer(peer)
    await until(lambda: prefill.engine.reached == [])
    await decode.backend.fence(landing, clean=True)
    assert not any(decode.backend.counts().values())
    assert (decode.memory == 7).all()


async def test_a_failed_room_of_a_clean_sender_ends_no_session(make_rig: Any) -> None:
    class Flips(Untouched):
        def pages(self, room: Room, pages: list[PageOut]) -> list[PageOut]:
            return flip_byte(pages, 99)

    rig = await make_rig(tamper=Flips(), backend="stand-in")
    before = rig.backends[1].offer()
    for room in range(71, 81):
        pulled, _ = await rig.both(room, [4, 5, 6], [1, 2, 3])
        assert isinstance(pulled, ChecksumMismatch)
    await rig.idle()
    assert rig.backends[1].offer() == before and len(rig.released) == 10


async def test_a_room_that_nobody_delivered_ends_no_session(make_rig: Any) -> None:
    rig = await make_rig(backend="stand-in")
    before = rig.backends[1].offer()
    with pytest.raises(DeadlineExceeded):
        await rig.pull(71, [1, 2, 3], deadline_s=0.3)
    await rig.idle()
    pulling = asyncio.create_task(rig.pull(72, [1, 2, 3]))
    await until(lambda: rig.offers.counts()["rooms"])
    pulling.cancel()
    await until(lambda: len(rig.released) == 2)
    await rig.idle()
    assert rig.backends[1].offer() == before


async def test_pages_stay_away_until_the_session_of_an_unclean_sender_has_ended(
    make_rig: Any,
) -> None:
    rig = await make_rig(backend="stand-in")
    engine, before = rig.backends[1].engine, rig.page(rig.decode_memory, 1)
    engine.awake.clear()
    engine.closing.clear()
    pulling = asyncio.create_task(rig.pull(71, [1]))
    with pytest.raises(TransferError):
        await rig.deliver(71, [4], deadline_s=0.3)
    with pytest.raises(TransferError):
        await asyncio.wait_for(pulling, 5)
    await until(lambda: rig.backends[1].counts()["retired"])
    assert rig.released == [] and len(rig.puller.quarantine) == 1
    assert rig.metrics.quarantined._value.get() == 1
    engine.closing.set()
    await until(lambda: rig.released == [(1,)])
    engine.awake.set()
    await rig.idle()
    assert rig.page(rig.decode_memory, 1) == before
    await rig.recovers()


async def test_a_sender_whose_connection_breaks_in_the_middle_is_not_clean(make_rig: Any) -> None:
    """A prefill that was killed, or cut off: nobody is left to say that no write is under way."""
    rig = await make_rig(backend="stand-in")
    engine, before = rig.backends[1].engine, rig.page(rig.decode_memory, 1)
    engine.awake.clear()
    engine.closing.clear()
    pulling = asyncio.create_task(rig.pull(71, [1]))
    delivering = asyncio.create_task(rig.deliver(71, [4]))
    await until(lambda: rig.backends[0].counts()["writing"])
    for connection in rig.offers._connections:
        connection.cancel()
    with pytest.raises(PeerGone):
        await asyncio.wait_for(pulling, 5)
    await until(lambda: rig.backends[1].counts()["retired"])
    assert rig.released == [] and len(rig.puller.quarantine) == 1
    engine.closing.set()
    await until(lambda: rig.released == [(1,)])
    engine.awake.set()
    delivering.cancel()
    await asyncio.gather(delivering, return_exceptions=True)
    await rig.idle()
    assert rig.page(rig.decode_memory, 1) == before
    await rig.recovers()


async def test_an_engine_that_is_worn_is_replaced_without_harm(prefill: Rank, decode: Rank) -> None:
    old, keeper = prefill.engine, await prefill.connect(decode.landing(0))
    leaver = await prefill.connect(decode.landing(1))
    old.worn = True
    await prefill.backend.close_peer(leaver)
    await until(lambda: prefill.engine is not old)
    await prefill.write(keeper, 0)
    assert decode.memory[0].all() and old.session in StandInEngine.living
    await prefill.backend.close_peer(keeper)
    await until(lambda: old.session not in StandInEngine.living)

"""Prefill and decode cut into ranks: each part of a page arrives from whoever has it, or the room
fails as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from kit.wait import until
from msgspec.structs import replace as struct_replace

from kvplane.runtime import SystemClock
from kvplane.transfer import (
    BACKENDS,
    ChecksumMismatch,
    DeadlineExceeded,
    Grid,
    Layout,
    LayoutMismatch,
    LeaseExpired,
    Metadata,
    Offers,
    PeerGone,
    PrefillFailed,
    Puller,
    Refused,
    Region,
    TransferError,
    TransferMetrics,
    TransferSettings,
    Untouched,
    flip_byte,
    owned,
)
from kvplane.transfer.shards import shared
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape, StageRecord

from .conftest import FakeEndpoint, FakeResolver

PAGES, LAYERS, HEADS = 12, 2, 4
LAYOUT = Layout("tiny", 16, "float16", LAYERS, HEADS, 16, 4096)
SETTINGS = TransferSettings(
    bootstrapping_s=3.0, connect_s=2.0, stall_s=1.0, verdict_s=1.0, hello_s=2.0, fence_s=2.0,
    hold_every_s=0.05,
)  # fmt: skip
TRIPLE = BootstrapTriple("127.0.0.1", 8998, Room(71))
CUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]
PAIRS = [(p, d) for p, d in product(CUTS, CUTS) if d[1] in (p[1], 1)]


class Flip(Untouched):
    """One bit of one page is wrong as it leaves."""

    def pages(self, room: Room, pages: list[Any]) -> list[Any]:
        return flip_byte(pages, 33)


@dataclass
class Side:
    """Whole pages, and the regions of each rank in them."""

    tp: int
    pp: int
    pool: list[np.ndarray]  # per layer [K/V, head, page, token, dim]
    backends: dict[tuple[int, int], Any] = field(default_factory=dict)

    def grids(self) -> list[Grid]:
        cells = product(range(self.tp), range(self.pp))
        return [Grid(self.tp, self.pp, *cell) for cell in cells]

    def regions(self, grid: Grid) -> list[Region]:
        found = []
        for name in owned(LAYOUT, grid):
            layer, rest = name[1:].split(".")
            part = self.pool[int(layer)]["kv".index(rest[0])][int(rest[1:])]
            found.append(Region.of(part, name))
        return found

    def page(self, number: int) -> bytes:
        return b"".join(np.ascontiguousarray(layer[:, :, number]).tobytes() for layer in self.pool)


@dataclass
class Grids:
    """All ranks of a prefill and of a decode."""

    prefill: Side
    decode: Side
    metrics: TransferMetrics = field(default_factory=TransferMetrics)
    records: list[StageRecord] = field(default_factory=list)
    offers: dict[tuple[int, int], Offers] = field(default_factory=dict)
    pullers: dict[tuple[int, int], Puller] = field(default_factory=dict)
    released: list[tuple[int, ...]] = field(default_factory=list)
    resolver: FakeResolver = field(default_factory=lambda: FakeResolver({}))
    settings: TransferSettings = SETTINGS
    triple: BootstrapTriple = TRIPLE

    async def start(self, tampers: dict[tuple[int, int], Any] | None = None) -> None:
        clock, shape = SystemClock(), Shape(tp=self.decode.tp, pp=self.decode.pp)
        self.resolver.shape = Shape(tp=self.prefill.tp, pp=self.prefill.pp, page_size=16)
        for side, grid in [(s, g) for s in (self.prefill, self.decode) for g in s.grids()]:
            at = grid.tp_rank, grid.pp_rank
            backend = side.backends[at] = BACKENDS["tcp"](self.settings, self.metrics)
            await backend.start("127.0.0.1", side.regions(grid))
            if side is self.prefill:
                tamper = (tampers or {}).get(at, Untouched())
                offers = self.offers[at] = Offers(
                    backend, LAYOUT, Generation("p1"), self.records.append, clock,
                    self.settings, self.metrics, tamper, by=f"prefill {at}",
                )  # fmt: skip
                self.resolver.ranks[at] = FakeEndpoint("127.0.0.1", await offers.start("127.0.0.1"))
            else:
                self.pullers[at] = Puller(
                    backend, LAYOUT, self.resolver, Generation("d1"), self.records.append, clock,
                    self.settings, self.metrics, shape, f"decode {at}",
                    tp_rank=grid.tp_rank, pp_rank=grid.pp_rank,
                )  # fmt: skip

    async def pull(self, at: tuple[int, int], pages: list[int], deadline_s: float = 4.0) -> Any:
        return await self.pullers[at].pull(
            self.triple, pages, 64, deadline_s=deadline_s,
            released=lambda given: self.released.append(tuple(given)),
        )  # fmt: skip

    async def deliver(self, at: tuple[int, int], pages: list[int], first: int = 7) -> None:
        room = self.triple.room
        said = Metadata(room, tokens=64, first_token=first)
        await self.offers[at].deliver(room, pages, said, 4.0)

    async def all(self, sources: list[int], pages: list[int]) -> tuple[list[Any], list[Any]]:
        """(what each decode rank got, what each prefill rank got): results or errors."""
        work = [self.pull(at, pages) for at in self.pullers]
        work += [self.deliver(at, sources) for at in self.offers]
        done = await asyncio.gather(*work, return_exceptions=True)
        return done[: len(self.pullers)], done[len(self.pullers) :]

    async def idle(self) -> None:
        held = [*self.offers.values(), *self.pullers.values()]
        held += [*self.prefill.backends.values(), *self.decode.backends.values()]
        await until(lambda: not any(any(one.counts().values()) for one in held), 5)
        assert self.metrics.quarantined._value.get() == 0

    async def close(self) -> None:
        for one in (*self.pullers.values(), *self.offers.values()):
            await one.close()
        for one in (*self.prefill.backends.values(), *self.decode.backends.values()):
            await one.stop()


class MakeGrids:
    def __init__(self) -> None:
        self._made: list[Grids] = []

    async def __call__(
        self,
        prefill: tuple[int, int],
        decode: tuple[int, int],
        tampers: dict[tuple[int, int], Any] | None = None,
        **settings: Any,
    ) -> Grids:
        sides = []
        for seed, cut in ((1, prefill), (2, decode)):
            random = np.random.default_rng(seed)
            shape = (2, HEADS, PAGES, 16, 16)
            pool = [random.random(shape).astype(np.float16) for _ in range(LAYERS)]
            sides.append(Side(*cut, pool))
        made = Grids(*sides, settings=replace(SETTINGS, **settings))
        self._made.append(made)
        await made.start(tampers)
        return made

    async def close(self) -> None:
        for made in self._made:
            await made.close()


@pytest.fixture
async def grids() -> AsyncIterator[MakeGrids]:
    made = MakeGrids()
    yield made
    await made.close()


@pytest.mark.parametrize(("prefill", "decode"), PAIRS, ids=str)
async def test_whole_pages_arrive_between_ranks_of_any_cut(grids, prefill, decode) -> None:
    rig = await grids(prefill, decode)
    untouched = rig.decode.page(0)
    pulled, delivered = await rig.all([3, 4, 9], [5, 1, 2])
    assert all(got.first_token == 7 for got in pulled) and delivered == [None] * len(rig.offers)
    for source, page in ((3, 5), (4, 1), (9, 2)):
        assert rig.prefill.page(source) == rig.decode.page(page)
    assert rig.decode.page(0) == untouched and not rig.released
    await rig.idle()


@pytest.mark.parametrize(
    ("prefill", "decode"), [((4, 1), (1, 1)), ((2, 2), (1, 1)), ((1, 1), (2, 1))], ids=str
)
async def test_one_wrong_bit_in_one_part_fails_the_room_for_all(grids, prefill, decode) -> None:
    """FR-TR-03 of a single shard: nobody hears a good verdict."""
    rig = await grids(prefill, decode, {(0, 0): Flip()})
    pulled, delivered = await rig.all([3, 4], [5, 1])
    assert any(isinstance(got, ChecksumMismatch) for got in pulled)
    assert all(isinstance(got, TransferError) for got in delivered)
    failed = [got for got in pulled if isinstance(got, Exception)]
    await until(lambda: rig.released == [(5, 1)] * len(failed), what="each released once")
    await rig.idle()


async def test_one_shard_in_the_place_of_another_is_refused(grids) -> None:
    """FR-TR-03: tp shard 1 twice. The directory leads to rank 1 where rank 0 was asked for."""
    rig = await grids((2, 1), (1, 1))
    before = rig.decode.page(5)
    rig.resolver.ranks[0, 0] = rig.resolver.ranks[1, 0]
    sent = asyncio.ensure_future(rig.deliver((1, 0), [3]))
    with pytest.raises(LayoutMismatch, match=r"region l0\.k0 missing here") as caught:
        await rig.pull((0, 0), [5])
    assert caught.value.part == "prefill tp=0"
    with pytest.raises(TransferError):
        rig.offers[1, 0].fail(Room(71), "test over")
        await sent
    assert rig.decode.page(5) == before and rig.released == [(5,)]
    await rig.idle()


async def test_a_prefill_rank_that_never_delivers_is_named(grids) -> None:
    """FR-TR-04 (d): completion of 3 of 4 shards."""
    rig = await grids((4, 1), (1, 1))
    work = [rig.deliver((tp, 0), [3]) for tp in range(3)]
    sent = asyncio.gather(*work, return_exceptions=True)
    with pytest.raises(DeadlineExceeded) as caught:
        await rig.pull((0, 0), [5], deadline_s=0.5)
    silent = rig.resolver.ranks[3, 0]
    assert f"{silent.host}:{silent.port}" in str(caught.value)
    assert "commit not within 0.5 s" in str(caught.value)
    assert all(isinstance(got, TransferError) for got in await sent)
    rig.offers[3, 0].fail(Room(71), "test over")
    await until(lambda: rig.released == [(5,)])
    await rig.idle()


async def test_a_rank_that_says_it_cannot_deliver_fails_the_others_at_once(grids) -> None:
    """FR-TR-04 (b): told, not waited for."""
    rig = await grids((2, 1), (1, 1))
    sent = asyncio.ensure_future(rig.deliver((0, 0), [3]))
    pull = asyncio.ensure_future(rig.pull((0, 0), [5]))
    await until(lambda: any(rig.offers[1, 0].counts().values()))
    rig.offers[1, 0].fail(Room(71), "could not post")
    with pytest.raises(PrefillFailed, match="could not post"):
        await asyncio.wait_for(pull, 10)
    with pytest.raises(TransferError):
        await asyncio.wait_for(sent, 10)
    await rig.idle()


async def test_a_decode_rank_that_never_comes_is_named(grids) -> None:
    rig = await grids((1, 1), (2, 1), bootstrapping_s=0.3)
    pull = asyncio.ensure_future(rig.pull((0, 0), [5]))
    with pytest.raises(LeaseExpired, match="rank 1 of 2"):
        await rig.deliver((0, 0), [3])
    with pytest.raises(PrefillFailed, match="lease expired"):
        await pull
    await rig.idle()


async def test_ranks_that_disagree_about_the_first_token_are_not_believed(grids) -> None:
    rig = await grids((2, 1), (1, 1))
    sent = asyncio.gather(
        rig.deliver((0, 0), [3], 7), rig.deliver((1, 0), [3], 8), return_exceptions=True
    )
    with pytest.raises(Refused, match="its ranks disagree: first token 7 and 8"):
        await rig.pull((0, 0), [5])
    assert all(isinstance(got, Refused) for got in await sent)
    await rig.idle()


@pytest.mark.parametrize("tolerated", [(), ("dtype", "revision")], ids=["refused", "tolerated"])
async def test_layouts_that_differ_are_refused_unless_told_otherwise(grids, tolerated) -> None:
    """FR-TR-01: every differing field by name, nothing sent; the escape is a setting by field."""
    rig = await grids((1, 1), (1, 1), tolerated=tolerated)
    puller = rig.pullers[0, 0]
    other = replace(LAYOUT, dtype="fp8", revision=9, speculative="eagle")
    puller._side = replace(puller._side, layout=other)
    before = rig.decode.page(5)
    with pytest.raises(LayoutMismatch) as caught:
        await rig.pull((0, 0), [5])
    names = [field.split()[0] for field in caught.value.fields]
    assert names == ["speculative"] if tolerated else ["dtype", "revision", "speculative"]
    assert rig.decode.page(5) == before
    puller._side = replace(puller._side, layout=replace(other, speculative=""))
    if tolerated:
        pulled, _ = await rig.all([3], [5])
        assert pulled[0].first_token == 7
    await until(lambda: not any(puller.counts().values()))


async def test_cuts_that_leave_a_part_out_are_refused_before_anything_is_sent(grids) -> None:
    rig = await grids((2, 1), (1, 1))
    rig.resolver.shape = Shape(tp=3, page_size=16)
    with pytest.raises(LayoutMismatch, match="tp 3: must divide 4"):
        await rig.pull((0, 0), [5])
    assert rig.released == [(5,)]


@pytest.mark.parametrize("prefill", [(2, 1), (1, 1)], ids=str)
async def test_a_part_that_would_come_from_two_ranks_is_refused(grids, prefill) -> None:
    """A prefill whose context ranks all send: two writers of one page cannot be told apart."""
    rig = await grids(prefill, (1, 1))
    rig.resolver.shape = Shape(tp=prefill[0], cp=2, page_size=16)
    rig.resolver.more = {"enable_dsa_cache_layer_split": True}
    said = r"region l0\.k0: comes from 2 prefill ranks, must be one"
    with pytest.raises(LayoutMismatch, match=said) as caught:
        await rig.pull((0, 0), [5])
    assert caught.value.stage.value == "resolve-topology"
    assert rig.resolver.asked == [] and rig.released == [(5,)]


async def test_a_prefill_that_died_ends_its_rooms_at_once(grids) -> None:
    """FR-TR-07: whoever watches the bootstrap server says so; nobody waits for a deadline."""
    rig = await grids((2, 1), (1, 1))
    pull = asyncio.ensure_future(rig.pull((0, 0), [5]))
    await until(lambda: all(o.counts()["rooms"] for o in rig.offers.values()))
    rig.pullers[0, 0].gone("127.0.0.1:89980", None, "another address")
    rig.pullers[0, 0].gone("127.0.0.1:8998", Generation("p1"), "generation p1 is gone")
    with pytest.raises(PeerGone, match=r"127.0.0.1:8998 is gone: generation p1 is gone"):
        await asyncio.wait_for(pull, 10)
    await until(lambda: rig.released == [(5,)])
    await rig.idle()


async def test_what_one_decode_rank_found_is_told_to_the_prefills_of_the_others(grids) -> None:
    """Also where they are cancelled in the same moment: the prefill names the culprit too."""
    rig = await grids((1, 1), (1, 1))
    offers, puller = rig.offers[0, 0], rig.pullers[0, 0]
    pull = asyncio.ensure_future(rig.pull((0, 0), [5]))
    await until(lambda: offers.counts()["rooms"])
    puller.give_up(Room(72), "another room")
    puller.give_up(Room(71), "rank tp=1: short data")
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await until(lambda: not offers.counts()["rooms"])
    with pytest.raises(Refused, match=r"verify: .*rank tp=1: short data"):
        await rig.deliver((0, 0), [3])
    await rig.idle()


async def test_a_request_in_the_queue_keeps_its_kv_alive(grids) -> None:
    """FR-TR-05: a lease of 0.6 s, a queue of 1.8 s; renewed, the answer is right."""
    rig = await grids((2, 1), (1, 1), bootstrapping_s=0.6)
    sent = asyncio.gather(*(rig.deliver(at, [3]) for at in rig.offers))
    async with rig.pullers[0, 0].holding(rig.triple):
        loop = asyncio.get_running_loop()
        served_at = loop.time() + 1.8  # the queue is three leases long
        await until(lambda: loop.time() > served_at)
        got = await rig.pull((0, 0), [5])
    assert got.first_token == 7 and await sent == [None, None]
    assert rig.prefill.page(3) == rig.decode.page(5)
    await rig.idle()


@pytest.mark.parametrize("moment", range(4))
async def test_who_is_cancelled_while_it_stops_holding_holds_nothing(grids, moment: int) -> None:
    rig = await grids((1, 1), (1, 1))
    came = asyncio.Event()

    async def queue() -> None:
        async with rig.pullers[0, 0].holding(rig.triple):
            await came.wait()

    queueing = asyncio.create_task(queue())
    await until(lambda: rig.offers[0, 0].counts()["connections"] == 1)
    came.set()
    for _ in range(moment):
        await asyncio.sleep(0)
    queueing.cancel()
    await asyncio.wait({queueing})
    await until(lambda: not any(rig.pullers[0, 0].counts().values()))
    await rig.idle()


async def test_a_lease_is_not_renewed_for_ever(grids, caplog) -> None:
    rig = await grids((1, 1), (1, 1), bootstrapping_s=0.2, most_hold_s=0.6)
    sent = asyncio.ensure_future(rig.deliver((0, 0), [3]))
    async with rig.pullers[0, 0].holding(rig.triple):
        with pytest.raises(TransferError, match=r"its bind not within 0\.6 s|lease expired"):
            await asyncio.wait_for(sent, 5)
        await until(lambda: "held too long room=71" in caplog.text, 5)
    await rig.idle()


async def test_a_queue_longer_than_the_lease_fails_by_name(grids) -> None:
    """FR-TR-05 without renewal: `verify: lease expired`, never an answer; and it is counted."""
    rig = await grids((1, 1), (1, 1), bootstrapping_s=0.2)
    with pytest.raises(LeaseExpired):
        await rig.deliver((0, 0), [3])
    with pytest.raises(Refused, match=r"lease expired, room 71 was kept for 0.2 s") as caught:
        await rig.pull((0, 0), [5])
    assert caught.value.stage.value == "verify"
    assert rig.metrics.refused.labels("control", "lease")._value.get() == 1
    await rig.idle()


async def test_rooms_that_wait_have_a_bound_on_their_pages_too(grids) -> None:
    rig = await grids((1, 1), (1, 1), most_bound_pages=5)
    first = asyncio.ensure_future(rig.pull((0, 0), [1, 2, 3]))
    offers = rig.offers[0, 0]
    await until(lambda: offers.counts()["rooms"])
    with pytest.raises(Refused, match="3 pages of 1 rooms wait already"):
        await rig.pullers[0, 0].pull(
            struct_replace(rig.triple, room=Room(72)), [4, 5, 6], 64, deadline_s=3, released=print
        )
    offers.fail(Room(71), "test over")
    with pytest.raises(PrefillFailed):
        await first
    rig.triple = struct_replace(rig.triple, room=Room(73))
    pulled, delivered = await rig.all([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
    assert pulled[0].pages == 5 and delivered == [None], "given back: all five fit again"
    await rig.idle()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_part_lies_on_exactly_one_rank(cut: tuple[int, int]) -> None:
    grids = Side(*cut, []).grids()
    parts = [name for grid in grids for name in owned(LAYOUT, grid)]
    assert sorted(parts) == sorted(owned(LAYOUT, Grid())) and len(parts) == 2 * LAYERS * HEADS
    assert shared(owned(LAYOUT, grids[0]), owned(LAYOUT, Grid())) == owned(LAYOUT, grids[0])

"""Whatever breaks between the sender's memory and the receiver's verify ends as a named failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kit.wait import until

from kvplane.transfer import (
    BadMetadata,
    ChecksumMismatch,
    DeadlineExceeded,
    GenerationMismatch,
    Metadata,
    PageOut,
    PeerGone,
    PrefillFailed,
    Refused,
    RoomMismatch,
    ShortData,
    TransferError,
    Untouched,
    drop_last,
    flip_byte,
    foreign_room,
    stale_generation,
    swap_pages,
)
from kvplane.vocabulary import Generation, Room, Stage

SOURCES, PAGES = [3, 4, 5], [9, 1, 2]


class Once(Untouched):
    """Breaks room 71 and no other."""

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        self._hooks = hooks

    def _apply(self, name: str, room: Room, value: Any) -> Any:
        return self._hooks[name](value) if room == 71 and name in self._hooks else value

    async def before(self, stage: Stage, room: Room) -> None:
        if room == 71 and stage.value in self._hooks:
            await self._hooks[stage.value]()

    def pages(self, room: Room, pages: list[PageOut]) -> list[PageOut]:
        return self._apply("pages", room, pages)

    def metadata(self, room: Room, metadata: Metadata) -> Metadata:
        return self._apply("metadata", room, metadata)

    def generation(self, room: Room, generation: Generation) -> Generation:
        return self._apply("generation", room, generation)


CASES = {
    "flip-byte": ({"pages": lambda pages: flip_byte(pages, 4711)}, ChecksumMismatch, "position"),
    "swap-pages": ({"pages": swap_pages}, ChecksumMismatch, r"2 pages \(positions 0, 2\)"),
    "foreign-room": ({"metadata": foreign_room}, RoomMismatch, r"room mismatch \(69 != 71\)"),
    "short": ({"pages": drop_last}, ShortData, "2 of 3 pages"),
    "stale-generation": ({"metadata": stale_generation}, GenerationMismatch, "'p1-stale'"),
    "data for another life": (
        {"generation": lambda _: Generation("d0")}, (GenerationMismatch, PrefillFailed), "d1",
    ),
    "another attempt": (
        {"metadata": lambda m: replace(m, attempt=m.attempt ^ 1)}, GenerationMismatch, "attempt",
    ),
    "other page count": ({"metadata": lambda m: replace(m, pages=2)}, ShortData, "2 of 3 pages"),
    "no page sums": ({"metadata": lambda m: replace(m, page_sums=())}, ChecksumMismatch, "3 pages"),
    "wrong page sums": (
        {"metadata": lambda m: replace(m, page_sums=(*m.page_sums[:2], 1))},
        ChecksumMismatch, r"1 pages \(positions 2\)",
    ),
}  # fmt: skip


ONE_SIDED = {"short": (ChecksumMismatch, "position")}  # who is written to cannot count pages


@pytest.mark.parametrize("backend", ["tcp", "fake", "stand-in"])
@pytest.mark.parametrize("case", CASES)
async def test_a_broken_delivery_is_a_named_failure_of_verify(make_rig, case, backend) -> None:
    hooks, kind, words = CASES[case]
    if backend == "stand-in":
        kind, words = ONE_SIDED.get(case, (kind, words))
    rig = await make_rig(tamper=Once(**hooks), backend=backend)
    pulled, delivered = await rig.both(71, SOURCES, PAGES)
    assert isinstance(pulled, kind), repr(pulled)
    assert pulled.stage is Stage.VERIFY
    with pytest.raises(kind, match=words):
        raise pulled
    assert isinstance(delivered, TransferError)
    assert rig.stages(71, "decode")["verify"] == "failed"
    assert rig.stages(71, "prefill")["verify"] == "failed"
    await until(lambda: rig.released == [tuple(PAGES)])
    failures = rig.metrics.failures.labels("decode", pulled.kind)._value.get()
    assert failures == 1
    await rig.recovers()


async def test_no_flipped_bit_anywhere_passes_in_100_tries(make_rig) -> None:
    chance = random.Random(7)

    class Flips(Untouched):
        def pages(self, room: Room, pages: list[PageOut]) -> list[PageOut]:
            return flip_byte(pages, chance.randrange(1 << 20), chance.randrange(8))

    rig = await make_rig(tamper=Flips())
    for room in range(100, 200):
        pulled, _ = await rig.both(room, SOURCES, PAGES)
        assert isinstance(pulled, ChecksumMismatch) and len(pulled.positions) == 1
    await until(lambda: len(rig.released) == 100)
    await rig.idle()


@pytest.mark.parametrize("hook", [swap_pages, lambda pages: flip_byte(pages, 99)])
async def test_without_checksums_wrong_bytes_pass_unnoticed(make_rig, hook) -> None:
    off = {"checksums": False}
    rig = await make_rig(tamper=Once(pages=hook), prefill_settings=off, decode_settings=off)
    pulled, delivered = await rig.both(71, SOURCES, PAGES)
    assert delivered is None and pulled.page_sums == ()
    assert not rig.arrived(SOURCES, PAGES), "the fault was real"
    await rig.idle()


async def test_the_tampered_bytes_never_touch_the_senders_memory(make_rig) -> None:
    rig = await make_rig(tamper=Once(pages=lambda pages: flip_byte(pages, 5)))
    before = [rig.page(rig.prefill_memory, page) for page in range(24)]
    await rig.both(71, SOURCES, PAGES)
    assert [rig.page(rig.prefill_memory, page) for page in range(24)] == before


async def test_a_record_never_written_is_a_named_failure(make_rig) -> None:
    class Silent(Metadata):
        def encode(self) -> bytes:
            return b"\xff" * 60

    def silent(said: Metadata) -> Metadata:
        return Silent(said.room, said.generation)

    rig = await make_rig(tamper=Once(metadata=silent))
    pulled, delivered = await rig.both(71, SOURCES, PAGES)
    assert isinstance(pulled, BadMetadata) and "never written" in str(pulled)
    assert isinstance(delivered, Refused)
    await rig.recovers()


async def reset() -> None:
    raise ConnectionResetError


async def broken() -> None:
    raise RuntimeError("could not post the write")


async def hang() -> None:
    await asyncio.Event().wait()


async def test_could_not_post_is_told_at_once(make_rig) -> None:
    rig = await make_rig(tamper=Once(verify=broken))
    pulled, delivered = await rig.both(71, SOURCES, PAGES)
    assert isinstance(pulled, PrefillFailed) and "could not post the write" in str(pulled)
    assert isinstance(delivered, PrefillFailed)
    await rig.recovers()


async def test_an_error_when_a_decode_binds_is_told_at_once(make_rig) -> None:
    rig = await make_rig(tamper=Once(connect=broken))
    with pytest.raises(Refused, match="could not post the write") as caught:
        await rig.pull(71, PAGES)
    assert caught.value.stage is Stage.CONNECT
    await rig.recovers()


async def test_a_room_is_bound_once_also_by_two_who_are_let_in_together(make_rig) -> None:
    entered, gate = [], asyncio.Event()

    async def slow() -> None:
        entered.append(1)
        await gate.wait()

    rig = await make_rig(tamper=Once(connect=slow))
    pulling = [asyncio.create_task(rig.pull(71, pages)) for pages in ([1], [2])]
    await until(lambda: len(entered) == 2)
    gate.set()
    await rig.deliver(71, [5])
    done = await asyncio.gather(*pulling, return_exceptions=True)
    (got,) = (one for one in done if isinstance(one, Metadata))
    (refused,) = (one for one in done if isinstance(one, Refused))
    assert got.room == 71 and "room 71 is bound already" in str(refused)
    await rig.recovers()


@pytest.mark.parametrize("stage", [Stage.CONNECT, Stage.VERIFY])
async def test_a_reset_is_a_gone_peer_of_that_stage(make_rig, stage: Stage) -> None:
    short = {"bootstrapping_s": 1.0}  # it never hears of a decode that was cut off while it bound
    rig = await make_rig(tamper=Once(**{stage.value: reset}), prefill_settings=short)
    delivering = asyncio.create_task(rig.deliver(71, SOURCES, deadline_s=1.0))
    with pytest.raises(PeerGone, match="control connection closed") as caught:
        await rig.pull(71, PAGES)
    assert caught.value.stage is stage
    with pytest.raises(TransferError):
        await delivering
    await rig.recovers()


async def test_a_hanging_prefill_ends_at_the_decodes_deadline(make_rig) -> None:
    rig = await make_rig(tamper=Once(verify=hang))
    delivering = asyncio.create_task(rig.deliver(71, SOURCES))
    with pytest.raises(DeadlineExceeded, match=r"127.0.0.1:\d+: the prefill's commit not within"):
        await rig.pull(71, PAGES, deadline_s=0.5)
    with pytest.raises(Refused, match="not within"):
        await delivering
    await rig.recovers()


async def test_a_hanging_bind_ends_at_the_decodes_deadline(make_rig) -> None:
    rig = await make_rig(tamper=Once(connect=hang), prefill_settings={"bootstrapping_s": 1.0})
    with pytest.raises(DeadlineExceeded, match="an answer to our bind") as caught:
        await rig.pull(71, PAGES, deadline_s=0.5)
    assert caught.value.stage is Stage.CONNECT
    await rig.recovers()


async def at_connect(rig) -> None:
    await until(lambda: rig.offers.counts()["connections"] == 1)


async def at_bound(rig) -> None:
    await until(lambda: rig.stages(71, "decode").get("connect") == "ok")


async def at_once(rig) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("point", [at_once, at_connect, at_bound])
@pytest.mark.parametrize("stage", [Stage.CONNECT, Stage.VERIFY])
async def test_a_cancelled_pull_gives_everything_back(make_rig, point, stage: Stage) -> None:
    rig = await make_rig(
        tamper=Once(**{stage.value: hang}), prefill_settings={"bootstrapping_s": 1.5}
    )
    delivering = asyncio.create_task(rig.deliver(71, SOURCES, deadline_s=1.0))
    pulling = asyncio.create_task(rig.pull(71, PAGES))
    if not (point is at_bound and stage is Stage.CONNECT):  # a bind that hangs is never bound
        await point(rig)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    with pytest.raises(TransferError):
        await delivering
    await until(lambda: rig.released in ([tuple(PAGES)], []))
    await rig.recovers()


@pytest.mark.parametrize("bound", [False, True])
async def test_a_cancelled_delivery_gives_everything_back(make_rig, bound: bool) -> None:
    rig = await make_rig(tamper=Once(verify=hang))
    delivering = asyncio.create_task(rig.deliver(71, SOURCES))
    await until(lambda: rig.offers.counts()["rooms"] == 1)
    if bound:
        pulling = asyncio.create_task(rig.pull(71, PAGES))
        await at_bound(rig)
    delivering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await delivering
    with pytest.raises(PrefillFailed, match="cancelled"):
        await (pulling if bound else rig.pull(71, PAGES))
    await rig.recovers()


async def test_cancelling_at_any_moment_leaves_nothing_behind(make_rig) -> None:
    """Cut both sides after n turns of the loop, for every n until it gets through."""
    rig = await make_rig(prefill_settings={"bootstrapping_s": 0.2})  # a decode that never comes
    for turns in range(60):
        room = 200 + turns
        tasks = [
            asyncio.create_task(rig.pull(room, PAGES, deadline_s=0.2)),
            asyncio.create_task(rig.deliver(room, SOURCES, deadline_s=0.2)),
        ]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[turns % 2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    await rig.recovers()

"""pull() and deliver() over real sockets: what moves, what is recorded, who waits for whom."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from kit.wait import until

from kvplane.transfer import (
    DeadlineExceeded,
    LayoutMismatch,
    LeaseExpired,
    NotRegistered,
    PeerGone,
    PrefillFailed,
    Refused,
    ShortData,
    Unresolved,
)
from kvplane.transfer.metadata import Layout
from kvplane.vocabulary import Room, Shape, Stage

LAYOUT = Layout("tiny", 16, "float16", 2, 2, 16, 2048)


@pytest.mark.parametrize("backend", ["tcp", "fake"])
async def test_pages_and_metadata_arrive_and_both_sides_agree(make_rig, backend: str) -> None:
    rig = await make_rig(backend=backend)
    metadata, delivered = await rig.both(71, [3, 4, 5, 9], [20, 8, 9, 1])
    assert delivered is None
    assert rig.arrived([3, 4, 5, 9], [20, 8, 9, 1])
    assert (metadata.room, metadata.generation, metadata.pages) == (71, "p1", 4)
    assert (metadata.tokens, metadata.first_token, metadata.cached_tokens) == (64, 7, 16)
    assert len(metadata.page_sums) == 4
    assert rig.stages(71, "decode") == {
        "resolve-topology": "ok", "resolve-rank": "ok", "connect": "ok", "verify": "ok",
    }  # fmt: skip
    assert rig.stages(71, "prefill") == {"connect": "ok", "verify": "ok"}
    assert all(record.duration_s >= 0 for record in rig.records)
    assert not rig.released, "the pages are the caller's"
    await rig.idle()


async def test_a_decode_that_binds_first_waits(rig) -> None:
    pulling = asyncio.create_task(rig.pull(71, [1, 2]))
    await until(lambda: rig.stages(71, "decode").get("connect") == "ok")
    assert not pulling.done()
    await rig.deliver(71, [5, 6])
    assert (await pulling).room == 71
    await rig.idle()


async def test_a_prefill_that_is_ready_first_waits(rig) -> None:
    delivering = asyncio.create_task(rig.deliver(71, [5, 6]))
    await until(lambda: rig.offers.counts()["rooms"] == 1)
    await rig.pull(71, [1, 2])
    await delivering
    await rig.idle()


async def test_the_deadline_of_a_delivery_begins_when_its_decode_is_there(rig) -> None:
    """The prompt is ready long before a decode has pages for it: that wait has its own limit."""
    delivering = asyncio.create_task(rig.deliver(71, [5], deadline_s=0.5))
    loop = asyncio.get_running_loop()
    later = loop.time() + 0.8
    await until(lambda: loop.time() > later)
    assert not delivering.done()
    await asyncio.gather(rig.pull(71, [1]), delivering)
    assert rig.arrived([5], [1])
    await rig.idle()


async def test_pages_the_decode_holds_already_are_not_sent(rig) -> None:
    before = rig.page(rig.decode_memory, 1)
    metadata, delivered = await rig.both(71, [4, 5, 6], [2, 3], held_pages=1)
    assert delivered is None and metadata.pages == 2
    assert rig.arrived([5, 6], [2, 3])
    assert rig.page(rig.decode_memory, 1) == before
    assert rig.metrics.bytes.labels("received")._value.get() == 2 * 2 * 2048


async def test_many_rooms_at_once_each_get_their_own(rig) -> None:
    answers = await asyncio.gather(
        *(rig.both(100 + n, [n, n + 1], [23 - 2 * n, 22 - 2 * n]) for n in range(10))
    )
    assert [metadata.room for metadata, _ in answers] == [100 + n for n in range(10)]
    for n in range(10):
        assert rig.arrived([n, n + 1], [23 - 2 * n, 22 - 2 * n])
    await rig.idle()


async def test_the_decode_never_comes(make_rig) -> None:
    rig = await make_rig(prefill_settings={"bootstrapping_s": 0.1})
    with pytest.raises(LeaseExpired, match=r"decode of room 71: lease expired.* 0.1 s"):
        await rig.deliver(71, [1])
    assert rig.stages(71, "prefill") == {"connect": "failed"}
    with pytest.raises(Refused, match="lease expired") as caught:
        await rig.pull(71, [1])
    assert caught.value.stage is Stage.VERIFY
    assert rig.refused("control", "lease") == 1, "asked after its lease: counted"
    await rig.recovers()


async def test_the_prefill_never_gets_ready(make_rig) -> None:
    rig = await make_rig(prefill_settings={"bootstrapping_s": 1.5})
    with pytest.raises(PrefillFailed, match=r"the prompt's KV not within 1.5 s"):
        await rig.pull(71, [1, 2])
    await until(lambda: rig.released == [(1, 2)])
    with pytest.raises(DeadlineExceeded):
        await rig.deliver(71, [1, 2])
    await rig.recovers()


async def test_the_decodes_deadline_ends_its_wait_and_the_prefill_hears_it(rig) -> None:
    with pytest.raises(DeadlineExceeded, match=r"the prefill's commit not within 0.5 s") as caught:
        await rig.pull(71, [1, 2], deadline_s=0.5)
    assert caught.value.stage is Stage.VERIFY
    assert rig.stages(71, "decode")["verify"] == "failed"
    await until(lambda: rig.offers.counts()["rooms"] == 0)
    with pytest.raises(Refused, match="not within"):
        await rig.deliver(71, [1, 2])
    await rig.recovers()


async def test_fail_is_told_to_a_waiting_and_to_a_late_decode(rig) -> None:
    pulling = asyncio.create_task(rig.pull(71, [1, 2]))
    await until(lambda: rig.stages(71, "decode").get("connect") == "ok")
    rig.offers.fail(Room(71), "out of pages")
    with pytest.raises(PrefillFailed, match=r"room 71.*out of pages") as caught:
        await pulling
    assert caught.value.stage is Stage.VERIFY
    rig.offers.fail(Room(72), "the prompt is too long")
    with pytest.raises(PrefillFailed, match="the prompt is too long") as caught:
        await rig.pull(72, [1, 2])
    assert caught.value.stage is Stage.CONNECT
    with pytest.raises(PrefillFailed, match="out of pages"):
        await rig.deliver(71, [1])
    await until(lambda: rig.released == [(1, 2), (1, 2)])
    await rig.recovers()


async def test_fail_ends_a_delivery_that_waits(rig) -> None:
    delivering = asyncio.create_task(rig.deliver(71, [1]))
    await until(lambda: rig.offers.counts()["rooms"] == 1)
    rig.offers.fail(Room(71), "aborted by the client")
    with pytest.raises(PrefillFailed, match="aborted by the client"):
        await delivering
    await rig.recovers()


async def test_the_same_room_is_bound_once(rig) -> None:
    first = asyncio.create_task(rig.pull(71, [1, 2]))
    await until(lambda: rig.stages(71, "decode").get("connect") == "ok")
    with pytest.raises(Refused, match="room 71 is bound already"):
        await rig.pull(71, [3, 4])
    await rig.deliver(71, [5, 6])
    await first
    with pytest.raises(Refused, match="room 71 was delivered already"):
        await rig.pull(71, [3, 4])
    assert rig.refused("control", "refused") == 2
    await rig.recovers()


async def test_a_room_is_delivered_once(rig) -> None:
    first = asyncio.create_task(rig.deliver(71, [1]))
    await until(lambda: rig.offers.counts()["rooms"] == 1)
    with pytest.raises(Refused, match="being delivered"):
        await rig.deliver(71, [1])
    await rig.pull(71, [1])
    await first
    with pytest.raises(Refused, match="delivered already"):
        await rig.deliver(71, [1])


async def test_waiting_rooms_are_bounded(make_rig) -> None:
    rig = await make_rig(prefill_settings={"most_waiting": 2})
    waiting = [asyncio.create_task(rig.pull(70 + n, [n])) for n in range(2)]
    await until(lambda: rig.offers.counts()["rooms"] == 2)
    with pytest.raises(Refused, match="2 rooms wait already"):
        await rig.pull(72, [5])
    for n in range(2):
        await rig.deliver(70 + n, [n])
    await asyncio.gather(*waiting)
    await rig.recovers()


async def test_reserved_and_delivered_pages_must_be_as_many(rig) -> None:
    pulled, delivered = await rig.both(71, [1, 2, 3], [1, 2])
    assert isinstance(delivered, ShortData)
    assert isinstance(pulled, PrefillFailed) and str(delivered) in pulled.reason
    assert str(delivered).startswith("short data: 2 of 3 pages reserved by 127.0.0.1:")
    await rig.recovers()


async def test_other_token_counts_are_a_named_failure(rig) -> None:
    pulled, delivered = await rig.both(71, [1, 2], [1, 2], tokens=63)
    assert isinstance(pulled, ShortData) and str(pulled) == "short data: 64 of 63 tokens"
    assert isinstance(delivered, Refused) and "64 of 63 tokens" in delivered.reason
    await rig.recovers()


async def test_layouts_that_differ_are_refused_with_every_field(make_rig) -> None:
    there = replace(LAYOUT, dtype="bfloat16", layers=4)
    rig = await make_rig(layouts=(LAYOUT, there))
    with pytest.raises(LayoutMismatch) as caught:
        await rig.pull(71, [1])
    assert caught.value.fields == (
        "dtype float16 here, bfloat16 there", "layers 2 here, 4 there",
    )  # fmt: skip
    assert caught.value.stage is Stage.CONNECT
    assert rig.stages(71, "decode")["connect"] == "failed"
    assert not rig.metrics.bytes.labels("sent")._value.get()
    await rig.idle()


async def test_an_unknown_rank_names_the_address(rig) -> None:
    rig.resolver.endpoints.clear()
    with pytest.raises(Unresolved, match=r"bootstrap 127.0.0.1:8998: dp rank 0") as caught:
        await rig.pull(71, [1])
    assert caught.value.stage is Stage.RESOLVE_RANK
    assert rig.stages(71, "decode") == {"resolve-topology": "ok", "resolve-rank": "failed"}
    assert rig.released == [(1,)]
    await rig.idle()


async def test_a_topology_that_cannot_be_had_is_the_first_stage(rig) -> None:
    rig.resolver.error = ConnectionRefusedError("connection refused")
    with pytest.raises(Unresolved, match=r"127.0.0.1:8998: connection refused") as caught:
        await rig.pull(71, [1])
    assert caught.value.stage is Stage.RESOLVE_TOPOLOGY
    assert rig.stages(71, "decode") == {"resolve-topology": "failed"}


@pytest.mark.parametrize(
    ("given", "dp", "follow", "known", "asked"),
    [
        (2, 4, True, {}, 2),
        (None, 1, True, {}, 0),
        (None, 4, True, {}, 3),
        (None, 4, False, {71: 1}, 1),
    ],
    ids=["given", "only one", "room mod size", "asked by room"],
)
async def test_which_dp_rank_is_asked(rig, given, dp, follow, known, asked) -> None:
    rig.resolver.shape, rig.resolver.follow, rig.resolver.rooms = Shape(dp=dp), follow, known
    rig.resolver.endpoints[asked] = rig.resolver.endpoints[0]
    await asyncio.gather(rig.pull(71, [1], dp_rank=given), rig.deliver(71, [2]))
    assert rig.resolver.asked == [asked]


async def test_the_rank_is_asked_for_in_the_life_that_told_its_topology(rig) -> None:
    rig.resolver.generation = "life one"
    await asyncio.gather(rig.pull(71, [1]), rig.deliver(71, [2]))
    assert rig.resolver.expected == ["life one"]


async def test_a_dp_rank_that_cannot_be_known_is_said(rig) -> None:
    rig.resolver.shape, rig.resolver.follow = Shape(dp=4), False
    with pytest.raises(Unresolved, match=r"dp rank of room 71 is not known, 4\.\d s were waited"):
        await rig.pull(71, [1])
    assert 4.0 < rig.resolver.waited_s <= 4.8  # of 5 s: some is left for the answer
    with pytest.raises(Unresolved, match="dp rank 4: the prefill has 0 to 3"):
        await rig.pull(71, [1], dp_rank=4)


@pytest.mark.parametrize(
    ("prefill", "decode", "fields"),
    [
        (Shape(tp=4, pp=3), Shape(tp=3, pp=2, page_size=16), ["tp", "pp"]),
        (Shape(page_size=64, kv_dtype="bf16"), Shape(page_size=16, kv_dtype="fp8"),
         ["page_size", "kv_dtype"]),
        (Shape(tp=4), Shape(), ["tp 4"]),
    ],
)  # fmt: skip
async def test_shapes_that_cannot_be_moved_list_every_field(rig, prefill, decode, fields) -> None:
    rig.resolver.shape, rig.puller._shape = prefill, decode
    with pytest.raises(LayoutMismatch) as caught:
        await rig.pull(71, [1])
    assert [text.split(":")[0] for text in caught.value.fields] == fields
    assert caught.value.stage is Stage.RESOLVE_TOPOLOGY
    assert rig.released == [(1,)]


async def test_nobody_listens_at_the_rank_port(rig) -> None:
    port = rig.resolver.endpoints[0].port
    await rig.offers.close()
    with pytest.raises(PeerGone, match=f"127.0.0.1:{port}") as caught:
        await rig.pull(71, [1])
    assert caught.value.stage is Stage.CONNECT
    assert rig.resolver.forgotten == ["127.0.0.1:8998"], "it may have moved"
    failed = rig.records[-1]
    assert (failed.stage, failed.outcome) == (Stage.CONNECT, "failed")
    assert f"127.0.0.1:{port}" in failed.detail
    await until(lambda: rig.released == [(1,)])
    await rig.idle()


async def test_a_rank_port_that_says_nothing_stalls_for_its_deadline_only(rig, make_rig) -> None:
    async def silent(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    rig.resolver.endpoints[0].port = server.sockets[0].getsockname()[1]
    with pytest.raises(DeadlineExceeded, match=r"an answer to our bind not within 0.5 s"):
        await rig.pull(71, [1], deadline_s=0.5)
    await rig.idle()
    server.close()
    await server.wait_closed()


async def test_stopping_the_prefill_is_told_to_everybody(rig) -> None:
    pulling = asyncio.create_task(rig.pull(71, [1]))
    await until(lambda: rig.stages(71, "decode").get("connect") == "ok")
    delivering = asyncio.create_task(rig.deliver(72, [1]))
    await until(lambda: rig.offers.counts()["rooms"] == 2)
    await rig.offers.close()
    for task in (pulling, delivering):
        with pytest.raises((PrefillFailed, PeerGone)):
            await task
    await rig.idle()


async def test_settings_that_differ_about_checksums_are_a_layout_mismatch(make_rig) -> None:
    rig = await make_rig(prefill_settings={"checksums": False})
    with pytest.raises(LayoutMismatch, match="checksums False here, True there"):
        await rig.pull(71, [1])
    await rig.idle()


async def test_pages_that_are_not_ours_fail_the_room_at_both_ends(rig) -> None:
    pulled, delivered = await rig.both(71, [1, 99], [1, 2])
    assert isinstance(delivered, NotRegistered) and "page 99" in str(delivered)
    assert isinstance(pulled, PrefillFailed) and "page 99" in pulled.reason
    with pytest.raises(NotRegistered, match="page 24"):
        await rig.pull(72, [24])
    await until(lambda: rig.released == [(1, 2), (24,)])
    await rig.recovers()

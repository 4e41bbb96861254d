"""First frames: what may arrive, wait and be answered at a rank port, in bytes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from kit.wait import until

from kvplane.transfer import PeerGone
from kvplane.transfer.control import Channel
from kvplane.transfer.frames import (
    MOST_SMALL,
    PROTOCOL,
    BindFrame,
    BoundFrame,
    HoldFrame,
    RefusedFrame,
    encode_frame,
)
from kvplane.transfer.metadata import record_bytes
from kvplane.transfer.terms import Terms

KIB = 1024
HOLD = encode_frame(HoldFrame(protocol=PROTOCOL, room=77))


def half(size: int) -> bytes:
    """The length of a frame, and half of it."""
    return size.to_bytes(4, "big") + b"\x81" * (size // 2)


def bind(rig, room: int = 71, **changes) -> BindFrame:
    """What the rig's decode would say; `offer` = changes of its offer."""
    offer = replace(rig.backends[1].offer(), **changes.pop("offer", {}))
    facts = {
        "protocol": PROTOCOL, "room": room, "attempt": 5, "generation": "raw", "tokens": 64,
        "layout": rig.puller._side.layout, "offer": offer, "pages": (1, 2, 3),
        "aux_bytes": record_bytes(3),
    }  # fmt: skip
    return BindFrame(**(facts | changes))


async def dial(rig) -> Channel:
    endpoint = rig.resolver.endpoints[0]
    return await Channel.dial(endpoint.host, endpoint.port)


@pytest.mark.parametrize("before", [b"", HOLD], ids=["at once", "after a hold"])
async def test_the_slowest_of_many_begun_frames_makes_room(make_rig, before: bytes) -> None:
    rig = await make_rig(prefill_settings={"most_arriving_bytes": 1000 * KIB, "hello_s": 5.0})
    hearing = rig.offers._hearing
    channels = []
    for number in range(1, 21):
        channel = await dial(rig)
        channel._writer.write(before + half(300 * KIB))
        channels.append(channel)
        await until(lambda n=number: len(hearing._arriving) + hearing.cut == n)
        assert hearing.held <= 1000 * KIB
    assert hearing.cut == 17
    for channel in channels[:17]:
        with pytest.raises(PeerGone):
            await asyncio.wait_for(channel.read(), 3)
    await rig.both(71, [1, 2], [3, 4])
    assert rig.arrived([1, 2], [3, 4])
    for channel in channels:
        channel.close()
    await rig.recovers()
    assert hearing.held == 0


async def test_a_frame_that_has_begun_must_end_soon_also_after_a_hold(rig) -> None:
    channel = await dial(rig)
    channel._writer.write(HOLD + half(300 * KIB))
    with pytest.raises(PeerGone):
        await asyncio.wait_for(channel.read(), 4)  # the lease would be 5 s
    channel.close()
    await rig.recovers()


async def test_what_bound_rooms_keep_is_bounded_in_bytes(make_rig) -> None:
    rig = await make_rig(prefill_settings={"most_bound_bytes": 64 * KIB})
    channels = [await dial(rig) for _ in range(3)]
    for room, channel in enumerate(channels, 71):
        channel.post(bind(rig, room, grant=b"x" * 25 * KIB))
    told = [await asyncio.wait_for(channel.read(), 3) for channel in channels]
    assert [type(frame) for frame in told].count(BoundFrame) == 2
    [refused] = [frame for frame in told if isinstance(frame, RefusedFrame)]
    assert "bytes of 2 rooms wait already" in refused.reason
    for channel in channels:
        channel.close()
    await until(lambda: rig.offers.counts()["rooms"] == 0)
    assert rig.offers._bytes == 0
    await rig.recovers()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offer": {"port": 70_000}}, "offer port 70000: must be"),
        ({"offer": {"port": -1}}, "offer port -1: must be"),
        ({"offer": {"host": "a" * 70 + ".x"}}, "must be an address or a name"),
        ({"offer": {"host": "\u3002\u3002"}}, "must be an address or a name"),
        ({"offer": {"host": ""}}, "must not be empty"),
        ({"generation": "g" * 300}, "generation: must be at most 256 bytes"),
    ],
)
async def test_a_decode_that_cannot_be_dialled_is_refused_before_anything_is_kept(
    rig, changes, words
) -> None:
    channel = await dial(rig)
    channel.post(bind(rig, **changes))
    told = await asyncio.wait_for(channel.read(), 3)
    assert isinstance(told, RefusedFrame)
    assert words in told.reason
    assert rig.offers.counts()["rooms"] == 0
    channel.close()
    await rig.recovers()


@pytest.mark.parametrize("host", ["a" * 70 + ".x", "\u3002\u3002"], ids=repr)
async def test_a_prefill_that_cannot_be_dialled_is_gone_by_name(rig, host: str) -> None:
    rig.resolver.endpoints[0].host = host
    with pytest.raises(PeerGone):
        await rig.pull(71, [1, 2, 3])
    rig.resolver.endpoints[0].host = "127.0.0.1"
    await rig.recovers()


async def test_a_refusal_fits_its_frame_however_much_differs(rig) -> None:
    offer = rig.backends[0].offer()
    terms = Terms(offer, rig.puller._side.layout, "p1", rig.puller._side.settings)
    names = tuple(f"region-{number}" for number in range(5000))
    lies = [
        {"offer": {"names": names, "items": (1,) * 5000}},
        {"offer": {"backend": "x" * 100_000}},
        {"layout": replace(rig.puller._side.layout, model="m" * 100_000)},
        {"regions": ("r" * 100_000,)},
        {"expected": "e" * 100_000},
    ]
    for lie in lies:
        told = terms.refusal(bind(rig, **lie), "127.0.0.1")
        assert told is not None
        assert len(encode_frame(told)) < MOST_SMALL / 8
    told = terms.refusal(bind(rig, **lies[0]), "127.0.0.1")
    assert told is not None
    assert told.fields[-1] == "4984 regions more"

"""Payloads meant to harm (FR-EV-20): refused or counted, nothing runs, memory stays bounded."""

from __future__ import annotations

import os
import pickle
import random
import struct
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.streams import WORKER, Publisher, following

from kvplane.events import DIALECTS, BadBatch, Dialect, frames
from kvplane.events.dialects import vllm
from kvplane.events.errors import BadFrames
from kvplane.index import chain, rank
from kvplane.vocabulary import Knowledge, Namespace

MB = 1024 * 1024
EVENT = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}
every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def raw(event: bytes) -> bytes:
    """A batch of one event given as bytes, and a good one behind it."""
    return (
        b"\x93\xcb"
        + struct.pack(">d", 1.0)
        + b"\x92"
        + event
        + msgspec.msgpack.encode(EVENT)
        + b"\x00"
    )


def taken(dialect: Dialect, payload: bytes) -> tuple[int, int]:
    """(events, dropped); a payload that is no batch is (0, 1)."""
    try:
        decoded = dialect.decode(payload)
    except BadBatch as error:
        assert len(str(error)) < 500
        return 0, 1
    assert all(len(drop.reason) <= 300 for drop in decoded.dropped)
    return len(decoded.events), len(decoded.dropped)


@every_dialect
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_unpickled(dialect: Dialect, protocol: int, tmp_path: Any) -> None:
    path = str(tmp_path / "ran")
    bomb = pickle.dumps(Bomb(path), protocol)
    assert taken(dialect, bomb) == (0, 1)
    inside = [{**EVENT, "medium": bomb}, {**EVENT, "extra_keys": [[bomb]]}, ["BlockStored", bomb]]
    taken(dialect, msgspec.msgpack.encode([1.0, inside, 0]))
    taken(dialect, msgspec.msgpack.encode([1.0, [msgspec.msgpack.Ext(42, bomb)], 0]))
    assert not os.path.exists(path)


@every_dialect
@pytest.mark.parametrize("member", ["medium", "lora_name", "type", "cache_salt", "colour"])
def test_a_huge_text_is_held_once_at_most(dialect: Dialect, member: str) -> None:
    payload = msgspec.msgpack.encode([1.0, [{**EVENT, member: "x" * (50 * MB)}, EVENT], 0])
    tracemalloc.start()
    try:
        events, dropped = taken(dialect, payload)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert events + dropped == 2
    assert kept < MB and peak < 4 * len(payload), (kept // MB, peak // MB)


LEVELS = 200_000
HOSTILE = {
    "deep arrays": b"\x91" * LEVELS + b"\x90",
    "deep maps": b"\x81\xa1a" * LEVELS + b"\x80",
    "deep in a member": b"\x82\xa4type\xabBlockStored\xacextra_fields" + b"\x91" * LEVELS + b"\x90",
    "deep tokens": b"\x83\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xa9token_ids"
    + b"\x91" * 900 + b"\x90",
    "an ext type": b"\xc7\x05\x63hello",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x01",
    "an ext as a hash": b"\x82\xa4type\xabBlockStored\xacblock_hashes\x91\xd4\x07\x00",
    "a map with a map as key": b"\x81\x81\x01\x02\x03",
    "the same key twice": b"\x83\xa4type\xabBlockStored\xa4type\xacBlockRemoved"
    + b"\xacblock_hashes\x90",
    "a tag that is a number": b"\x81\xa4type\x07",
    "text that is no UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "a hash beyond 64 bit": b"\x82\xa4type\xabBlockStored\xacblock_hashes\x91\xcb\x43\xf0"
    + bytes(6),
}  # fmt: skip


@every_dialect
@pytest.mark.parametrize("event", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_event_costs_itself_or_its_batch(dialect: Dialect, event: bytes) -> None:
    assert taken(dialect, raw(event)) in ((0, 1), (1, 1), (2, 0))


@every_dialect
@pytest.mark.parametrize(
    "payload",
    [
        b"\x93\xcb" + bytes(8) + b"\xdd\x7f\xff\xff\xff",  # 2^31 events are announced
        b"\xdf\xff\xff\xff\xff",
        b"\x93\xcb" + bytes(8) + b"\xc6\x7f\xff\xff\xff" + bytes(100),
        b"\x93\xcb" + bytes(8) + b"\x91\xdb\x7f\xff\xff\xff" + bytes(100),
    ],
)
def test_a_length_that_lies_takes_no_memory(dialect: Dialect, payload: bytes) -> None:
    tracemalloc.start()
    try:
        assert taken(dialect, payload) == (0, 1)
        assert tracemalloc.get_traced_memory()[1] < MB
    finally:
        tracemalloc.stop()


@every_dialect
@settings(max_examples=200)
@given(cut=st.integers(0, 200), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_a_damaged_batch_is_a_batch_or_none(dialect: Dialect, cut: int, at: int, byte: int) -> None:
    whole = bytearray(msgspec.msgpack.encode([1.0, [EVENT, ["BlockRemoved", [1], "GPU"]], 0]))
    whole[at % len(whole)] = byte
    events, dropped = taken(dialect, bytes(whole))
    assert events + dropped >= 1 or whole[10] in (0x90, byte)
    taken(dialect, bytes(whole[: cut % len(whole)]))


@every_dialect
@given(payload=st.binary(max_size=200))
def test_any_event_leaves_the_next_one_or_ends_the_batch(dialect: Dialect, payload: bytes) -> None:
    taken(dialect, raw(payload))


@given(message=st.lists(st.binary(max_size=20), max_size=6))
def test_any_message_is_a_frame_or_bad(message: list[bytes]) -> None:
    for read in (frames.live, frames.replayed):
        try:
            found = read(message)
        except BadFrames as error:
            assert 0 < len(str(error)) < 200
        else:
            assert found is None or 0 <= found.sequence <= frames.MAX_SEQUENCE


async def test_a_stream_goes_on_behind_all_of_them_live_and_on_replay(tmp_path: Any) -> None:
    path = str(tmp_path / "ran")
    payloads = [
        pickle.dumps(Bomb(path)),
        random.Random(7).randbytes(1000),
        b"",
        *map(raw, HOSTILE.values()),
    ]
    async with Publisher() as publisher:
        for payload in payloads:
            await publisher.publish(payload, live=False)
        async with following(publisher) as followed:
            await followed.at(len(payloads) - 1)
            await publisher.listened()
            for payload in payloads:
                await publisher.publish(payload)
            fresh = [1.0, [{"type": "AllBlocksCleared"}, EVENT], 0]
            await publisher.publish(msgspec.msgpack.encode(fresh))
            await followed.at(2 * len(payloads))
            await followed.knows(Knowledge.EXACT)
            facts = followed.view.facts(WORKER)
            assert facts is not None and facts.counts == [1, 0, 0, 0]
            refused = followed.count("undecodable_total")
            refused += followed.count("dropped_total", kind="BlockStored")
            refused += followed.count("dropped_total", kind="unknown")
            assert refused >= len(payloads)
    assert not list(tmp_path.iterdir())


REMOVED = b"\xa4type\xacBlockRemoved\xacblock_hashes"
UNREAD = {  # a removal of block 1, which is stored before it in the same batch
    "a hash that is none": b"\x82" + REMOVED + b"\x92\x01\xa1x",
    "a group that is none": b"\x83" + REMOVED + b"\x91\x01\xa9group_idx\xff",
    "a medium that is no UTF-8": b"\x83" + REMOVED + b"\x91\x01\xa6medium\xa2\xff\xfe",
    "a time that is none": b"\x83" + REMOVED + b"\x91\x01\xa9ownership\xd4\xff\x00",
    "an ext as a key": b"\x83" + REMOVED + b"\x91\x01\xd4\x05\x00\x01",
    "a kind in bytes": b"\x92\xc4\x0cBlockRemoved\x92\x01\xa1x",
    "all in bytes": b"\x82\xc4\x04type\xc4\x0cBlockRemoved\xc4\x0cblock_hashes\x92\x01\xa1x",
}


@pytest.mark.parametrize("removal", UNREAD.values(), ids=list(UNREAD))
async def test_what_a_removal_that_cannot_be_read_may_have_meant_is_not_held(
    removal: bytes,
) -> None:
    """Neither what was held before its batch, nor what the batch itself stored before it."""
    stored = [{**EVENT, "block_hashes": [number], "token_ids": [number] * 2} for number in range(4)]
    before, again, after = (msgspec.msgpack.encode(event) for event in stored[:3])
    batch = b"\x93" + msgspec.msgpack.encode(1.0) + b"\x93" + again + removal + after + b"\x00"
    async with Publisher() as publisher, following(publisher) as followed:
        await followed.knows(Knowledge.EXACT)
        await publisher.listened()
        await publisher.publish(msgspec.msgpack.encode([1.0, [msgspec.Raw(before)], 0]))
        await publisher.publish(batch)
        await followed.at(1)
        assert "could not be read" in await followed.knows(Knowledge.PARTIAL)
        asked = [chain([number] * 2, Namespace("m", 2)) for number in range(4)]
        depths = [rank(followed.view, prompt, [WORKER])[0].depth_blocks for prompt in asked]
        assert depths == [0, 0, 1, 0]


def test_what_was_passed_by_costs_nothing_though_it_cannot_be_read() -> None:
    removed = b"\x83" + REMOVED + b"\x91\x01\xa6colour\xa2\xff\xfe"
    found = vllm.new().decode(raw(removed))
    assert len(found.events) == 2 and not found.dropped
    assert found.unknown == ("BlockRemoved.unreadable",)

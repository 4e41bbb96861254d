"""metadata.py: the record survives its own wire form and nothing else does."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.transfer.metadata import (
    POISON,
    Agreed,
    BadRecord,
    Expected,
    Layout,
    Metadata,
    Mismatch,
    decode_metadata,
    record_bytes,
    verify,
)
from kvplane.vocabulary import MAX_ROOM, Generation, Room

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
records = st.builds(
    Metadata,
    room=st.integers(1, MAX_ROOM).map(Room),
    generation=st.text(max_size=40).map(Generation),
    pages=u32,
    tokens=u32,
    first_token=st.integers(-1, 2**31 - 1),
    cached_tokens=u32,
    page_sums=st.lists(u64, max_size=20).map(tuple),
    attempt=u64,
)
ONE = Metadata(Room(71), Generation("p1"), 2, 32, 7, 16, (11, 12), attempt=5)
WANTED = Expected(Room(71), Generation("p1"), 5, 2, 32)


@given(records, st.binary(max_size=30))
def test_a_record_is_read_back_whatever_follows_it(record: Metadata, rest: bytes) -> None:
    assert decode_metadata(record.encode() + rest) == record
    assert len(record.encode()) <= record_bytes(len(record.page_sums))


@given(records, st.data())
def test_any_changed_byte_is_noticed(record: Metadata, data: st.DataObject) -> None:
    raw = bytearray(record.encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BadRecord):
        decode_metadata(raw)


@given(records, st.data())
def test_a_truncated_record_is_noticed(record: Metadata, data: st.DataObject) -> None:
    raw = record.encode()
    short = raw[: data.draw(st.integers(0, len(raw) - 1))]
    poisoned = short + bytes([POISON]) * (len(raw) - len(short))
    with pytest.raises(BadRecord):
        decode_metadata(short)
    if poisoned != raw:
        with pytest.raises(BadRecord):
            decode_metadata(poisoned)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_metadata(data)


def test_a_poisoned_slot_was_never_written() -> None:
    with pytest.raises(BadRecord, match="never written"):
        decode_metadata(bytes([POISON]) * record_bytes(3))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"room": Room(72)}, "room"),
        ({"room": Room(72), "generation": Generation("p0"), "tokens": 1}, "room"),
        ({"generation": Generation("p0")}, "generation"),
        ({"attempt": 6}, "attempt"),
        ({"pages": 1}, "pages"),
        ({"tokens": 31}, "tokens"),
    ],
)
def test_the_first_fact_that_does_not_fit_is_named(change: dict[str, object], what: str) -> None:
    got = dataclasses.replace(ONE, **change)
    verdict = verify(WANTED, got, None)
    assert isinstance(verdict, Mismatch) and verdict.what == what
    assert (verdict.expected, verdict.received) == (getattr(WANTED, what), getattr(got, what))


def test_equal_facts_agree() -> None:
    assert verify(WANTED, ONE, (11, 12)) == Agreed(ONE)
    assert verify(WANTED, ONE, None) == Agreed(ONE)


@pytest.mark.parametrize(
    ("sums", "positions"), [((11, 13), (1,)), ((12, 11), (0, 1)), ((11,), (0,)), ((), ())]
)
def test_wrong_page_sums_are_named_by_position(
    sums: tuple[int, ...], positions: tuple[int, ...]
) -> None:
    verdict = verify(WANTED, ONE, sums)
    assert isinstance(verdict, Mismatch)
    assert (verdict.what, verdict.positions) == ("checksum", positions)


def test_layouts_name_every_field_that_differs() -> None:
    here = Layout("m", 16, "float16", 2, 2, 16, 2048)
    assert here.differences(here) == ()
    there = dataclasses.replace(here, dtype="bfloat16", page_tokens=64)
    assert here.differences(there) == (
        "page_tokens 16 here, 64 there",
        "dtype float16 here, bfloat16 there",
    )
    for field in dataclasses.fields(Layout):
        value = getattr(here, field.name)
        other = dataclasses.replace(here, **{field.name: value + type(value)(1)})
        assert len(here.differences(other)) == 1, field.name

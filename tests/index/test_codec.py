"""Stream entries and rows come back as they went in; what cannot be read is said."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.index import Note, Row, Value, group_key, group_of, rule_key
from kvplane.index.stores import codec
from kvplane.index.stores.rows import decode, encode
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

A, ONE = Worker(Pod("a"), 2), Epoch(1)
hashes = st.integers(0, 2**64 - 1).map(BlockHash)
blocks = st.lists(hashes, max_size=5).map(tuple)
tiers = st.sampled_from(Tier)
sizes = st.integers(0, 2**32 - 1)
groups = st.builds(Group, st.integers(0, 65535), st.sampled_from(GroupKind), sizes, sizes)
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(
        Stored,
        st.just(A),
        st.just(ONE),
        tiers,
        st.none() | hashes,
        blocks,
        st.integers(1, 2**32 - 1),
        st.none() | groups,
    ),
    st.builds(Removed, st.just(A), st.just(ONE), tiers, blocks, st.none() | st.integers(0, 65535)),
    st.builds(Cleared, st.just(A), st.just(ONE), st.sampled_from(ClearReason), st.none() | tiers),
    st.builds(
        Known,
        st.just(A),
        st.just(ONE),
        st.sampled_from(Knowledge),
        st.text(),
        st.floats(0, 1e12),
        st.text(),
    ),
)


@given(st.lists(changes, max_size=6))
def test_changes_come_back(some: list[Change]) -> None:
    again = codec.decode(codec.encode(some), A, ONE)
    assert again == tuple(some)
    assert tuple(some) == again
    assert set(map(hash, again)) == set(map(hash, some))
    assert codec.encode(again) == codec.encode(some)


@given(st.lists(hashes, max_size=9), st.lists(hashes, max_size=9))
def test_blocks_that_were_read_equal_a_row_of_the_same(some: list[int], others: list[int]) -> None:
    read, other = (codec.unpack_blocks(codec.pack_blocks(blocks)) for blocks in (some, others))
    assert read == tuple(some) and tuple(some) == read and hash(read) == hash(tuple(some))
    assert (read == other) == (read == tuple(others)) == (some == others)
    assert read != some  # as a tuple is no list


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"a": 1}),
        msgspec.msgpack.encode([["x"]]),
        msgspec.msgpack.encode([[]]),
        msgspec.msgpack.encode([["s", "gpu"]]),
        msgspec.msgpack.encode([["r", "attic", b""]]),
        msgspec.msgpack.encode([["r", "gpu", b"123"]]),
        msgspec.msgpack.encode([["r", "gpu", 7]]),
    ],
)
def test_what_is_no_list_of_changes_is_a_value_error(wrong: bytes) -> None:
    with pytest.raises(ValueError):
        codec.decode(wrong, A, ONE)


rows = st.builds(
    Row,
    hashes,
    st.none() | hashes,
    st.tuples(*[st.integers(0, 65535)] * 4),
    st.integers(1, 2**32 - 1),
    st.integers(0, 3),
)
values: st.SearchStrategy[Value] = rows | groups | st.builds(Note, st.binary(max_size=40))


@given(values)
def test_values_of_a_table_come_back(value: Value) -> None:
    assert decode(encode(value)) == value


@given(rows)
def test_a_row_on_the_gpu_alone_is_short(row: Row) -> None:
    short = row.copies[0] < 256 and not any(row.copies[1:]) and row.block_size < 65536
    assert len(encode(row)) == (20 if short else 29)


def test_a_value_of_another_kind_or_length_is_a_value_error() -> None:
    for value in (
        Row(BlockHash(1), None, (1, 0, 0, 0), 16),
        Row(BlockHash(1), None, (1, 1, 0, 0), 16),
    ):
        good = encode(value)
        for wrong in (b"", good[:-1], good + b"x", b"\x02" + good[1:]):
            with pytest.raises(ValueError, match="table value"):
                decode(wrong)


def test_more_copies_than_fit_are_kept_as_too_few() -> None:
    row = Row(BlockHash(1), None, (70_000, 0, 0, 1), 16)
    assert decode(encode(row)) == Row(BlockHash(1), None, (65_535, 0, 0, 1), 16)


def test_keys_of_groups_tell_their_group() -> None:
    assert group_of(group_key(None, b"s" + b"g\0\1")) is None
    assert (
        group_of(group_key(7, b"u12345678")) == 7 and group_key(7, b"x")[0] == rule_key(7)[0] + 32
    )

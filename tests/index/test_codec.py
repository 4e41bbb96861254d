"""Stream entries and rows come back as they went in; what cannot be read is said."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.index import Row
from kvplane.index.stores import codec
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
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
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(
        Stored,
        st.just(A),
        st.just(ONE),
        tiers,
        st.none() | hashes,
        blocks,
        st.integers(1, 2**32 - 1),
    ),
    st.builds(Removed, st.just(A), st.just(ONE), tiers, blocks),
    st.builds(Cleared, st.just(A), st.just(ONE), st.sampled_from(ClearReason), st.none() | tiers),
    st.builds(
        Known,
        st.just(A),
        st.just(ONE),
        st.sampled_from(Knowledge),
        st.text(),
        st.floats(0, 1e12),
    ),
)


@given(st.lists(changes, max_size=6))
def test_changes_come_back(some: list[Change]) -> None:
    assert codec.decode(codec.encode(some), A, ONE) == tuple(some)


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


@given(
    hashes, st.none() | hashes, st.tuples(*[st.integers(0, 65535)] * 4), st.integers(1, 2**32 - 1)
)
def test_rows_come_back(
    block: BlockHash, parent: BlockHash | None, copies: tuple[int, int, int, int], size: int
) -> None:
    row = Row(block, parent, copies, size)
    assert Row.decode(row.encode()) == row and len(row.encode()) == 29


def test_a_row_of_another_version_or_length_is_a_value_error() -> None:
    good = Row(BlockHash(1), None, (1, 0, 0, 0), 16).encode()
    for wrong in (b"", good[:-1], good + b"x", b"\x02" + good[1:]):
        with pytest.raises(ValueError, match="row"):
            Row.decode(wrong)


def test_more_copies_than_fit_are_kept_as_too_few() -> None:
    row = Row(BlockHash(1), None, (70_000, 0, 0, 1), 16)
    assert Row.decode(row.encode()).copies == (65_535, 0, 0, 1)

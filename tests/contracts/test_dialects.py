"""Every dialect in the table: what events/dialects/base.py says it must do."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.events import (
    DIALECTS,
    AllCleared,
    BadBatch,
    BlocksRemoved,
    BlocksStored,
    Dialect,
    EngineEvent,
    engine_hash,
    engine_key,
)
from kvplane.vocabulary import Tier

every_dialect = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=list(DIALECTS))
KEYS = tuple(engine_key(number) for number in (11, 12))
STORED = BlocksStored(KEYS, engine_key(10), array("I", range(8)), 4, Tier.GPU)
MAP = {
    "type": "BlockStored",
    "block_hashes": [11, 12],
    "parent_block_hash": 10,
    "token_ids": list(range(8)),
    "block_size": 4,
}
ARRAY = ["BlockStored", [11, 12], 10, list(range(8)), 4, None]


def batch(*events: Any, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def same(found: Sequence[EngineEvent], wanted: Sequence[EngineEvent]) -> bool:
    """Equal but for what a dialect's encoder adds by default (attention kind)."""
    plain = [
        BlocksStored(
            e.hashes, e.parent, array("I", e.tokens), e.block_size, e.tier, e.adapter, e.salt
        )
        if isinstance(e, BlocksStored)
        else e
        for e in found
    ]
    return plain == list(wanted)


@every_dialect
def test_what_it_encodes_it_decodes(dialect: Dialect) -> None:
    events: list[EngineEvent] = [
        AllCleared(),
        BlocksStored(KEYS, None, array("I", range(8)), 4, Tier.CPU, "sql", "t1"),
        STORED,
        BlocksRemoved(KEYS[:1], Tier.GPU),
        BlocksRemoved(KEYS, Tier.DISK),
    ]
    decoded = dialect.decode(dialect.encode(2.5, events, 3))
    assert (decoded.ts, decoded.dp_rank, decoded.dropped) == (2.5, 3, ())
    assert same(decoded.events, events)


@every_dialect
@pytest.mark.parametrize("event", [MAP, ARRAY], ids=["map", "array"])
def test_arrays_and_maps_are_read_in_one_batch(dialect: Dialect, event: Any) -> None:
    decoded = dialect.decode(batch(event, MAP, ARRAY))
    assert same(decoded.events, [STORED] * 3)


@every_dialect
def test_a_batch_that_is_a_map_is_read(dialect: Dialect) -> None:
    payload = msgspec.msgpack.encode({"ts": 1.5, "events": [MAP], "data_parallel_rank": 2})
    decoded = dialect.decode(payload)
    assert same(decoded.events, [STORED]) and decoded.dp_rank == 2


@every_dialect
def test_a_rank_may_be_null_or_cut_off(dialect: Dialect) -> None:
    assert dialect.decode(batch(["AllBlocksCleared"], rank=None)).dp_rank is None
    assert dialect.decode(msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]]])).dp_rank is None


@every_dialect
def test_fields_nobody_knows_are_ignored(dialect: Dialect) -> None:
    longer = [*ARRAY, "GPU", None, None, None, None, None, "x", "y", "z", "new", ["newer"]]
    decoded = dialect.decode(batch({**MAP, "colour": "red", "depth": [1, {"a": 2}]}, longer))
    assert same(decoded.events, [STORED] * 2) and not decoded.dropped


@every_dialect
def test_only_what_is_needed_has_to_be_there(dialect: Dialect) -> None:
    shortest = {"type": "BlockStored", "block_hashes": [11]}
    decoded = dialect.decode(batch(shortest, {"type": "BlockRemoved", "block_hashes": []}))
    assert not decoded.dropped
    assert isinstance(decoded.events[0], BlocksStored) and not decoded.events[0].dense


@every_dialect
def test_one_bad_event_never_drops_its_batch(dialect: Dialect) -> None:
    bad: list[Any] = [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockStored"},
        {"type": "BlockRemoved", "block_hashes": "all"},
        {**MAP, "token_ids": [-1, 2]},
        {**MAP, "token_ids": [2**32]},
        {**MAP, "token_ids": ["a"]},
        {**MAP, "block_hashes": [2**64 - 1, 1.5]},
        {"block_hashes": [1]},
        ["Nonsense", 1],
        [],
        7,
        None,
        "BlockStored",
        ["BlockStored"],
    ]
    decoded = dialect.decode(batch(MAP, *bad, ["AllBlocksCleared"]))
    assert same(decoded.events, [STORED, AllCleared()])
    kinds = [drop.kind for drop in decoded.dropped]
    unknown = ["unknown"] * 7
    assert kinds[:7] == ["unknown", "BlockStored", "BlockRemoved", *["BlockStored"] * 4]
    assert sorted(kinds[7:]) == sorted([*unknown[:6], "BlockStored"])


@every_dialect
def test_hashes_of_all_widths_stay_apart(dialect: Dialect) -> None:
    numbers: list[int | bytes] = [0, 5, 2**63, 2**64 - 1, -5, -(2**63), b"\x05", b"\x00" * 32]
    decoded = dialect.decode(batch({"type": "BlockRemoved", "block_hashes": numbers}))
    removed = decoded.events[0]
    assert isinstance(removed, BlocksRemoved)
    assert len(set(removed.hashes)) == len(numbers)
    assert [engine_hash(key) for key in removed.hashes] == numbers


@every_dialect
@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("gpu", Tier.GPU),
        ("CPU", Tier.CPU),
        ("cpu", Tier.CPU),
        ("CPU_PINNED", Tier.CPU),
        ("CPU_TIER2", Tier.CPU),
        ("STORAGE", Tier.DISK),
        ("disk", Tier.DISK),
        ("EXTERNAL", Tier.REMOTE),
        ("moon", Tier.REMOTE),
    ],
)
def test_the_many_names_of_a_tier(dialect: Dialect, medium: str | None, tier: Tier) -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium}
    assert dialect.decode(batch(event)).events == (BlocksRemoved((engine_key(1),), tier),)


@every_dialect
def test_pairs_of_tokens_give_the_first_of_each(dialect: Dialect) -> None:
    paired = {**MAP, "token_ids": [[t, t + 1] for t in range(8)]}
    stored = dialect.decode(batch(paired)).events[0]
    assert isinstance(stored, BlocksStored)
    assert stored.paired and list(stored.tokens) == list(range(8))


@every_dialect
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x80",
        b"\xc1",
        b"hello",
        b"\x91" * 100_000,
        b"\x93\xc0" + b"\x91" * 100_000,
        b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff",
        b"\x93\xc0\x91\xc6\xff\xff\xff\xff",
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode(["now", [], 0]),
        msgspec.msgpack.encode([1.5, {}, 0]),
        msgspec.msgpack.encode([1.5, [], "rank"]),
        batch() + b"more",
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_what_is_no_batch_is_refused_by_one_error(dialect: Dialect, payload: bytes) -> None:
    with pytest.raises(BadBatch, match=f"payload of {len(payload)} bytes"):
        dialect.decode(payload)


def _decode(dialect: Dialect, payload: bytes) -> None:
    try:
        decoded = dialect.decode(payload)
    except BadBatch:
        return
    for event in decoded.events:
        assert isinstance(event, (BlocksStored, BlocksRemoved, AllCleared))


@every_dialect
@given(payload=st.binary(max_size=300))
def test_any_bytes_give_a_batch_or_bad_batch(dialect: Dialect, payload: bytes) -> None:
    _decode(dialect, payload)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
_names = st.sampled_from(
    ["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
     "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "locality", "cache_salt"]
)  # fmt: skip
_tags = st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Else"])
_maps = st.builds(
    lambda tag, fields: {"type": tag, "block_hashes": [1], **fields},
    _tags,
    st.dictionaries(_names, _anything, max_size=6),
)
_arrays = st.builds(lambda tag, rest: [tag, *rest], _tags, st.lists(_anything, max_size=11))


@every_dialect
@given(events=st.lists(_maps | _arrays | _anything, max_size=4))
def test_any_events_give_a_batch(dialect: Dialect, events: list[Any]) -> None:
    decoded = dialect.decode(batch(*events, MAP))
    told = len(decoded.events) + decoded.joined + len(decoded.dropped)
    assert told == len(events) + 1
    assert same(decoded.events[-1:], [STORED])

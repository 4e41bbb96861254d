"""A batch read in one go means what it means event by event, and whatever is strange is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.streams import lines
from msgspec.structs import replace

from kvplane.events.dialects import sglang, vllm, wire
from kvplane.events.dialects.base import (
    BlocksRemoved,
    BlocksStored,
    Decoded,
    Dialect,
    EngineEvent,
    engine_key,
)
from kvplane.events.dialects.swift import Swift
from kvplane.events.translation import Translator
from kvplane.vocabulary import Epoch, Pod, Worker

DIALECTS = {"vllm": vllm.new, "sglang": sglang.new}
UNKNOWN = ["Unheard", 1]  # an event of no known kind: the batch is read event by event
PAYLOADS = [
    (name, bytes.fromhex(told["payload"]))
    for name, file in (
        ("vllm", "vllm-kv-events-versions.jsonl"),
        ("sglang", "sglang-kv-events.jsonl"),
    )
    for told in lines(file)
    if "payload" in told
]


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 3])


def joined(decoded: Decoded) -> tuple[EngineEvent, ...]:
    """Its events, removals told one after the other in one noun whichever way they were read."""
    events: list[EngineEvent] = []
    for event in decoded.events:
        last = events[-1] if events else None
        if not isinstance(event, BlocksRemoved) or not isinstance(last, BlocksRemoved):
            events.append(event)
        elif replace(event, hashes=()) == replace(last, hashes=()):
            events[-1] = replace(last, hashes=last.hashes + event.hashes)
        else:
            events.append(event)
    return tuple(events)


def slowly(dialect: Dialect, payload: bytes) -> tuple[Any, ...]:
    """The events of a batch that has one more, of an unknown kind."""
    ts, events, *rest = msgspec.msgpack.decode(payload)
    decoded = dialect.decode(msgspec.msgpack.encode([ts, [*events, UNKNOWN], *rest]))
    assert [drop.kind for drop in decoded.dropped] == ["unknown"]
    return decoded.ts, decoded.dp_rank, joined(decoded)


@pytest.mark.parametrize("name,payload", PAYLOADS)
def test_recorded_batches_mean_the_same_in_one_go(name: str, payload: bytes) -> None:
    quick, slow = DIALECTS[name](), DIALECTS[name]()
    quick.decode(payload)  # its media are known from here on
    decoded = quick.decode(payload)
    if isinstance(msgspec.msgpack.decode(payload), list):
        assert (decoded.ts, decoded.dp_rank, joined(decoded)) == slowly(slow, payload)


@pytest.mark.parametrize("name,payload", [one for one in PAYLOADS if one[0] == "vllm"])
def test_what_engines_send_is_plain(name: str, payload: bytes) -> None:
    if isinstance(msgspec.msgpack.decode(payload), list):
        assert Swift((wire.MAPS, vllm.ARRAYS)).read(payload) is not None


STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [7, 8], "block_size": 2}


@pytest.mark.parametrize(
    "events",
    [
        [STORED | {"colour": 1}],
        [["BlockRemoved", [1], "GPU", 0, None, None, 7]],
        [STORED, ["BlockRemoved", [1], "GPU"]],  # two layouts in one batch
        [STORED, UNKNOWN],
        [STORED | {"block_hashes": ["one"]}],
        [{b"type": b"BlockStored", b"block_hashes": [1]}],
    ],
)
def test_what_is_strange_is_not_read_in_one_go(events: list[Any]) -> None:
    assert Swift((wire.MAPS, vllm.ARRAYS)).read(batch(*events)) is None


def test_the_layout_that_came_last_is_tried_first_and_both_go_on_being_read() -> None:
    swift = Swift((wire.MAPS, vllm.ARRAYS))
    for event in (STORED, ["BlockRemoved", [1], "GPU"], STORED, ["AllBlocksCleared"]):
        found = swift.read(batch(event))
        assert found is not None and len(found.events) == 1 and found.dp_rank == 3


def test_a_medium_that_nobody_met_is_told_once_and_then_passed_by() -> None:
    dialect = vllm.new()
    event = STORED | {"medium": "TAPE"}
    assert dialect.decode(batch(event)).unknown == ("medium:TAPE",)
    assert dialect.decode(batch(event)).unknown == ()


@given(st.lists(st.sampled_from((STORED, {"type": "BlockRemoved", "block_hashes": [-5, b"x" * 32]},
    {"type": "AllBlocksCleared"}, STORED | {"token_ids": [2**32]}, STORED | {"group_idx": -1},
    STORED | {"token_ids": [[1, 2], [2, 3]]}, {"type": "BlockRemoved", "block_hashes": [2**64 - 1]},
)), max_size=6))  # fmt: skip
def test_mixed_batches_mean_the_same_whichever_way_they_are_read(events: list[Any]) -> None:
    one = vllm.new().decode(batch(*events))
    other = vllm.new().decode(batch(*events, UNKNOWN))
    assert joined(one) == joined(other) and one.dropped == other.dropped[:-1]
    assert len(one.events) + one.joined == len(other.events)


REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}


@pytest.mark.parametrize(
    "other,nouns",
    [
        ({}, 1),
        ({"block_hashes": [2, 3]}, 1),
        ({"medium": "CPU"}, 2),  # another tier, group, place: another noun
        ({"group_idx": 0}, 2),
        ({"group_idx": 1}, 2),
        ({"locality": "REMOTE"}, 2),
    ],
)
def test_removals_are_joined_where_they_say_the_same(other: dict[str, Any], nouns: int) -> None:
    dialect = vllm.new()
    told = batch(REMOVED, STORED, REMOVED, REMOVED | other, REMOVED)
    dialect.decode(told)
    decoded = dialect.decode(told)
    removed = [event for event in decoded.events if isinstance(event, BlocksRemoved)]
    assert len(removed) == 1 + (1 if nouns == 1 else 3) and decoded.joined == 4 - len(removed)
    assert sum(len(event.hashes) for event in removed) == 3 + len(other.get("block_hashes", [1]))


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4), st.integers(1, 3)), max_size=12))
def test_what_is_joined_does_to_a_table_what_its_parts_do(told: list[tuple[Any, ...]]) -> None:
    """Copies, unknown names and blocks that come and go within the batch included."""
    events: list[EngineEvent] = []
    for stored, first, count in told:
        keys = tuple(engine_key(key) for key in range(first, first + count))
        if stored:
            parent = engine_key(first - 1) if first > 1 else None
            tokens = [key * 2 + part for key in range(first, first + count) for part in (0, 1)]
            events.append(BlocksStored(keys, parent, tokens, 2))
        else:
            events += [BlocksRemoved((key,)) for key in keys]
    one, other = (Translator(Worker(Pod("p")), Epoch(1), "m", {}) for _ in range(2))
    apart = one.translate(events)
    together = other.translate(joined(Decoded(0.0, tuple(events), None)))
    assert one.table == other.table
    assert (apart.rows, apart.changes) == (together.rows, together.changes)
    assert apart.left_out == together.left_out

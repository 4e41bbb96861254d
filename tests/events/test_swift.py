"""A batch read in one go means what it means event by event, and whatever is strange is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.streams import lines

from kvplane.events.dialects import sglang, vllm, wire
from kvplane.events.dialects.base import Dialect
from kvplane.events.dialects.swift import Swift

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


def slowly(dialect: Dialect, payload: bytes) -> tuple[Any, ...]:
    """The events of a batch that has one more, of an unknown kind."""
    ts, events, *rest = msgspec.msgpack.decode(payload)
    decoded = dialect.decode(msgspec.msgpack.encode([ts, [*events, UNKNOWN], *rest]))
    assert [drop.kind for drop in decoded.dropped] == ["unknown"]
    return decoded.ts, decoded.dp_rank, decoded.events


@pytest.mark.parametrize("name,payload", PAYLOADS)
def test_recorded_batches_mean_the_same_in_one_go(name: str, payload: bytes) -> None:
    quick, slow = DIALECTS[name](), DIALECTS[name]()
    quick.decode(payload)  # its media are known from here on
    decoded = quick.decode(payload)
    if isinstance(msgspec.msgpack.decode(payload), list):
        assert (decoded.ts, decoded.dp_rank, decoded.events) == slowly(slow, payload)


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
    assert one.events == other.events and one.dropped == other.dropped[:-1]

"""What each engine's members mean, one by one, in every layout that was recorded or published."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvplane.events import DIALECTS, AllCleared, BlocksRemoved, BlocksStored, engine_key
from kvplane.events.dialects import mooncake, sglang, vllm
from kvplane.events.dialects.base import Decoded, known_medium, tier_of
from kvplane.vocabulary import Tier

VECTORS = Path(__file__).parents[1] / "vectors"
TIERS = {None: Tier.GPU, "GPU": Tier.GPU, "CPU": Tier.CPU}


def lines(name: str) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, (VECTORS / name).read_text().splitlines())


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def key(told: Any) -> bytes:
    return engine_key(bytes.fromhex(told["$bytes"]) if isinstance(told, dict) else told)


def fields(event: Any, names: list[str]) -> dict[str, Any]:
    """An event as its recorder saw it, by name."""
    return (
        event
        if isinstance(event, dict)
        else {"type": event[0], **dict(zip(names, event[1:], strict=False))}
    )


RECORDED = list(lines("vllm-kv-events-versions.jsonl"))


@pytest.mark.parametrize("told", RECORDED, ids=[f"{r['vllm']} {r['desc']}" for r in RECORDED])
def test_every_member_of_every_version_of_vllm(told: dict[str, Any]) -> None:
    decoded = vllm.new().decode(bytes.fromhex(told["payload"]))
    assert (decoded.dropped, decoded.unknown) == ((), ())
    for event, seen in zip(decoded.events, told["decoded"][1], strict=True):
        removed = (seen["type"] if isinstance(seen, dict) else seen[0]) == "BlockRemoved"
        said = fields(seen, told["removed_fields" if removed else "event_fields"])
        if isinstance(event, AllCleared):
            assert said["type"] == "AllBlocksCleared"
            continue
        far = said.get("locality") == "REMOTE"
        assert event.hashes == tuple(map(key, said["block_hashes"]))
        assert event.tier is (Tier.REMOTE if far else TIERS[said.get("medium")])
        assert event.group == (said.get("group_idx") or 0)
        assert event.grouped == (said.get("group_idx") is not None)
        if isinstance(event, BlocksStored):
            assert_stored(event, said)


def assert_stored(event: BlocksStored, said: dict[str, Any]) -> None:
    parent = said["parent_block_hash"]
    assert event.parent == (None if parent is None else key(parent))
    assert list(event.tokens) == said["token_ids"] and event.block_size == said["block_size"]
    assert event.adapter == (said.get("lora_name") or "")
    assert event.adapter_id == (None if event.adapter else said.get("lora_id"))
    assert event.kind == (said.get("kv_cache_spec_kind") or "")
    assert event.window == (said.get("kv_cache_spec_sliding_window") or 0)
    assert (event.salt, event.extra, event.paired, event.lookahead) == ("", (), False, 0)


def test_arrays_count_from_the_front_and_maps_by_name() -> None:
    array_form = [
        "BlockStored", [11, 12], 10, list(range(8)), 4, 7, "CPU", None, [["img"], None], 2,
        "sliding_window", 64, "REMOTE", "tier-1", "s-1", [[8], [9]],
    ]  # fmt: skip
    names = [
        "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium",
        "lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window", "locality", "ownership", "session_id",
        "lookahead_token_ids",
    ]  # fmt: skip
    decoded = vllm.new().decode(batch(array_form, dict(zip(names, array_form, strict=True))))
    by_place, by_name = decoded.events
    assert by_place == by_name and decoded.unknown == ()
    assert isinstance(by_place, BlocksStored)
    assert (by_place.tier, by_place.group, by_place.grouped) == (Tier.REMOTE, 2, True)
    assert (by_place.window, by_place.lookahead, by_place.adapter_id) == (64, 1, 7)
    assert by_place.extra == (("img",), ())


@pytest.mark.parametrize("cut", range(2, 17))
def test_an_array_may_end_anywhere(cut: int) -> None:
    whole = [
        "BlockStored", [11, 12], 10, list(range(8)), 4, 7, "GPU", None, None, 2, "mamba", 1,
        "LOCAL", "", "s-1", None,
    ]  # fmt: skip
    (event,) = vllm.new().decode(batch(whole[:cut])).events
    assert isinstance(event, BlocksStored) and event.hashes == (engine_key(11), engine_key(12))
    assert event.kind == ("mamba" if cut > 10 else "")


@pytest.mark.parametrize("name", DIALECTS)
def test_tokens_may_be_nil(name: str) -> None:
    stored = {"type": "BlockStored", "block_hashes": [1], "token_ids": None, "block_size": None}
    (event,) = DIALECTS[name].decode(batch(stored)).events
    assert event == BlocksStored((engine_key(1),), None, array("I"), 0)


def test_the_keys_of_images_and_prompts_and_salts() -> None:
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3],
        "token_ids": list(range(6)),
        "block_size": 2,
        "lora_name": "sql",
        "extra_keys": [["sql", ["a", 1], "pepper"], ["sql", ["a", -1], ["b", 0]], ["sql", b"\xff"]],
    }
    (event,) = vllm.new().decode(batch(stored)).events
    assert isinstance(event, BlocksStored)
    assert (event.salt, event.adapter) == ("pepper", "sql")
    assert event.extra == (("a@1",), ("a@-1", "b@0"), ("ff",))


@pytest.mark.parametrize("keys", [[["a"]], [[["a", 0]]] * 4])
def test_keys_that_do_not_belong_to_the_hashes_cost_the_event_not_the_truth(keys: Any) -> None:
    stored = {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": 9}
    decoded = vllm.new().decode(batch({**stored, "extra_keys": keys}, stored))
    assert len(decoded.events) == 1 and "extra_keys" in decoded.dropped[0].reason


# SGLang


def test_sglang_says_salt_and_adapter_by_name_or_in_the_last_place() -> None:
    start = ["BlockStored", [1], None, [5, 6], 2, None, "CPU_PINNED"]
    named = {"cache_salt": "s", "lora_name": "sql", "session_id": "x"}
    by_name = {
        "type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "token_ids": [5, 6],
        "block_size": 2, "lora_id": None, "medium": "CPU_PINNED", **named,
    }  # fmt: skip
    decoded = sglang.new().decode(batch([*start, named], by_name, [*start, None]))
    first, second, third = decoded.events
    assert first == second and decoded.unknown == ()
    assert isinstance(first, BlocksStored) and isinstance(third, BlocksStored)
    assert (first.salt, first.adapter, first.tier) == ("s", "sql", Tier.CPU)
    assert (third.salt, third.adapter) == ("", "")


def test_an_sglang_removal_may_carry_the_trailing_element_too() -> None:
    decoded = sglang.new().decode(batch(["BlockRemoved", [-5], "GPU", {"session_id": "x"}]))
    assert decoded.events == (BlocksRemoved((engine_key(-5),)),) and not decoded.dropped


# LMCache, in vLLM's stream


@pytest.mark.parametrize(
    ("medium", "tier"),
    [("CPU", Tier.CPU), ("LocalCPUBackend", Tier.CPU), ("LocalDiskBackend", Tier.DISK),
     ("RemoteBackend", Tier.REMOTE)],
)  # fmt: skip
def test_lmcache_stores_chunks_under_hashes_of_its_own(medium: str, tier: Tier) -> None:
    told = {
        "type": "BlockStored", "block_hashes": [77], "parent_block_hash": None,
        "token_ids": list(range(256)), "block_size": 256, "lora_id": None, "medium": medium,
    }  # fmt: skip
    engine = {**told, "block_hashes": list(range(16)), "block_size": 16, "medium": "GPU"}
    decoded = vllm.new().decode(batch(engine, told))
    chunk = decoded.events[1]
    assert isinstance(chunk, BlocksStored) and chunk.dense and decoded.unknown == ()
    assert (chunk.block_size, chunk.tier, chunk.grouped) == (256, tier, False)


# Mooncake


def stored_object(**members: Any) -> dict[str, Any]:
    return {
        "event_id": 1, "timestamp": 1700000000000, "event_type": "stored", "model_name": None,
        "block_size": None, "additional_salt": None, "lora_name": None, "tenant_id": "t",
        "backend_id": "b", "medium": "cpu", "dp_rank": 0, "seq_hashes": [11],
        "base_block_idx": None, "parent_hash": None, "token_ids": None, "object_key": "11",
        **members,
    }  # fmt: skip


def mooncakes(*events: Any) -> Decoded:
    return mooncake.new().decode(batch(*events))


def test_mooncakes_master_names_objects_without_tokens() -> None:
    removed = {**stored_object(event_type="removed"), "medium": "disk"}
    decoded = mooncakes(stored_object(), removed, {"event_type": "cleared"})
    placeholder = BlocksStored((engine_key(11),), None, array("I"), 0, Tier.CPU)
    assert decoded.events[0] == placeholder
    assert decoded.events[1:] == (BlocksRemoved((engine_key(11),), Tier.DISK), AllCleared())
    assert (decoded.dropped, decoded.unknown) == ((), ())


def test_mooncakes_compatibility_mode_adds_vllms_names() -> None:
    both = stored_object(seq_hashes=None, type="BlockStored", block_hashes=[5])
    vllms = {"type": "BlockRemoved", "block_hashes": [5], "medium": "cpu"}
    decoded = mooncakes(both, vllms)
    assert [e.hashes for e in decoded.events if not isinstance(e, AllCleared)] == [
        (engine_key(5),),
        (engine_key(5),),
    ]


@pytest.mark.parametrize(
    ("told", "number"), [("42", 42), (42, 42), ("18446744073709551615", 2**64 - 1)]
)
def test_an_object_whose_key_is_a_number_is_that_block(told: Any, number: int) -> None:
    decoded = mooncakes(stored_object(seq_hashes=None, object_key=told))
    assert isinstance(decoded.events[0], BlocksStored)
    assert decoded.events[0].hashes == (engine_key(number),)


@pytest.mark.parametrize("told", ["qwen@3", "", None, "18446744073709551616", "٤٢", -1.5])
def test_an_object_whose_key_is_no_number_is_counted_and_left_out(told: Any) -> None:
    decoded = mooncakes(stored_object(seq_hashes=[], object_key=told), stored_object())
    assert len(decoded.events) == 1 and [d.kind for d in decoded.dropped] == ["BlockStored"]


# Names that nobody knows


def test_unknown_members_are_read_past_and_told_once() -> None:
    dialect = vllm.new()
    longer = ["BlockStored", [1], None, [1, 2], 2, *[None] * 11, "new", {"newer": 1}]
    stranger = {"type": "BlockStored", "block_hashes": [1], "colour": "red", "depth": [1, {}]}
    decoded = dialect.decode(batch(longer, stranger, longer, stranger))
    assert len(decoded.events) == 4 and not decoded.dropped
    assert sorted(decoded.unknown) == [
        "BlockStored.colour", "BlockStored.depth", "BlockStored.field16", "BlockStored.field17",
    ]  # fmt: skip
    assert dialect.decode(batch(longer, stranger)).unknown == ()
    assert dialect.decode(batch(["AllBlocksCleared", 1])).unknown == ("AllBlocksCleared.field1",)
    assert vllm.new().decode(batch(stranger)).unknown == decoded.unknown[2:]


def test_the_oldest_short_form_has_nothing_unknown() -> None:
    decoded = vllm.new().decode(batch(["BlockStored", [1], None, [1, 2], 2, None]))
    assert decoded.unknown == () and len(decoded.events) == 1


def test_a_newcomer_behind_a_shape_that_was_seen_is_told_before_long() -> None:
    dialect = vllm.new()
    known = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
    other = {"type": "BlockRemoved", "block_hashes": [1], "colour": "red"}
    assert dialect.decode(batch(known)).unknown == ()
    told = [name for _ in range(600) for name in dialect.decode(batch(other)).unknown]
    assert told == ["BlockRemoved.colour"]


@pytest.mark.parametrize("name", DIALECTS)
def test_names_made_up_without_end_are_told_with_an_end(name: str) -> None:
    dialect = {"vllm": vllm, "sglang": sglang, "mooncake": mooncake}[name].new()
    told: list[str] = []
    for number in range(3000):
        event = {"type": "BlockRemoved", "block_hashes": [1], f"made-up-{number}" * 20: 0}
        many = {**event, **{str(at): at for at in range(number % 40)}, "medium": f"m{number}"}
        decoded = dialect.decode(batch(many))
        assert len(decoded.events) == 1
        told += decoded.unknown
    assert 0 < len(told) <= 256 and max(map(len, told)) < 100
    assert len(told) == len(set(told))


def test_an_unknown_medium_is_the_farthest_tier_and_told_once() -> None:
    dialect = vllm.new()
    tape = {"type": "BlockRemoved", "block_hashes": [1], "medium": "tape" * 50}
    decoded = dialect.decode(batch(tape, {**tape, "medium": "CPU_TIER2"}))
    assert decoded.events[0] == BlocksRemoved((engine_key(1),), Tier.REMOTE)
    assert decoded.unknown == ("medium:" + "tape" * 15,)
    assert dialect.decode(batch(tape)).unknown == ()
    assert known_medium("Host_Numa1") and not known_medium("tape")
    assert tier_of("GPU", "REMOTE") is Tier.GPU and tier_of("CPU", "remote") is Tier.REMOTE


# Text and bytes


@pytest.mark.parametrize("form", ["map", "array"])
def test_text_that_was_sent_as_bytes_is_text(form: str) -> None:
    maps = {
        b"type": b"BlockStored", b"block_hashes": [b"\xff" * 32], b"token_ids": [1, 2],
        b"block_size": 2, b"medium": b"CPU", b"lora_name": b"sql",
    }  # fmt: skip
    arrays = [b"BlockStored", [b"\xff" * 32], None, [1, 2], 2, None, b"CPU", b"sql"]
    (event,) = vllm.new().decode(batch(maps if form == "map" else arrays)).events
    assert isinstance(event, BlocksStored) and event.dense
    assert (event.tier, event.adapter) == (Tier.CPU, "sql")
    assert event.hashes == (engine_key(b"\xff" * 32),)


def test_text_that_is_no_text_costs_one_event() -> None:
    bad = {b"type": b"BlockStored", b"block_hashes": [1], b"medium": b"\xff\xfe"}
    good = {"type": "BlockStored", "block_hashes": [1]}
    decoded = vllm.new().decode(batch(bad, good))
    assert len(decoded.events) == 1 and len(decoded.dropped) == 1


# Clocks


@pytest.mark.parametrize(
    "ts", [12.5, 0, 1.7e9, 1.7e9 + 86400, -1.0, float("nan"), float("inf"), None]
)
def test_the_clock_of_an_engine_decides_nothing(ts: float | None) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}
    found = vllm.new().decode(msgspec.msgpack.encode([ts, [event], 0]))
    assert found.events == vllm.new().decode(batch(event)).events
    assert math.isfinite(found.ts)


def test_what_took_blocks_away_and_was_not_understood_is_worse() -> None:
    bad = [{"type": "BlockStored"}, {"type": "BlockRemoved"}, {"type": "Else"}]
    assert [drop.took_away for drop in vllm.new().decode(batch(*bad)).dropped] == [
        False,
        True,
        False,
    ]


def test_a_rank_is_read_under_all_its_names() -> None:
    for name in ("data_parallel_rank", "attn_dp_rank", "dp_rank"):
        payload = msgspec.msgpack.encode({"ts": 1.0, "events": [], name: 3})
        assert vllm.new().decode(payload).dp_rank == 3

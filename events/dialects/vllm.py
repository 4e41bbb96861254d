"""vLLM: KV events of 0.9 to 0.33, positional arrays (up to 0.23) and maps (from 0.24 on).

Pure: one member of this seam; wire.py has the shared members, reading.py does the layout, base.py
has the nouns. Open it when vLLM adds a member. Source: vLLM's own structs of 17 versions, recorded
in tests/vectors/vllm-kv-events-versions.jsonl. The map form of our own engine is this one too.

LMCache's events come in this stream: medium CPU or a backend's name, hashes of its own and its
chunk (256 tokens by default) as block size. AIBrix sends none: its gateway reads vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvplane.vocabulary import Tier

from . import wire
from .base import AllCleared, BlocksRemoved, BlocksStored, Dialect, EngineEvent, engine_hash
from .nouns import Members, as_removed, as_stored
from .reading import Reader

MEDIUM = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.DISK: "STORAGE", Tier.REMOTE: "REMOTE"}


class _StoredArray(wire.StoredArray, frozen=True, array_like=True, tag="BlockStored"):
    lora_name: str | None = None
    extra_keys: list[list[Any] | str | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Any = None  # from here on only maps were seen; the order is vLLM's
    ownership: Any = None
    session_id: Any = None
    lookahead_token_ids: Any = None


class _RemovedArray(wire.RemovedArray, frozen=True, array_like=True, tag="BlockRemoved"):
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


def split_extra(
    keys: Iterable[Sequence[Any] | None], adapter: str, at_root: bool
) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Untagged extra keys of each hash -> (cache salt, other keys as text per hash).

    Order on the wire: adapter name, [item, offset] pairs, salt (first block of a prompt only),
    bytes of prompt embeds. A text left over on the first block is the salt: an old version's bare
    image id would be read so too, which only costs hits.

        [["sql", "t1"], ["sql", ["img", 3]]], "sql" -> ("t1", ((), ("img@3",)))
    """
    keys = tuple(keys)
    if not any(keys):
        return "", ()
    salt = ""
    rest: list[tuple[str, ...]] = []
    for position, entry in enumerate(keys):
        items = [entry] if isinstance(entry, str) else list(entry or ())
        if adapter and items and items[0] == adapter:
            items.pop(0)
        texts = [item for item in items if isinstance(item, str)]
        if at_root and position == 0 and texts:
            salt = texts[-1]
            items.remove(salt)
        rest.append(tuple(_text(item) for item in items))
    return salt, tuple(rest) if any(rest) else ()


def _text(item: Any) -> str:
    if isinstance(item, (list, tuple)) and len(item) == 2:
        return f"{item[0]}@{item[1]}"
    return item.hex() if isinstance(item, bytes) else str(item)


def _members(frame: wire.StoredMap | _StoredArray) -> Members:
    adapter = frame.lora_name or ""
    if not frame.extra_keys:
        return Members(adapter, getattr(frame, "cache_salt", None) or "")
    at_root = frame.parent_block_hash is None
    salt, extra = split_extra(frame.extra_keys, adapter, at_root)
    if extra and len(extra) != len(frame.block_hashes):
        raise ValueError(f"extra_keys of {len(extra)} for {len(frame.block_hashes)} block_hashes")
    return Members(adapter, getattr(frame, "cache_salt", None) or salt, extra)


def _convert(frame: Any) -> EngineEvent:
    if isinstance(frame, (wire.RemovedMap, _RemovedArray)):
        return as_removed(frame)
    if isinstance(frame, (wire.StoredMap, _StoredArray)):
        return as_stored(frame, _members(frame))
    return AllCleared()


def encode(ts: float, events: Sequence[EngineEvent], dp_rank: int = 0) -> bytes:
    """A batch as vLLM 0.24 and newer send it: maps, fields at their default left out."""
    return msgspec.msgpack.encode([ts, [_map(event) for event in events], dp_rank])


def _map(event: EngineEvent) -> dict[str, Any]:
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [engine_hash(key) for key in event.hashes]
    if isinstance(event, BlocksRemoved):
        removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM[event.tier]}
        told = event.group or event.grouped
        return removed | ({"group_idx": event.group} if told else {})
    stored = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else engine_hash(event.parent),
        "token_ids": [int(token) for token in event.tokens],
        "block_size": event.block_size,
        "lora_id": event.adapter_id,
        "medium": MEDIUM[event.tier],
        "lora_name": event.adapter or None,
        "extra_keys": _extra_keys(event),
        "group_idx": event.group,
        "kv_cache_spec_kind": event.kind or "full_attention",
    }
    return stored | ({"kv_cache_spec_sliding_window": event.window} if event.window else {})


def _extra_keys(event: BlocksStored) -> list[list[Any] | None]:
    keys: list[list[Any] | None] = []
    for position in range(len(event.hashes)):
        entry: list[Any] = [event.adapter] if event.adapter else []
        if event.extra:
            entry += [_pair(text) for text in event.extra[position]]
        if event.salt and position == 0 and event.parent is None:
            entry.append(event.salt)
        keys.append(entry or None)
    return keys


def _pair(text: str) -> list[Any]:
    item, _, offset = text.rpartition("@")
    return [item, int(offset)] if item and offset.lstrip("-").isdecimal() else [text, 0]


ARRAYS = _StoredArray | _RemovedArray | wire.ClearedArray


def new() -> Dialect:
    """A dialect that has met nothing strange yet."""
    reader = Reader((wire.MAPS,), ARRAYS, _convert)
    return Dialect("vllm", reader.decode, encode, copies=True)


convert = _convert
VLLM = new()

"""SGLang: KV events as maps (0.5.23) and as positional arrays (before), hashes signed.

Pure: one member of this seam; wire.py has the shared members, reading.py does the layout, base.py
has the nouns. Open it when SGLang adds a member. Source: SGLang's own radix cache, recorded in
tests/vectors/sglang-kv-events.jsonl.

Known blindness: in the default format `extra_key` is neither sent nor part of the hash, so two
namespaces give equal ids and one's removal looks like the other's. A block is therefore there or
not (`copies=False`): the first removal takes it away, which may say too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from kvplane.vocabulary import Tier

from . import wire
from .base import AllCleared, BlocksRemoved, Dialect, EngineEvent, engine_hash
from .nouns import Members, as_removed, as_stored
from .reading import Reader

MEDIUM = {Tier.GPU: "GPU", Tier.CPU: "CPU_PINNED", Tier.DISK: "DISK", Tier.REMOTE: "EXTERNAL"}


class _StoredArray(wire.StoredArray, frozen=True, array_like=True, tag="BlockStored"):
    metadata: Any = None  # a trailing element of the last array versions
    group_idx: ClassVar[None] = None  # what this layout never has
    kv_cache_spec_kind: ClassVar[None] = None
    kv_cache_spec_sliding_window: ClassVar[None] = None
    locality: ClassVar[None] = None
    lookahead_token_ids: ClassVar[None] = None


class _RemovedArray(wire.RemovedArray, frozen=True, array_like=True, tag="BlockRemoved"):
    metadata: Any = None
    group_idx: ClassVar[None] = None
    locality: ClassVar[None] = None


def _convert(frame: Any) -> EngineEvent:
    if isinstance(frame, wire.StoredMap):
        return as_stored(frame, Members(frame.lora_name or "", frame.cache_salt or ""))
    if isinstance(frame, _StoredArray):
        told = frame.metadata if isinstance(frame.metadata, dict) else {}
        adapter, salt = (str(told.get(name) or "") for name in ("lora_name", "cache_salt"))
        return as_stored(frame, Members(adapter, salt))
    if isinstance(frame, (wire.RemovedMap, _RemovedArray)):
        return as_removed(frame)
    return AllCleared()


def encode(ts: float, events: Sequence[EngineEvent], dp_rank: int = 0) -> bytes:
    """A batch as SGLang 0.5.23 sends it: maps, optional members left out when null."""
    return msgspec.msgpack.encode([ts, [_map(event) for event in events], dp_rank])


def _map(event: EngineEvent) -> dict[str, Any]:
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [_signed(key) for key in event.hashes]
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM[event.tier]}
    stored: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else _signed(event.parent),
        "token_ids": [int(token) for token in event.tokens],
        "block_size": event.block_size,
        "lora_id": event.adapter_id,
        "medium": MEDIUM[event.tier],
    }
    named = {"cache_salt": event.salt, "lora_name": event.adapter}
    return stored | {name: text for name, text in named.items() if text}


def _signed(key: bytes) -> int:
    """SGLang's ids are signed 64 bit; a digest gives its first 8 bytes."""
    value = engine_hash(key)
    if isinstance(value, bytes):
        return int.from_bytes(value[:8], "big", signed=True)
    return value - (1 << 64) if value >= 1 << 63 else value


def new() -> Dialect:
    """A dialect that has met nothing strange yet."""
    reader = Reader((wire.MAPS,), _StoredArray | _RemovedArray | wire.ClearedArray, _convert)
    return Dialect("sglang", reader.decode, encode, copies=False)


SGLANG = new()

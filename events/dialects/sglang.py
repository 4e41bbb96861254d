"""SGLang: KV events as maps (0.5.23) and as positional arrays (before), hashes signed.

Pure: one member of this seam; reading.py does the layout, base.py has the nouns. Open it when
SGLang adds a field. Source: SGLang's own radix cache, recorded in
tests/vectors/sglang-kv-events.jsonl.

Known blindness: in the default format `extra_key` is neither sent nor part of the hash, so two
namespaces give equal ids and one's removal looks like the other's. A block is therefore there or
not (`copies=False`): the first removal takes it away, which may say too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvplane.vocabulary import Tier

from .base import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Dialect,
    EngineEvent,
    engine_hash,
    engine_key,
    tier_of,
)
from .reading import NO_TOKENS, ClearedArray, ClearedMap, Reader, read_tokens

MEDIUM = {Tier.GPU: "GPU", Tier.CPU: "CPU_PINNED", Tier.DISK: "DISK", Tier.REMOTE: "EXTERNAL"}


class _StoredMap(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = NO_TOKENS
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    lora_name: str | None = None


class _StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = NO_TOKENS
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    metadata: Any = None  # a trailing element of the last array versions


class _RemovedMap(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None


def _stored(frame: _StoredMap | _StoredArray) -> BlocksStored:
    parent = frame.parent_block_hash
    tokens, paired = read_tokens(frame.token_ids)
    if isinstance(frame, _StoredArray):
        told = frame.metadata if isinstance(frame.metadata, dict) else {}
        salt, adapter = str(told.get("cache_salt") or ""), str(told.get("lora_name") or "")
    else:
        salt, adapter = frame.cache_salt or "", frame.lora_name or ""
    return BlocksStored(
        hashes=tuple(engine_key(value) for value in frame.block_hashes),
        parent=None if parent is None else engine_key(parent),
        tokens=tokens,
        block_size=frame.block_size,
        tier=tier_of(frame.medium),
        adapter=adapter,
        salt=salt,
        paired=paired,
        adapter_id=None if adapter else frame.lora_id,
    )


def _convert(frame: Any) -> EngineEvent:
    if isinstance(frame, (_StoredMap, _StoredArray)):
        return _stored(frame)
    return BlocksRemoved(
        tuple(engine_key(value) for value in frame.block_hashes), tier_of(frame.medium)
    )


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


_READER = Reader(
    _StoredMap | _RemovedMap | ClearedMap, _StoredArray | _RemovedArray | ClearedArray, _convert
)
SGLANG = Dialect("sglang", _READER.decode, encode, copies=False)

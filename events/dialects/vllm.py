"""vLLM: KV events of 0.9 to 0.33, positional arrays (up to 0.23) and maps (from 0.24 on).

Pure: one member of this seam; reading.py does the layout, base.py has the nouns. Open it when vLLM
adds a field. Source: vLLM's own structs of 17 versions, recorded in
tests/vectors/vllm-kv-events-versions.jsonl. The map form of our own engine is this one too;
`cache_salt` is read where somebody sends it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

MEDIUM = {Tier.GPU: "GPU", Tier.CPU: "CPU", Tier.DISK: "STORAGE", Tier.REMOTE: "REMOTE"}


class _StoredMap(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = NO_TOKENS
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    locality: str | None = None
    cache_salt: str | None = None  # not vLLM's; SGLang's maps are else the same


class _StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = NO_TOKENS
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedMap(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class _RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


def split_extra(
    keys: Iterable[Sequence[Any] | None], adapter: str, at_root: bool
) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Untagged extra keys of each hash -> (cache salt, other keys as text per hash).

    Order on the wire: adapter name, [item, offset] pairs, salt (first block of a prompt only),
    bytes of prompt embeds. A text left over on the first block is the salt: an old version's bare
    image id would be read so too, which only costs hits.

        [["sql", "t1"], ["sql", ["img", 3]]], "sql" -> ("t1", ((), ("img@3",)))
    """
    salt = ""
    rest: list[tuple[str, ...]] = []
    keys = tuple(keys)
    if not any(keys):
        return "", ()
    for position, entry in enumerate(keys):
        items = list(entry or ())
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


def _group(told: int | None) -> int:
    if not 0 <= (told or 0) <= 0xFFFF:
        raise ValueError(f"group_idx {told}: must be 0 to 65535")
    return told or 0


def _stored(frame: _StoredMap | _StoredArray) -> BlocksStored:
    adapter = frame.lora_name or ""
    parent = frame.parent_block_hash
    salt, extra = split_extra(frame.extra_keys or (), adapter, at_root=parent is None)
    tokens, paired = read_tokens(frame.token_ids)
    return BlocksStored(
        hashes=tuple(engine_key(value) for value in frame.block_hashes),
        parent=None if parent is None else engine_key(parent),
        tokens=tokens,
        block_size=frame.block_size,
        tier=tier_of(frame.medium, getattr(frame, "locality", None)),
        adapter=adapter,
        salt=getattr(frame, "cache_salt", None) or salt,
        extra=extra,
        group=_group(frame.group_idx),
        kind=frame.kv_cache_spec_kind or "",
        paired=paired,
        adapter_id=None if adapter else frame.lora_id,
    )


def _convert(frame: Any) -> EngineEvent:
    if isinstance(frame, (_StoredMap, _StoredArray)):
        return _stored(frame)
    keys = tuple(engine_key(value) for value in frame.block_hashes)
    tier = tier_of(frame.medium, getattr(frame, "locality", None))
    return BlocksRemoved(keys, tier, _group(frame.group_idx))


def encode(ts: float, events: Sequence[EngineEvent], dp_rank: int = 0) -> bytes:
    """A batch as vLLM 0.24 and newer send it: maps, fields at their default left out."""
    return msgspec.msgpack.encode([ts, [_map(event) for event in events], dp_rank])


def _map(event: EngineEvent) -> dict[str, Any]:
    if isinstance(event, AllCleared):
        return {"type": "AllBlocksCleared"}
    hashes = [engine_hash(key) for key in event.hashes]
    if isinstance(event, BlocksRemoved):
        removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": MEDIUM[event.tier]}
        return removed | ({"group_idx": event.group} if event.group else {})
    return {
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


_READER = Reader(
    _StoredMap | _RemovedMap | ClearedMap, _StoredArray | _RemovedArray | ClearedArray, _convert
)
VLLM = Dialect("vllm", _READER.decode, encode, copies=True)

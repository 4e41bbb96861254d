"""Wire: the members of KV events, in the layouts that engines share.

Pure: msgspec structs, no judgement. The dialects of this folder add what only they send; reading.py
decodes. Open it when engines add a member that all of them may send. What nothing is decided by is
typed Any, so that a producer who means something else by it loses no event.

    map   {"type": "BlockStored", "block_hashes": [..], "parent_block_hash": .., ...}
    array ["BlockStored", [..], .., ...]    positional, cut off at the end
"""

from __future__ import annotations

from typing import Any

import msgspec

NO_TOKENS = msgspec.Raw(b"\x90")


class StoredMap(msgspec.Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """vLLM from 0.24 on, SGLang from 0.5.23 on, our own engine."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = NO_TOKENS
    block_size: int | None = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | str | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: Any = None
    ownership: Any = None
    session_id: Any = None
    lookahead_token_ids: Any = None
    cache_salt: str | None = None  # SGLang and our own engine; vLLM hides it in extra_keys


class StoredArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockStored"):
    """The first members of all arrays."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None = None
    token_ids: msgspec.Raw = NO_TOKENS
    block_size: int | None = 0
    lora_id: int | None = None
    medium: str | None = None


class RemovedMap(msgspec.Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Blocks given up, in all engines."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


class RemovedArray(msgspec.Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    """The first members of all arrays."""

    block_hashes: list[int | bytes]
    medium: str | None = None


class ClearedMap(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """A cleared cache; the same in all engines."""


class ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """The array form of the same."""


MAPS = StoredMap | RemovedMap | ClearedMap

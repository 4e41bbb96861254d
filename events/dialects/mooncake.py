"""Mooncake: what the store's master says of the objects it keeps in memory and on disk.

Pure: one member of this seam; reading.py does the layout, base.py has the nouns. Open it when the
master's form changes. Source: Mooncake's KV event publisher, as documented; nothing is recorded.

    [ts, [{"event_type": "stored", "object_key": "11", "seq_hashes": [11], "medium": "cpu"}], rank]

One event an object, without tokens, parent, model or block size: a placeholder, which an engine's
own event of the same hash explains. The master knows no engine: its events belong to whichever
worker this stream is declared for. In compatibility mode events also have vLLM's `type` and
`block_hashes`; a sender of those alone is read as vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvplane.vocabulary import Tier

from . import wire
from .base import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    Dialect,
    EngineEvent,
    engine_hash,
    engine_key,
    engine_keys,
    tier_of,
)
from .reading import Reader, read_tokens
from .vllm import ARRAYS, convert

MEDIUM = {Tier.GPU: "gpu", Tier.CPU: "cpu", Tier.DISK: "disk", Tier.REMOTE: "remote"}
_Hashes = list[int | bytes] | int | bytes | None


class _Event(msgspec.Struct, frozen=True):
    """Members of every kind; those that nothing is decided by are of any type."""

    seq_hashes: _Hashes = None
    block_hashes: _Hashes = None
    object_key: Any = None
    medium: str | None = None
    parent_hash: int | bytes | None = None
    token_ids: msgspec.Raw = wire.NO_TOKENS
    block_size: int | None = None
    additional_salt: str | None = None
    lora_name: str | None = None
    event_id: Any = None
    timestamp: Any = None
    model_name: Any = None
    tenant_id: Any = None
    backend_id: Any = None
    dp_rank: Any = None
    base_block_idx: Any = None
    type: Any = None


class _Stored(_Event, frozen=True, tag_field="event_type", tag="stored"):
    pass


class _Removed(_Event, frozen=True, tag_field="event_type", tag="removed"):
    pass


class _Cleared(_Event, frozen=True, tag_field="event_type", tag="cleared"):
    pass


def _convert(frame: Any) -> EngineEvent:
    if not isinstance(frame, _Event):
        return convert(frame)
    if isinstance(frame, _Cleared):
        return AllCleared()
    hashes = engine_keys(_named(frame))
    tier = tier_of(frame.medium or "remote")
    if isinstance(frame, _Removed):
        return BlocksRemoved(hashes, tier)
    tokens, paired = read_tokens(frame.token_ids)
    parent, size = frame.parent_hash, frame.block_size or 0
    return BlocksStored(
        hashes,
        None if parent is None else engine_key(parent),
        tokens,
        max(0, size),
        tier,
        frame.lora_name or "",
        frame.additional_salt or "",
        paired=paired,
    )


def _named(event: _Event) -> list[int | bytes]:
    """Hashes of the blocks of an object; its own key where that is a number.

    Raises ValueError where no block can be named.
    """
    for told in (event.seq_hashes, event.block_hashes):
        if told or told == 0:
            return told if isinstance(told, list) else [told]
    key = event.object_key
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 20:
        return [int(key)]
    if type(key) is int:
        return [key]
    raise ValueError(f"object_key {str(key)[:60]!r}: no number, so its blocks have no name")


def encode(ts: float, events: Sequence[EngineEvent], dp_rank: int = 0) -> bytes:
    """A batch in the master's form; what it leaves out is there where we know it."""
    return msgspec.msgpack.encode([ts, [_map(event, dp_rank) for event in events], dp_rank])


def _map(event: EngineEvent, dp_rank: int) -> dict[str, Any]:
    if isinstance(event, AllCleared):
        return {"event_type": "cleared", "dp_rank": dp_rank}
    hashes = [engine_hash(key) for key in event.hashes]
    told = {"medium": MEDIUM[event.tier], "dp_rank": dp_rank, "seq_hashes": hashes}
    if isinstance(event, BlocksRemoved):
        return {"event_type": "removed"} | told
    return {
        "event_type": "stored",
        "block_size": event.block_size or None,
        "additional_salt": event.salt or None,
        "lora_name": event.adapter or None,
        "parent_hash": None if event.parent is None else engine_hash(event.parent),
        "token_ids": [int(token) for token in event.tokens],
    } | told


def new() -> Dialect:
    """A dialect that has met nothing strange yet."""
    reader = Reader((_Stored | _Removed | _Cleared, wire.MAPS), ARRAYS, _convert)
    return Dialect("mooncake", reader.decode, encode, copies=False)


MOONCAKE = new()

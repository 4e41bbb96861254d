"""Nouns: members that were read -> BlocksStored and BlocksRemoved.

Pure. The one place that knows which member becomes which fact; a dialect only says what is its own:
where adapter, salt and other keys are. Used by the dialects of this folder. Open it when a member
means something else, or a noun gets a fact.
"""

from __future__ import annotations

from typing import Any

import msgspec

from .base import BlocksRemoved, BlocksStored, engine_key, engine_keys, tier_of
from .reading import read_tokens


class Members(msgspec.Struct, frozen=True):
    """What each engine tells in its own place."""

    adapter: str = ""
    salt: str = ""
    extra: tuple[tuple[str, ...], ...] = ()


def as_stored(frame: Any, own: Members) -> BlocksStored:
    """A stored event; raises ValueError for a number out of bounds.

    `frame` has the members of wire.StoredMap as attributes, also where its layout lacks them.
    """
    told = frame.group_idx
    parent = frame.parent_block_hash
    tokens, paired = read_tokens(frame.token_ids)
    size = frame.block_size or 0
    if size < 0:
        raise ValueError(f"block_size {size}: must be 0 or more")
    return BlocksStored(
        hashes=engine_keys(frame.block_hashes),
        parent=None if parent is None else engine_key(parent),
        tokens=tokens,
        block_size=size,
        tier=tier_of(frame.medium, frame.locality),
        adapter=own.adapter,
        salt=own.salt,
        extra=own.extra,
        group=_group(told),
        kind=frame.kv_cache_spec_kind or "",
        paired=paired,
        adapter_id=None if own.adapter else frame.lora_id,
        grouped=told is not None,
        window=max(0, frame.kv_cache_spec_sliding_window or 0),
        lookahead=_lookahead(frame.lookahead_token_ids),
    )


def as_removed(frame: Any) -> BlocksRemoved:
    """A removed event; raises ValueError for a number out of bounds."""
    told, hashes = frame.group_idx, frame.block_hashes
    tier = tier_of(frame.medium, frame.locality)
    keys = (engine_key(hashes[0]),) if len(hashes) == 1 else engine_keys(hashes)  # nearly always 1
    return (
        BlocksRemoved(keys, tier) if told is None else BlocksRemoved(keys, tier, _group(told), True)
    )


def _group(told: int | None) -> int:
    if told is None:
        return 0
    if not 0 <= told <= 0xFFFF:
        raise ValueError(f"group_idx {told}: must be 0 to 65535")
    return told


def _lookahead(told: Any) -> int:
    """How many tokens after a block went into its hash: the most that any entry has."""
    if not isinstance(told, list):
        return 0
    return max((len(entry) for entry in told if isinstance(entry, list)), default=0)

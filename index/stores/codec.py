"""Codec: how changes lie in the stream, version 2.

Pure: changes to bytes and back; redis.py puts them into stream entries, and others who read the
streams themselves read this. Open it to change the record format (and then VERSION).

    entry fields    v 2 | n counter | p id of the entry before | w worker | e epoch
                    | l last batch, or empty | c changes
    c, msgpack      [ ["s", tier, parent or nil, blocks, block size in tokens, group]  Stored
                      ["r", tier, blocks, group number or nil]                         Removed
                      ["c", reason, tier or nil]                                       Cleared
                      ["k", state, reason, since in wall clock seconds, ingest] ]      Known
    blocks          8 bytes each, little-endian unsigned, one after the other
    group           nil, or [number, kind, tokens of window or chunk, block size]

Worker and epoch of every change are those of the entry.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Removed,
    Stored,
    Tier,
    Worker,
)

VERSION = 2


def encode(changes: Iterable[Change]) -> bytes:
    """Changes of one worker in one epoch, in order."""
    return msgspec.msgpack.encode([_plain(change) for change in changes])


def _plain(change: Change) -> list[Any]:
    if isinstance(change, Stored):
        blocks = pack_blocks(change.blocks)
        of = change.group
        group = None if of is None else [of.number, of.kind, of.tokens, of.block_size]
        return ["s", change.tier, change.parent, blocks, change.block_size, group]
    if isinstance(change, Removed):
        return ["r", change.tier, pack_blocks(change.blocks), change.group]
    if isinstance(change, Cleared):
        return ["c", change.reason, change.tier]
    return ["k", change.state, change.reason, change.since, change.by]


def decode(data: bytes, worker: Worker, epoch: Epoch) -> tuple[Change, ...]:
    """The reverse of encode; raises ValueError for what is no list of changes."""
    try:
        plain = msgspec.msgpack.decode(data, type=list[list[Any]])
        return tuple(_change(worker, epoch, *fields) for fields in plain)
    except (msgspec.MsgspecError, TypeError, struct.error) as error:
        raise ValueError(f"changes of {worker}: {error}") from None


def _change(worker: Worker, epoch: Epoch, kind: str, *rest: Any) -> Change:
    if kind == "s":
        tier, parent, blocks, size, of = rest
        group = None if of is None else Group(of[0], GroupKind(of[1]), *of[2:])
        return Stored(worker, epoch, Tier(tier), parent, unpack_blocks(blocks), size, group)
    if kind == "r":
        tier, blocks, number = rest
        return Removed(worker, epoch, Tier(tier), unpack_blocks(blocks), number)
    if kind == "c":
        reason, tier = rest
        return Cleared(worker, epoch, ClearReason(reason), None if tier is None else Tier(tier))
    if kind == "k":
        state, reason, since, by = rest
        return Known(worker, epoch, Knowledge(state), reason, since, by)
    raise ValueError(f"change of kind {kind!r}: this program knows s, r, c, k")


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """8 bytes a block."""
    return struct.pack(f"<{len(blocks)}Q", *blocks)


def unpack_blocks(data: bytes) -> tuple[BlockHash, ...]:
    """The reverse of pack_blocks."""
    return struct.unpack(f"<{len(data) // 8}Q", data)

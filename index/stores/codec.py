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
from functools import lru_cache
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


class _Stored(msgspec.Struct, array_like=True, tag="s", frozen=True, gc=False):
    tier: Tier
    parent: BlockHash | None
    blocks: bytes
    size: int
    group: tuple[int, GroupKind, int, int] | None


class _Removed(msgspec.Struct, array_like=True, tag="r", frozen=True, gc=False):
    tier: Tier
    blocks: bytes
    group: int | None


class _Cleared(msgspec.Struct, array_like=True, tag="c", frozen=True, gc=False):
    reason: ClearReason
    tier: Tier | None


class _Known(msgspec.Struct, array_like=True, tag="k", frozen=True, gc=False):
    state: Knowledge
    reason: str
    since: float
    by: str


_read = msgspec.msgpack.Decoder(list[_Stored | _Removed | _Cleared | _Known]).decode


def decode(data: bytes, worker: Worker, epoch: Epoch) -> tuple[Change, ...]:
    """The reverse of encode; raises ValueError for what is no list of changes."""
    changes: list[Change] = []
    try:
        for one in _read(data):
            if isinstance(one, _Stored):
                blocks, of = unpack_blocks(one.blocks), one.group
                group = None if of is None else Group(*of)
                changes.append(Stored(worker, epoch, one.tier, one.parent, blocks, one.size, group))
            elif isinstance(one, _Removed):
                blocks = unpack_blocks(one.blocks)
                changes.append(Removed(worker, epoch, one.tier, blocks, one.group))
            elif isinstance(one, _Cleared):
                changes.append(Cleared(worker, epoch, one.reason, one.tier))
            else:
                changes.append(Known(worker, epoch, one.state, one.reason, one.since, one.by))
    except (msgspec.MsgspecError, struct.error) as error:
        raise ValueError(f"changes of {worker}: {error}") from None
    return tuple(changes)


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """8 bytes a block."""
    return _form(len(blocks)).pack(*blocks)


def unpack_blocks(data: bytes) -> tuple[BlockHash, ...]:
    """The reverse of pack_blocks."""
    return _form(len(data) // 8).unpack(data)


@lru_cache(maxsize=1024)
def _form(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}Q")

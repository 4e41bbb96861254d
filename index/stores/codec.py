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

from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from sys import byteorder
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
_BIG = byteorder == "big"  # then numbers lie the other way round than in the stream


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


class Blocks(array):  # type: ignore[type-arg]  # takes none before Python 3.12
    """Blocks of a change, side by side as they came: equal to the tuple of them. A view looks at
    the first and the last of most, so that no number has to be made of the others."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (tuple, Blocks)):
            return tuple(self) == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:  # type: ignore[override]  # a change is frozen
        return hash(tuple(self))


def pack_blocks(blocks: Sequence[int]) -> bytes:
    """8 bytes a block."""
    found = array("Q", blocks)
    if _BIG:
        found.byteswap()
    return found.tobytes()


def _swapped(data: bytes) -> Blocks:
    found = Blocks("Q", data)
    found.byteswap()
    return found


# The reverse of pack_blocks; raises ValueError for a part of a block.
unpack_blocks: Callable[[bytes], Any] = _swapped if _BIG else partial(Blocks, "Q")


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
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"changes of {worker}: {error}") from None
    return tuple(changes)

"""Rows: what lies in a worker's table, and how it is written down.

Pure. Values of base.py's Batch and WorkerState; memory.py keeps them, redis.py their bytes. Open it
to change what a table remembers (and then the store's FORMAT, since others read the bytes).

    key                               value
    u, s or b + engine hash           Row     a block of the counted group
    c + place (u16) + engine key      Row     a block of a chunk of many, of a tier with such names
    g + group (u16) + engine key      Row     a block of a further group, named as the counted one
    G + group (u16)                   Group   which rule a further group follows
    ! or ? + anything                 Note    what ingest itself must remember; no view reads it

    first byte  0x10 short row, 0x11 with parent:  u16 size, u64 block, u64 parent, u8 gpu copies
                0x18 long row,  0x19 with parent:  u32 size, u64 block, u64 parent, 4 x u16 copies
                0x20 Group: u8 kind, u16 number, u32 tokens, u32 size     0x30 Note: its bytes
                all numbers little-endian; size = tokens of a block
                the top two bits of a row's first byte are its age (0 to 3, in circles): mask 0x3f
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from kvplane.vocabulary import BlockHash, Group, GroupKind

SHORT = struct.Struct("<BHQQB")  # 20 bytes
LONG = struct.Struct("<BIQQ4H")  # 29 bytes
_GROUP = struct.Struct("<BBHII")
_KINDS = tuple(GroupKind)
SHORT_ROW, LONG_ROW, HAS_PARENT, GROUP, NOTE = 0x10, 0x18, 0x01, 0x20, 0x30
MOST_COPIES = 0xFFFF
AGES, AGE_BITS, KIND = 4, 6, 0x3F  # the first byte of a row is age << AGE_BITS | kind


class Row(msgspec.Struct, frozen=True, gc=False):
    """What one worker's table says of one engine key: our block, and copies held per tier.

    There are millions, made once per block stored: no look for garbage has to go through them.
    """

    block: BlockHash
    parent: BlockHash | None
    copies: tuple[int, int, int, int]  # gpu, cpu, disk, remote; all 0 = alias only
    block_size: int  # tokens
    age: int = 0  # when it came, roughly; only ingest reads it, to let the oldest go

    def encode(self) -> bytes:
        """20 bytes where it lies only on the GPU, else 29; copies beyond 65535 are kept as that."""
        block, parent, copies, size = self.block, self.parent, self.copies, self.block_size
        has = self.age << AGE_BITS
        if parent is not None:
            has |= HAS_PARENT
        gpu, cpu, disk, remote = copies
        if not (cpu or disk or remote) and gpu <= 0xFF and size <= 0xFFFF:
            return SHORT.pack(SHORT_ROW | has, size, block, parent or 0, gpu)
        most = (min(count, MOST_COPIES) for count in copies)
        return LONG.pack(LONG_ROW | has, size, block, parent or 0, *most)


@dataclass(frozen=True, slots=True)
class Note:
    """Bytes that only ingest understands, kept with the table and written in the same step."""

    data: bytes


Value: TypeAlias = Row | Group | Note


def encode(value: Value) -> bytes:
    """A value as it lies in the store."""
    if isinstance(value, Row):
        return value.encode()
    if isinstance(value, Note):
        return bytes((NOTE,)) + value.data
    kind = _KINDS.index(value.kind)
    return _GROUP.pack(GROUP, kind, value.number, value.tokens, value.block_size)


def decode(data: bytes) -> Value:
    """The reverse; raises ValueError for bytes that no encode made."""
    first = data[0] if data else -1
    try:
        if first & KIND & ~HAS_PARENT == SHORT_ROW:
            _, size, block, parent, gpu = SHORT.unpack(data)
            return _row(first, block, parent, (gpu, 0, 0, 0), size)
        if first & KIND & ~HAS_PARENT == LONG_ROW:
            _, size, block, parent, gpu, cpu, disk, remote = LONG.unpack(data)
            return _row(first, block, parent, (gpu, cpu, disk, remote), size)
        if first == NOTE:
            return Note(data[1:])
        if first == GROUP:
            _, kind, number, tokens, size = _GROUP.unpack(data)
            return Group(number, _KINDS[kind], tokens, size)
    except (struct.error, IndexError) as error:
        raise ValueError(f"table value of {len(data)} bytes: {error}") from None
    raise ValueError(f"table value of kind {first}: this program reads rows, groups and notes")


def _row(first: int, block: int, parent: int, copies: tuple[int, int, int, int], size: int) -> Row:
    above = BlockHash(parent) if first & HAS_PARENT else None
    return Row(BlockHash(block), above, copies, size, first >> AGE_BITS)


def group_key(number: int | None, engine: bytes) -> bytes:
    """Key of a block's row: hashes of two groups are equal, so a further group is part of it."""
    return engine if number is None else b"g" + number.to_bytes(2, "big") + engine


def rule_key(number: int) -> bytes:
    """Key under which a further group's rule lies."""
    return b"G" + number.to_bytes(2, "big")


def group_of(key: bytes) -> int | None:
    """The further group a row's key belongs to; None for the counted one."""
    return int.from_bytes(key[1:3], "big") if key[:1] == b"g" else None

"""Base: what must a store of the index do?

Seam: the Store protocol and the nouns that cross it; pure types, no IO. memory.py and redis.py
fulfil it, events/ writes through it, follower.py reads. tests/contracts/test_stores.py holds every
member to what is said here. Open it to change what a store promises.

    apply(batch), one atomic step:
      worker's epoch is not batch.epoch, or it is gone    -> StaleEpoch(stored epoch)
      batch.last <= position                              -> Repeat(position), nothing changes
      batch.first > position + 1, and no reset            -> GapRefused(position + 1)
      else: table = (empty if reset) + rows; stream += changes; position = batch.last -> Applied

An overlap applies whole, because rows are absolute. `reset` skips the gap check, never the others.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvplane.vocabulary import BlockHash, Change, Cursor, Epoch, Known, Tier, Worker

TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)  # order of Row.copies
MAX_SEQUENCE = 2**53 - 1  # Lua and JavaScript count exactly up to here
_ROW = struct.Struct("<BQQI4H")  # version and has-parent, block, parent, block size, copies
_VERSION = 1
_HAS_PARENT = 0x80
_MOST_COPIES = 0xFFFF


@dataclass(frozen=True, slots=True)
class Row:
    """What one worker's table says of one engine key: our block, and copies held per tier."""

    block: BlockHash
    parent: BlockHash | None
    copies: tuple[int, int, int, int]  # gpu, cpu, disk, remote; all 0 = alias only
    block_size: int  # tokens

    def encode(self) -> bytes:
        """29 bytes; more than 65535 copies are kept as 65535: too little, never too much."""
        flags = _VERSION | (0 if self.parent is None else _HAS_PARENT)
        copies = (min(count, _MOST_COPIES) for count in self.copies)
        return _ROW.pack(flags, self.block, self.parent or 0, self.block_size, *copies)

    @staticmethod
    def decode(data: bytes) -> Row:
        """The reverse of encode; raises ValueError for another version or length."""
        try:
            flags, block, parent, size, *copies = _ROW.unpack(data)
        except struct.error as error:
            raise ValueError(f"row of {len(data)} bytes: {error}") from None
        if flags & ~_HAS_PARENT != _VERSION:
            raise ValueError(f"row version {flags & ~_HAS_PARENT}: this program reads {_VERSION}")
        gpu, cpu, disk, remote = copies
        above = BlockHash(parent) if flags & _HAS_PARENT else None
        return Row(BlockHash(block), above, (gpu, cpu, disk, remote), size)


@dataclass(frozen=True, slots=True)
class Batch:
    """Engine batches `first`..`last` of one life, as absolute rows and the changes they mean."""

    worker: Worker
    epoch: Epoch
    first: int
    last: int
    changes: tuple[Change, ...] = ()
    rows: Mapping[bytes, Row | None] = field(
        default_factory=dict
    )  # engine key -> row; None = delete
    reset: bool = False  # the table is emptied before the rows; no gap check

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last <= MAX_SEQUENCE:
            raise ValueError(f"batch {self.first}..{self.last}: must be 0 <= first <= last")
        for change in self.changes:
            if change.worker != self.worker or change.epoch != self.epoch:
                raise ValueError(f"change of {change.worker} in a batch of {self.worker}")


@dataclass(frozen=True, slots=True)
class Applied:
    """It has happened; a follower at or past `cursor` has seen it (other shards: the start)."""

    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Repeat:
    """Somebody applied this already, perhaps another ingest; nothing changed."""

    position: int


@dataclass(frozen=True, slots=True)
class GapRefused:
    """Batches are missing; the next one that is taken is `expected`. Nothing changed."""

    expected: int


@dataclass(frozen=True, slots=True)
class StaleEpoch:
    """The batch belongs to a life that is over (`epoch` is the stored one; 0 = none stored).

    Where it equals the batch's own epoch, the worker was forgotten: begin_life(worker, epoch).
    """

    epoch: Epoch


Outcome: TypeAlias = Applied | Repeat | GapRefused | StaleEpoch


@dataclass(frozen=True, slots=True)
class Position:
    """Where a worker's life stands: the last batch applied, None before the first."""

    epoch: Epoch
    last: int | None


@dataclass(frozen=True, slots=True)
class Entry:
    """One step of the stream: what one apply (or begin_life, known, forget) changed."""

    cursor: Cursor
    changes: tuple[Change, ...]
    worker: Worker
    epoch: Epoch
    last: int | None  # position after it; None where it moved no position
    at: float  # wall clock of the store, seconds


@dataclass(frozen=True, slots=True)
class WorkerState:
    """Everything a store keeps of one living worker."""

    worker: Worker
    epoch: Epoch
    last: int | None
    known: Known | None
    rows: Mapping[bytes, Row]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All living workers, read while others wrote: exact once the tail from `cursor` is at `until`.

    Entries between the two are safe to apply again: the last one about a block wins.
    """

    cursor: Cursor
    workers: tuple[WorkerState, ...]
    until: Cursor


class Store(Protocol):
    """The index that survives a restart, with its change stream. All may raise StoreDown."""

    async def begin_life(self, worker: Worker, seen: Epoch | None) -> Epoch:
        """Compare and set: a new life, seen + 1, if the stored epoch is `seen`; else that one.

        `seen` None is a first contact: the living epoch, or a new life where there is none. A new
        life starts with an empty table and no position; Cleared(RESTART) tells the stream.
        """

    async def position(self, worker: Worker) -> Position | None:
        """None for a worker never seen or forgotten."""

    async def apply(self, batch: Batch) -> Outcome:
        """One atomic step; see the table above."""

    async def table(self, worker: Worker) -> dict[bytes, Row]:
        """Engine key -> row of the present life; how ingest remembers aliases over a restart."""

    async def known(self, change: Known) -> None:
        """Kept with the worker and told to the stream; ignored for a life that is over."""

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        """The worker left: Cleared(GONE). Ignored unless `epoch` is the living one."""

    async def snapshot(self) -> Snapshot:
        """Everything, with the cursor to tail from."""

    async def head(self) -> Cursor:
        """The end of the stream now."""

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        """Whether who is at `cursor` has seen all that who is at `goal` has seen."""

    def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """Endless entries after a cursor, without a gap; raises CursorGone where there is one."""

    async def close(self) -> None:
        """Give connections back; tails end."""

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

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kvplane.vocabulary import Change, Cursor, Epoch, Knowledge, Known, Tier, Worker

from .rows import Value

TIERS = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)  # order of Row.copies
MAX_SEQUENCE = 2**53 - 1  # Lua and JavaScript count exactly up to here


@dataclass(frozen=True, slots=True)
class Batch:
    """Engine batches `first`..`last` of one life, as absolute rows and the changes they mean."""

    worker: Worker
    epoch: Epoch
    first: int
    last: int
    changes: tuple[Change, ...] = ()
    rows: Mapping[bytes, Value | None] = field(default_factory=dict)  # see rows.py; None = delete
    reset: bool = False  # a gap stayed open: the table is emptied before the rows; no gap check

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
    whole: bool = True  # False: batches were applied, yet there is no table (evicted, rolled back)
    known: Mapping[str, Knowledge] = field(default_factory=dict)  # what each ingest last told
    gaps: int = 0  # that stayed open, in all lives; another ingest may have been the one


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
    known: tuple[Known, ...] = ()  # one of each ingest that told something
    table: Mapping[bytes, bytes] = field(default_factory=dict)  # key -> rows.encode(value)
    gaps: int = 0  # gaps that stayed open, in all lives
    heard: float | None = None  # wall clock of the store at the last batch, seconds


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Living workers, read while others wrote: exact once the tail from `cursor` is at `until`.

    Entries between the two are safe to apply again: the last one about a block wins. Of a snapshot
    of some shards the other marks of both cursors are the head.
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

    async def table(self, worker: Worker) -> dict[bytes, Value]:
        """Key -> value of the present life; how ingest remembers aliases over a restart."""

    async def known(self, change: Known) -> None:
        """Kept with the worker for the ingest `change.by` and told to the stream; what ingests
        said that are dead is dropped. Ignored for a life that is over."""

    async def forget(self, worker: Worker, epoch: Epoch) -> None:
        """The worker left: Cleared(GONE). Ignored unless `epoch` is the living one."""

    async def beat(self, ingest: str, ttl_s: float) -> None:
        """This ingest lives for so long from now, unless it beats again; 0 = it leaves now."""

    async def living(self) -> frozenset[str]:
        """Ingests that live now, by the store's own clock."""

    async def fit(self) -> None:
        """Asked once, at start: StoreUnfit where it would lose keys or has another format."""

    async def refuses(self) -> str:
        """Why it takes no writes though it answers; "" where it takes them."""

    async def evicted(self) -> int:
        """Keys the store has thrown away for lack of memory; another number than before means lost
        knowledge, and `Position.whole` tells whose."""

    async def shards(self) -> int:
        """How many change streams there are; fixed at the store's first use."""

    def shard_of(self, worker: Worker) -> int:
        """Which stream tells of this worker; call shards() before."""

    async def snapshot(self, shards: Collection[int] | None = None) -> Snapshot:
        """Everything of these shards (None: of all), with the cursor to tail from."""

    async def head(self) -> Cursor:
        """The end of the stream now."""

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        """Whether who is at `cursor` has seen all that who is at `goal` has seen."""

    def splice(self, cursor: Cursor, fresh: Cursor, shards: Collection[int]) -> Cursor:
        """`cursor` with the marks of these shards taken from `fresh`."""

    def tail(self, after: Cursor) -> AsyncGenerator[Entry, None]:
        """Endless entries after a cursor, without a gap; raises CursorGone where there is one, and
        StoreDown when no shard can be read: while one can, away() names the others."""

    def away(self) -> frozenset[int]:
        """Shards that a tail of this process cannot read now, while it reads others."""

    async def close(self) -> None:
        """Give connections back; tails end."""

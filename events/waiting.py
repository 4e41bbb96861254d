"""Waiting: what was told too early, until the rest of it comes.

Pure. Blocks whose parent is not known, with their tokens, and blocks that a lower tier named
without any; one note each in the worker's table. Bounded in blocks, in bytes, by batches and by the
engine's own clock: the oldest go. Used by translation.py, which knows when something is explained.

    b"?w" + engine key -> Note(msgpack [batch, ts, copies per tier, parent's key, tokens a block,
                               extra keys, token ids as u32]); no parent: named only

Open it to change how long and how much may wait.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import msgspec

from kvplane.index import Note, Value, pack

from .copies import MOST, NONE, Counts
from .dialects.base import BlocksStored
from .translated import AT, Limits, Translation

PREFIX = b"?w"


@dataclass(frozen=True, slots=True)
class Wait:
    """One block that waits."""

    sequence: int  # of the batch that told of it last
    ts: float  # engine clock of that
    copies: Counts
    parent: bytes = b""  # engine key; empty while nobody told its tokens
    size: int = 0  # tokens
    extra: tuple[str, ...] = ()
    tokens: bytes = b""  # little-endian u32

    def note(self) -> Note:
        """As a value of the table."""
        told = (self.sequence, self.ts, self.copies, self.parent, self.size, self.extra)
        return Note(msgspec.msgpack.encode((*told, self.tokens)))


_READ = msgspec.msgpack.Decoder(tuple[int, float, Counts, bytes, int, tuple[str, ...], bytes])


class Waiting:
    """All that waits of one worker."""

    def __init__(self, table: dict[bytes, Value], limits: Limits, copies: bool) -> None:
        self._table, self._limits, self._copies = table, limits, copies
        self._sequence, self._ts = 0, 0.0  # of the batch at work
        self.room = max(1, limits.most_waiting // 4)  # blocks of one event that may wait
        self.reset()
        for key, note in table.items():
            if key.startswith(PREFIX) and isinstance(note, Note):
                self._enter(key[len(PREFIX) :], Wait(*_READ.decode(note.data)))

    def reset(self) -> None:
        """The table is empty."""
        self.blocks: dict[bytes, Wait] = {}  # engine key ->
        self._children: dict[bytes, set[bytes]] = {}  # parent -> keys
        self._order: list[tuple[int, bytes]] = []  # heap: batch, key; may hold what is gone
        self._bytes = 0

    def orphans(self, event: BlocksStored, out: Translation) -> None:
        """Blocks with tokens whose parent is not known; of very many only the first."""
        assert event.parent is not None, "a root is no orphan"
        parent, step, at = event.parent, event.block_size * 4, AT[event.tier]
        packed, room = bytes(pack(event.tokens)), self.room
        for position, key in enumerate(event.hashes[:room]):
            told = Wait(
                self._sequence,
                self._ts,
                self._more(key, at),
                parent,
                event.block_size,
                event.extra[position] if position < len(event.extra) else (),
                packed[position * step : (position + 1) * step],
            )
            self._keep(key, told, out)
            parent = key
        if len(event.hashes) > room:
            out.left_out["expired"] += len(event.hashes) - room

    def name(self, key: bytes, at: int, out: Translation) -> None:
        """A tier holds a block of which only the name is known."""
        old = self.blocks.get(key)
        copies = self._more(key, at)
        if old is None:
            self._keep(key, Wait(self._sequence, self._ts, copies), out)
        else:
            fresh = replace(old, sequence=self._sequence, ts=self._ts, copies=copies)
            self._keep(key, fresh, out)

    def _more(self, key: bytes, at: int) -> Counts:
        old = self.blocks.get(key)
        copies = list(old.copies if old else NONE)
        copies[at] = min(copies[at] + 1, MOST) if self._copies else 1
        gpu, cpu, disk, remote = copies
        return gpu, cpu, disk, remote

    def remove(self, key: bytes, at: int, out: Translation) -> bool:
        """One copy less of a block that waits; False where none does in this tier."""
        wait = self.blocks.get(key)
        if wait is None or not wait.copies[at]:
            return False
        copies = list(wait.copies)
        copies[at] -= 1
        out.waiting["removed"] += 1
        if any(copies):
            gpu, cpu, disk, remote = copies
            self._drop(key, out)
            self._write(key, replace(wait, copies=(gpu, cpu, disk, remote)), out)
        else:
            self._drop(key, out)
        return True

    def children(self, key: bytes) -> list[bytes]:
        """Keys of the blocks that wait for this one."""
        return sorted(self._children.get(key, ()))

    def take(self, key: bytes, out: Translation) -> Wait | None:
        """It is explained and waits no longer."""
        wait = self.blocks.get(key)
        if wait is not None:
            self._drop(key, out)
            out.waiting["resolved"] += 1
        return wait

    def begin(self, sequence: int, ts: float, out: Translation) -> None:
        """A batch comes: what has waited too long is given up."""
        self._sequence, self._ts = sequence, ts
        while self.blocks:
            key = self._oldest()
            wait, limits = self.blocks[key], self._limits
            old = sequence - wait.sequence > limits.waiting_batches
            if not old and not ts - wait.ts > limits.waiting_s:
                return
            self._expire(key, out)

    def forget(self, out: Translation) -> None:
        """Nothing that waits can be explained any more."""
        for key in list(self.blocks):
            self._expire(key, out)

    def _keep(self, key: bytes, wait: Wait, out: Translation) -> None:
        if key in self.blocks:
            self._drop(key, out)
        self._write(key, wait, out)
        out.waiting["kept"] += 1
        limits = self._limits
        while len(self.blocks) > limits.most_waiting or self._bytes > limits.most_waiting_bytes:
            self._expire(self._oldest(), out)

    def _expire(self, key: bytes, out: Translation) -> None:
        self._drop(key, out)
        out.waiting["expired"] += 1
        out.left_out["expired"] += 1

    def _write(self, key: bytes, wait: Wait, out: Translation) -> None:
        self._enter(key, wait)
        self._table[PREFIX + key] = out.rows[PREFIX + key] = wait.note()

    def _enter(self, key: bytes, wait: Wait) -> None:
        self.blocks[key] = wait
        self._bytes += len(wait.tokens)
        if wait.parent:
            self._children.setdefault(wait.parent, set()).add(key)
        heapq.heappush(self._order, (wait.sequence, key))

    def _drop(self, key: bytes, out: Translation) -> None:
        wait = self.blocks.pop(key)
        self._bytes -= len(wait.tokens)
        if wait.parent:
            siblings = self._children[wait.parent]
            siblings.discard(key)
            if not siblings:
                del self._children[wait.parent]
        self._table.pop(PREFIX + key, None)
        out.rows[PREFIX + key] = None
        if len(self._order) > 2 * len(self.blocks) + 64:
            self._order = [(one.sequence, name) for name, one in self.blocks.items()]
            heapq.heapify(self._order)

    def _oldest(self) -> bytes:
        while True:
            sequence, key = self._order[0]
            wait = self.blocks.get(key)
            if wait is not None and wait.sequence == sequence:
                return key
            heapq.heappop(self._order)

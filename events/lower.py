"""Lower: what do tiers hold that store in chunks of many blocks, under names of their own?

Pure. LMCache tells, in the engine's stream, of chunks of 256 tokens that lie in another tier, with
its own hashes, and never of a removal. Each chunk becomes blocks of the worker's size, and is given
up when it is old. Used by translation.py. Open it for another tier with blocks of its own.

    chunk c of 4 blocks -> rows  c:0 -> b1   c:1 -> b2   c:2 -> b3   c -> b4   (c names all of them)
                           note  b"?c" + c -> f64 engine clock, u16 blocks of the chunk
    key of c:0, c:1, ...   b"c" + u16 position + engine key of c
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator

from kvplane.index import TIERS, Note, Row, Value, extend
from kvplane.vocabulary import BlockHash

from .copies import ONE, Copies
from .dialects.base import BlocksStored
from .memo import Memo
from .translate_groups import Root
from .translated import AT, Limits, Translation

PREFIX = b"?c"
_NOTE = struct.Struct("<dH")
MOST_BLOCKS = 4096  # of one chunk


class Chunks:
    """All chunks of one worker."""

    def __init__(
        self, table: dict[bytes, Value], memo: Memo, copies: Copies, root: Root, limits: Limits
    ) -> None:
        self._table, self._memo, self._copies, self._root = table, memo, copies, root
        self._most_s, self._most = limits.chunk_s, limits.most_blocks // 2
        self._ts = 0.0
        self.reset()
        for key, note in table.items():
            if key.startswith(PREFIX) and isinstance(note, Note):
                self._enter(key[len(PREFIX) :], *_NOTE.unpack(note.data))

    def reset(self) -> None:
        """The table is empty."""
        self.told: dict[bytes, tuple[float, int]] = {}  # key -> engine clock, blocks
        self._order: list[tuple[float, bytes]] = []  # heap; may hold what is gone

    def stored(self, event: BlocksStored, out: Translation) -> None:
        """A run of chunks, each held once however often it is told."""
        size, at = self._memo.size, AT[event.tier]
        each = event.block_size // size
        if any(event.extra) or each > MOST_BLOCKS:
            out.left_out["extra-keys" if any(event.extra) else "block-size"] += 1
            return
        above: BlockHash | None = None
        if event.parent is None:
            start = self._root(event)
        else:
            row = self._table.get(event.parent)
            if not isinstance(row, Row):
                out.left_out["orphan"] += 1
                return
            start = above = row.block
        blocks = extend(start, event.tokens, size)
        for position, chunk in enumerate(event.hashes):
            self._note(chunk, each, out)
            mine = blocks[position * each : (position + 1) * each]
            for key, block in zip(_keys(chunk, each), mine, strict=True):
                row = self._table.get(key)
                if isinstance(row, Row) and row.block == block:
                    if not row.copies[at]:
                        self._copies.more(key, row, at, out)
                        out.here(self._copies.who, event.tier, above, block, size)
                else:
                    made = Row(block, above, ONE[at], size, self._copies.held.now)
                    self._copies.make(key, made, row, out)
                    out.here(self._copies.who, event.tier, above, block, size)
                above = block
        while len(self.told) > self._most:
            self._expire(self._oldest(), out)

    def removed(self, chunk: bytes, at: int, out: Translation) -> None:
        """The tier gave up a chunk: all of its blocks, whichever of them are still kept."""
        _, each = self.told[chunk]
        left = False
        for key in _keys(chunk, each):
            row = self._table.get(key)
            if isinstance(row, Row) and row.copies[at]:
                self._copies.fewer(key, row, at, out, row.copies[at])
                out.gone(self._copies.who, TIERS[at], (row.block,), None)
                row = self._table.get(key)
            left = left or (isinstance(row, Row) and any(row.copies[1:]))
        if not left:
            self._drop(chunk, out)

    def begin(self, ts: float, out: Translation) -> None:
        """A batch comes: chunks that are too old are given up."""
        self._ts = ts
        while self.told:
            chunk = self._oldest()
            if not ts - self.told[chunk][0] > self._most_s:
                return
            self._expire(chunk, out)

    def _oldest(self) -> bytes:
        while True:
            since, chunk = self._order[0]
            if chunk in self.told and self.told[chunk][0] == since:
                return chunk
            heapq.heappop(self._order)

    def _expire(self, chunk: bytes, out: Translation) -> None:
        for key in _keys(chunk, self.told[chunk][1]):
            for at in (1, 2, 3):
                row = self._table.get(key)
                if isinstance(row, Row) and row.copies[at]:
                    self._copies.fewer(key, row, at, out, row.copies[at])
                    out.gone(self._copies.who, TIERS[at], (row.block,), None)
                    out.left_out["expired"] += 1
        self._drop(chunk, out)

    def _note(self, chunk: bytes, each: int, out: Translation) -> None:
        self._enter(chunk, self._ts, each)
        note = Note(_NOTE.pack(self._ts, each))
        self._table[PREFIX + chunk] = out.rows[PREFIX + chunk] = note

    def _enter(self, chunk: bytes, since: float, each: int) -> None:
        self.told[chunk] = since, each
        heapq.heappush(self._order, (since, chunk))
        if len(self._order) > 2 * len(self.told) + 64:
            self._order = [(told[0], key) for key, told in self.told.items()]
            heapq.heapify(self._order)

    def _drop(self, chunk: bytes, out: Translation) -> None:
        del self.told[chunk]
        self._table.pop(PREFIX + chunk, None)
        out.rows[PREFIX + chunk] = None


def _keys(chunk: bytes, each: int) -> Iterator[bytes]:
    """Keys of the rows of a chunk, first block first."""
    for position in range(each - 1):
        yield b"c" + position.to_bytes(2, "big") + chunk
    yield chunk

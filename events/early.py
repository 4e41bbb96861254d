"""Early: what is to be done with blocks that are told before their parent, or before their tokens?

Pure. waiting.py keeps them; this knows when they are explained and makes rows of them. Used by
counted.py. Open it to change what explains what.

    h3 (parent h2, tokens)   waits      CPU: h2 (no tokens)   waits
    h2 (parent h1, tokens)              h1 is known: h2 -> b2, in the CPU too, and so h3 -> b3
"""

from __future__ import annotations

from collections import deque

from kvplane.index import TIERS, Row, Value, extend
from kvplane.vocabulary import BlockHash, Tier

from .copies import ONE, Copies
from .dialects.base import BlocksStored
from .memo import Memo
from .translated import AT, Translation
from .waiting import Wait, Waiting


class Early:
    """Of the counted group of one worker."""

    def __init__(
        self,
        table: dict[bytes, Value],
        facts: Memo,
        copies: Copies,
        waiting: Waiting,
        counts: bool,
    ) -> None:
        self._table, self._memo, self._copies = table, facts, copies
        self._waiting, self._counts = waiting, counts

    def placeholder(self, event: BlocksStored, out: Translation) -> None:
        """A tier names blocks without tokens: known ones are held there, others wait."""
        at, copies, room = AT[event.tier], self._copies, self._waiting.room
        for key in event.hashes:
            row = self._table.get(key)
            if not isinstance(row, Row):
                if not room:  # of very many only the first
                    out.left_out["expired"] += 1
                    continue
                room -= 1
                self._waiting.name(key, at, out)
                out.left_out["placeholder"] += 1
                continue
            held = row.copies[at]
            if self._counts or not held:
                copies.more(key, row, at, out)
            if not held:
                out.here(copies.who, event.tier, row.parent, row.block, row.block_size)

    def explain(self, event: BlocksStored, out: Translation) -> None:
        """These blocks are known now: so are those that waited under their names, or for them."""
        copied = event.parent is not None and self._counts
        for key in event.hashes:
            wait, row = self._waiting.take(key, out), self._table.get(key)
            if wait is not None and isinstance(row, Row):
                self._place(key, row.block, row.parent, wait, out, None if copied else event.tier)
        line = deque(event.hashes)
        while line:
            above = line.popleft()
            row = self._table.get(above)
            for key in self._waiting.children(above) if isinstance(row, Row) else ():
                wait = self._waiting.take(key, out)
                assert wait is not None and isinstance(row, Row), "children wait"
                extra = (wait.extra,) if wait.extra else ()
                (block,) = extend(row.block, wait.tokens, wait.size, extra)
                self._place(key, block, row.block, wait, out)
                line.append(key)

    def _place(
        self,
        key: bytes,
        block: BlockHash,
        parent: BlockHash | None,
        wait: Wait,
        out: Translation,
        told: Tier | None = None,
    ) -> None:
        """A block that waited is held where it was said to be; `told`: this tier has it already,
        and what waited may be the same copy."""
        for at, (tier, count) in enumerate(zip(TIERS, wait.copies, strict=True)):
            if not count or tier is told:
                continue
            row, size = self._table.get(key), self._memo.size
            if isinstance(row, Row) and row.block == block:
                held = row.copies[at]
                if self._counts or not held:
                    self._copies.more(key, row, at, out, count)
            else:
                held, ones = 0, ONE[at]
                made = Row(block, parent, ones, size, self._copies.held.now)
                self._copies.make(key, made, row, out)
                if count > 1:
                    self._copies.more(key, made, at, out, count - 1)
            if not held:
                out.here(self._copies.who, tier, parent, block, size)

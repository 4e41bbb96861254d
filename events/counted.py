"""Counted: what does the group hold whose blocks are counted, first to last?

Pure. Full attention: all blocks before a place are needed, so every block is named and has tokens,
and gets our hash. Used by translation.py, which walks through a batch. Open it to change when a
store is a copy, a report or a block of the wrong size.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat

from kvplane.index import Row, Value, extend, seed
from kvplane.vocabulary import BlockHash, Namespace, Stored, Tier

from . import memo
from .copies import ONE, Copies
from .dialects.base import FULL_ATTENTION, BlocksRemoved, BlocksStored
from .early import Early
from .lower import Chunks
from .memo import Memo
from .translated import AT, Limits, Translation
from .waiting import Waiting

COUNTED = FULL_ATTENTION | {""}  # kinds of attention whose blocks 0..n-1 are all needed


class Counted:
    """The counted group of one worker."""

    def __init__(
        self,
        model: str,
        table: dict[bytes, Value],
        facts: Memo,
        copies: Copies,
        counts: bool,
        limits: Limits,
    ) -> None:
        self._model, self._table, self._memo = model, table, facts
        self._copies, self._counts = copies, counts
        self.waiting = Waiting(table, limits, counts)
        self._early = Early(table, facts, copies, self.waiting, counts)
        self.chunks = Chunks(table, facts, copies, self.root, limits)

    def take(self, event: BlocksStored | BlocksRemoved, out: Translation) -> None:
        """One event of this group."""
        if type(event) is BlocksRemoved:
            self._removed(event, out)
        elif isinstance(event, BlocksStored):
            self._stored(event, out)

    def _stored(self, event: BlocksStored, out: Translation) -> None:
        if event.kind not in COUNTED:
            out.left_out["group"] += 1
            if self._memo.group is not None:
                self._memo.caveats |= memo.HYBRID
            return
        if event.tier is not Tier.GPU:
            self._memo.lower = True
        if not event.tokens and event.hashes:
            self._early.placeholder(event, out)
            return
        if not event.dense:
            out.left_out["sparse"] += 1
            return
        settled = event.block_size == self._memo.size and self._memo.settled
        if not settled and not self._fits(event, out):
            return
        if event.parent is None:
            parent, start = None, self.root(event)
        else:
            row = self._table.get(event.parent)
            if not isinstance(row, Row):
                self._orphan(event, out)
                return
            parent = start = row.block
        self._hold(event, parent, extend(start, event.tokens, event.block_size, event.extra), out)

    def root(self, event: BlocksStored) -> int:
        """The number to hash on from at the root of a prompt."""
        adapter = event.adapter
        if not adapter and event.adapter_id is not None:
            adapter = f"lora-id:{self._copies.who[0]}:{event.adapter_id}"  # ids differ between pods
        return _seed(self._model, self._memo.size, adapter, event.salt)

    def _fits(self, event: BlocksStored, out: Translation) -> bool:
        """Are its blocks of the worker's size? The GPU says what that is, others until it does."""
        facts, gpu = self._memo, event.tier is Tier.GPU
        if event.block_size != facts.size and facts.size and (facts.settled or not gpu):
            if gpu or event.block_size % facts.size:
                out.left_out["block-size"] += 1
            else:
                self.chunks.stored(event, out)
            return False
        if event.block_size != facts.size and facts.size:
            for key in sorted(k for k, row in self._table.items() if isinstance(row, Row)):
                self._copies.drop(key, out)
                out.left_out["block-size"] += 1
            self.waiting.forget(out)
        facts.size, facts.settled = event.block_size, gpu
        return True

    def _hold(
        self,
        event: BlocksStored,
        parent: BlockHash | None,
        blocks: list[BlockHash],
        out: Translation,
    ) -> None:
        """The worker holds these blocks in this tier: rows, and what is new of them is told."""
        size, copies = event.block_size, self._copies
        made: dict[bytes, Value] = {}
        if self._table.keys().isdisjoint(event.hashes):
            one, age = ONE[AT[event.tier]], copies.held.now
            rows = map(Row, blocks, (parent, *blocks), repeat(one), repeat(size), repeat(age))
            made = dict(zip(event.hashes, rows, strict=False))
        if len(made) == len(blocks):  # nothing is known, nothing is named twice
            self._table.update(made)
            if out.rows:
                out.rows.update(made)
            else:
                out.rows = made  # type: ignore[assignment]  # nobody else's
            copies.held.counts[copies.held.now] += len(made)
            out.say(Stored(*copies.who, event.tier, parent, tuple(blocks), size))
        else:
            self._hold_again(event, parent, blocks, out)
        if self.waiting.blocks:
            self._early.explain(event, out)
        if event.paired or event.lookahead:
            self._memo.caveats |= memo.PAIRED if event.paired else memo.LOOKAHEAD

    def _hold_again(
        self,
        event: BlocksStored,
        parent: BlockHash | None,
        blocks: list[BlockHash],
        out: Translation,
    ) -> None:
        """The same where some are known: one more copy of each, unless none was made."""
        at, tier, copies = AT[event.tier], event.tier, self._copies
        adds = self._counts and self._copied(event, blocks, at)
        for key, block in zip(event.hashes, blocks, strict=True):
            row = self._table.get(key)
            if isinstance(row, Row) and row.block == block:
                held = row.copies[at]
                if adds or not held:
                    copies.more(key, row, at, out)
            else:
                held = 0
                made = Row(block, parent, ONE[at], event.block_size, copies.held.now)
                copies.make(key, made, row, out)
            if not held:
                out.here(copies.who, tier, parent, block, event.block_size)
            parent = block

    def _copied(self, event: BlocksStored, blocks: list[BlockHash], at: int) -> bool:
        """Did the engine make copies, or only report what it hit?

        A report (vLLM's full report mode) starts at the root of a prompt and names what is held;
        we may lack some of it, even the first block. A real store looks the same, but from the
        root an engine makes copies only of prompts of one block and where it is told not to read
        its cache. So nothing is added: too few copies say too little, too many say too much.
        Lower tiers report nothing; chunks share blocks, and one may be told twice. Source:
        protocols/vllm.md 1.
        """
        if event.parent is not None or event.tier is Tier.GPU:
            return event.parent is not None
        pairs = zip(event.hashes, blocks, strict=True)
        return not all(self._held(key, block, at) for key, block in pairs)

    def _held(self, key: bytes, block: BlockHash, at: int) -> bool:
        row = self._table.get(key)
        return isinstance(row, Row) and row.block == block and row.copies[at] > 0

    def _removed(self, event: BlocksRemoved, out: Translation) -> None:
        at, tier, copies = AT[event.tier], event.tier, self._copies
        waiting = self.waiting
        # A block may be held, and wait as well: told again behind a parent that was lost.
        twice = bool(waiting.blocks) and not self._counts
        keys, plain = iter(event.hashes), not self.chunks.told and not twice
        while True:
            key = copies.let_go(keys, tier, at, out) if plain else next(keys, None)
            if key is None:
                return
            row = self._table.get(key)
            if type(row) is not Row or not row.copies[at]:
                if key in self.chunks.told:  # of whose blocks the last was given up before
                    self.chunks.removed(key, at, out)
                elif not waiting.remove(key, at, out):
                    out.left_out["unknown-removal"] += 1
                continue
            if twice:
                waiting.remove(key, at, out)  # it is there or not: one removal takes both
            if not copies.fewer(key, row, at, out):
                out.gone(copies.who, tier, (row.block,), None)
                if key in self.chunks.told:
                    self.chunks.removed(key, at, out)

    def _orphan(self, event: BlocksStored, out: Translation) -> None:
        """The parent has no row. It waits, unless its own first block tells where it belongs."""
        row = self._table.get(event.hashes[0])
        if isinstance(row, Row) and row.parent is not None:
            blocks = extend(row.parent, event.tokens, event.block_size, event.extra)
            if blocks[0] == row.block:
                self._hold(event, row.parent, blocks, out)
                return
        out.left_out["orphan"] += 1
        self.waiting.orphans(event, out)


@lru_cache(maxsize=1024)
def _seed(model: str, size: int, adapter: str, salt: str) -> int:
    return seed(Namespace(model, size, adapter, salt))

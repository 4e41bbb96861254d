"""Translation: what does an engine's event mean in our hashes?

Pure. Sits between dialects/ (engine nouns) and index/stores/ (absolute rows). The alias table,
engine key -> our hash, is the worker's block table itself, so a removal that names only engine
hashes is understood, also after a restart of ours. What is decided depends on the table and the
events alone: two ingests that read the same stream write the same rows. Open it to change what is
indexed; in doubt a block is left out, since the index may say too little, never too much.

    BlocksStored(h1 h2, tokens) -> Stored(b1 b2)   rows h1 -> b1 (1 copy), h2 -> b2 (1 copy)
    BlocksStored(h2, tokens)    -> nothing new     rows h2 -> b2 (2 copies: the engine has two)
    BlocksRemoved(h2)           -> nothing         rows h2 -> b2 (1 copy)
    BlocksRemoved(h2)           -> Removed(b2)     rows h2 -> None
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kvplane.index import TIERS, Row, Value, extend, seed
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Namespace,
    Removed,
    Stored,
    Tier,
    Worker,
)

from .dialects.base import AllCleared, BlocksRemoved, BlocksStored, EngineEvent

AT = {tier: position for position, tier in enumerate(TIERS)}
ONE = {  # copies of a row that was just made
    Tier.GPU: (1, 0, 0, 0),
    Tier.CPU: (0, 1, 0, 0),
    Tier.DISK: (0, 0, 1, 0),
    Tier.REMOTE: (0, 0, 0, 1),
}
PAIRED = "speculative decoding: the last block of a prefix may not be usable"
HYBRID = "hybrid attention: other groups than full attention may not hold the prefix"
LEFT_OUT = (  # closed set of reasons; labels of a counter
    "orphan",  # its parent was never announced, or is gone
    "sparse",  # hashes of some blocks only: positions cannot be counted
    "group",  # a window or state group, or a second full-attention group
    "placeholder",  # names blocks without tokens that nobody explained
    "extra-keys",  # images and other content that tokens do not show
    "block-size",  # continues blocks of another size
    "unknown-removal",  # takes away what we do not have
)


@dataclass(slots=True)
class Translation:
    """What some events mean; `rows` are absolute, None deletes."""

    changes: list[Change] = field(default_factory=list)
    rows: dict[bytes, Row | None] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    cleared: bool = False  # the engine dropped its cache: all before is settled
    caveat: str = ""  # why a depth may be more than the engine serves; one of the two below
    _gone: list[BlockHash] = field(default_factory=list)  # of the Removed being gathered
    _gone_of: Removed | None = None

    def say(self, change: Change) -> None:
        """Append a change after all before it."""
        self.settle()
        self.changes.append(change)

    def gone(self, removed: Removed) -> None:
        """Append a removal; neighbours become one, since engines send one hash an event."""
        if self._gone_of is None or self._gone_of.tier is not removed.tier:
            self.settle()
            self._gone_of = removed
        self._gone += removed.blocks

    def settle(self) -> None:
        """Close the removal that is being gathered."""
        if self._gone_of is not None:
            self.changes.append(replace(self._gone_of, blocks=tuple(self._gone)))
            self._gone_of, self._gone = None, []


class Translator:
    """One life of one worker: its alias table, and what each event makes of it."""

    def __init__(
        self,
        worker: Worker,
        epoch: Epoch,
        model: str,
        table: Mapping[bytes, Value],
        copies: bool = True,
    ) -> None:
        self.worker, self.epoch = worker, epoch
        self.table = {key: row for key, row in table.items() if isinstance(row, Row)}
        self._model, self._copies = model, copies
        self._group = _group_of(self.table)

    def translate(self, events: Iterable[EngineEvent]) -> Translation:
        """Apply events in order to the table and say what changed."""
        out = Translation()
        for event in events:
            if isinstance(event, BlocksStored):
                self._stored(event, out)
            elif isinstance(event, BlocksRemoved):
                self._removed(event, out)
            else:
                assert isinstance(event, AllCleared), f"unknown event {event!r}"
                self.clear(ClearReason.ENGINE, out)
        out.settle()
        return out

    def clear(self, reason: ClearReason, out: Translation) -> None:
        """Empty the table; everything before is void."""
        out.say(Cleared(self.worker, self.epoch, reason))
        out.rows.update(dict.fromkeys(self.table))
        out.cleared = True
        self.table.clear()

    def _stored(self, event: BlocksStored, out: Translation) -> None:
        if not event.full_attention or self._group not in (None, event.group):
            out.left_out["group"] += 1
            out.caveat = HYBRID
            return
        if not event.tokens and event.hashes:
            self._placeholder(event, out)
            return
        if not event.dense:
            out.left_out["sparse"] += 1
            return
        self._group = event.group
        anchor = self._anchor(event, out)
        if anchor is not None:
            self._hold(event, anchor, out)

    def _anchor(self, event: BlocksStored, out: Translation) -> tuple[BlockHash | None, int] | None:
        """The block before the first (None at the root) and the number to hash on from."""
        if event.parent is None:
            unnamed = f"lora-id:{self.worker}:{event.adapter_id}"  # ids differ between pods
            adapter = event.adapter or ("" if event.adapter_id is None else unnamed)
            space = Namespace(self._model, event.block_size, adapter, event.salt)
            return None, seed(space)
        row = self.table.get(_key(event.parent, event.group))
        if row is None:
            out.left_out["orphan"] += 1
            return None
        if row.block_size != event.block_size:
            out.left_out["block-size"] += 1
            return None
        return row.block, row.block

    def _hold(
        self, event: BlocksStored, anchor: tuple[BlockHash | None, int], out: Translation
    ) -> None:
        """Count one more copy of each block, and tell those that are new in this tier.

        A store from the root whose first block is here already is a report of what was hit, not a
        copy (vLLM's full report mode): it only adds what is missing. Source: protocols/vllm.md 1.
        """
        parent, start = anchor
        blocks = extend(start, event.tokens, event.block_size)
        keys = [_key(engine, event.group) for engine in event.hashes]
        usable = next((at for at, extra in enumerate(event.extra) if extra), len(blocks))
        if usable < len(blocks):
            out.left_out["extra-keys"] += 1
        report = event.parent is None and self._held(keys[0], blocks[0], event.tier)
        run: list[BlockHash] = []
        for key, block in zip(keys[:usable], blocks[:usable], strict=True):
            row = self.table.get(key)
            if row is not None and row.block == block and row.copies[AT[event.tier]]:
                if self._copies and not report:
                    self._count(key, event.tier, 1, out)
                self._tell(run, event, parent, out)
                run, parent = [], block
                continue
            if row is not None and row.block == block:
                self._count(key, event.tier, 1, out)
            else:
                above = run[-1] if run else parent
                self._new(key, Row(block, above, ONE[event.tier], event.block_size), row, out)
            run.append(block)
        self._tell(run, event, parent, out)
        if event.paired:
            out.caveat = PAIRED

    def _placeholder(self, event: BlocksStored, out: Translation) -> None:
        """A lower tier names blocks without tokens: known ones are held there too."""
        for engine in event.hashes:
            key = _key(engine, event.group)
            row = self.table.get(key)
            if row is None:
                out.left_out["placeholder"] += 1
                continue
            held = row.copies[AT[event.tier]] > 0
            if held and not self._copies:
                continue
            self._count(key, event.tier, 1, out)
            if not held:
                told = Stored(
                    self.worker, self.epoch, event.tier, row.parent, (row.block,), row.block_size
                )
                out.say(told)

    def _removed(self, event: BlocksRemoved, out: Translation) -> None:
        for engine in event.hashes:
            key = _key(engine, event.group)
            row = self.table.get(key)
            if row is None or not row.copies[AT[event.tier]]:
                other = self._group not in (None, event.group)
                out.left_out["group" if other else "unknown-removal"] += 1
                continue
            if not self._count(key, event.tier, -1, out):
                self._gone(row.block, event.tier, out)

    def _held(self, key: bytes, block: BlockHash, tier: Tier) -> bool:
        row = self.table.get(key)
        return row is not None and row.block == block and row.copies[AT[tier]] > 0

    def _count(self, key: bytes, tier: Tier, step: int, out: Translation) -> int:
        """Copies of one row in one tier after the step; a row without any copy is deleted."""
        row = self.table[key]
        copies = list(row.copies)
        copies[AT[tier]] += step
        if any(copies):
            gpu, cpu, disk, remote = copies
            row = Row(row.block, row.parent, (gpu, cpu, disk, remote), row.block_size)
            self.table[key] = out.rows[key] = row
        else:
            del self.table[key]
            out.rows[key] = None
        return copies[AT[tier]]

    def _new(self, key: bytes, row: Row, old: Row | None, out: Translation) -> None:
        """A fresh row; where the engine reused a name for other content, the old block is gone."""
        if old is not None:
            for tier in TIERS:
                if old.copies[AT[tier]]:
                    self._gone(old.block, tier, out)
        self.table[key] = out.rows[key] = row

    def _gone(self, block: BlockHash, tier: Tier, out: Translation) -> None:
        out.gone(Removed(self.worker, self.epoch, tier, (block,)))

    def _tell(
        self,
        run: list[BlockHash],
        event: BlocksStored,
        parent: BlockHash | None,
        out: Translation,
    ) -> None:
        if run:
            size = event.block_size
            out.say(Stored(self.worker, self.epoch, event.tier, parent, tuple(run), size))


def _key(engine: bytes, group: int) -> bytes:
    """Key of a row: hashes of two groups are equal, so the group is part of it."""
    return engine if not group else b"g" + group.to_bytes(2, "big") + engine


def _group_of(table: Iterable[bytes]) -> int | None:
    """The group a table was filled from; None where it is empty."""
    for key in table:
        return int.from_bytes(key[1:3], "big") if key[:1] == b"g" else 0
    return None

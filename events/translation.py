"""Translation: what does an engine's event mean in our hashes?

Pure. Sits between dialects/ (engine nouns) and index/stores/ (absolute rows). The alias table,
engine key -> our hash, is the worker's block table itself, so a removal that names only engine
hashes is understood, also after a restart of ours. What is decided depends on the table and the
events alone: two ingests that read the same stream write the same rows. In doubt a block is left
out, since the index may say too little, never too much. This is the walk through a batch; open it
to change in which order events count.

    translation ---> counted ---> early ---> waiting     told before the parent or the tokens
         |              `-------> lower                  chunks of other tiers
         `---------> translate_groups                    further groups of hybrid models
    all write through copies (ageing lets the oldest go) and remember by memo

    BlocksStored(h1 h2, tokens) -> Stored(b1 b2)   rows h1 -> b1 (1 copy), h2 -> b2 (1 copy)
    BlocksStored(h2, tokens)    -> nothing new     rows h2 -> b2 (2 copies: the engine has two)
    BlocksRemoved(h2)           -> nothing         rows h2 -> b2 (1 copy)
    BlocksRemoved(h2)           -> Removed(b2)     rows h2 -> None
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

from kvplane.index import Note, Value
from kvplane.vocabulary import Cleared, ClearReason, Epoch, Group, Tier, Worker

from . import memo
from .copies import Copies
from .counted import Counted
from .dialects.base import AllCleared, BlocksRemoved, BlocksStored, EngineEvent
from .memo import Memo
from .translate_groups import Groups
from .translated import LEFT_OUT, WAITING, Limits, Translation

__all__ = ["LEFT_OUT", "WAITING", "Limits", "Translation", "Translator"]


class Translator:
    """One life of one worker: its alias table, and what each event makes of it."""

    def __init__(
        self,
        worker: Worker,
        epoch: Epoch,
        model: str,
        table: Mapping[bytes, Value],
        copies: bool = True,
        most_blocks: int | None = None,
        limits: Limits | None = None,
    ) -> None:
        limits = limits or Limits()
        if most_blocks is not None:
            limits = replace(limits, most_blocks=most_blocks)
        self.worker, self.epoch = worker, epoch
        self.table: dict[bytes, Value] = dict(table)
        self._memo = Memo.of(self.table)
        self._written = self._memo.pack()  # as the table has it
        self._copies = Copies(worker, epoch, self.table, self._memo, limits)
        facts = (self.table, self._memo, self._copies)
        self._counted = Counted(model, *facts, copies, limits)
        self._groups = Groups(*facts, self._counted.root, copies)

    @property
    def caveat(self) -> str:
        """Why a depth may be more than the engine serves, or ""."""
        return self._memo.caveat

    def translate(
        self, events: Iterable[EngineEvent], ts: float = 0.0, sequence: int = 0
    ) -> Translation:
        """Apply one batch in order to the table and say what changed.

        `ts` is the engine's clock, of which only differences count; `sequence` the batch's number.
        """
        out = Translation()
        ts = ts if isfinite(ts) else 0.0
        self._counted.waiting.begin(sequence, ts, out)
        self._counted.chunks.begin(ts, out)
        part: list[BlocksStored | BlocksRemoved] = []
        for event in events:
            if isinstance(event, AllCleared):
                self._part(part, out)
                self.clear(ClearReason.ENGINE, out)
                part = []
            else:
                part.append(event)
        self._part(part, out)
        out.settle()
        self._remember(out)
        return out

    def clear(self, reason: ClearReason, out: Translation) -> None:
        """Empty the table; everything before is void."""
        out.say(Cleared(self.worker, self.epoch, reason))
        out.rows.update(dict.fromkeys(self.table))
        out.cleared = True
        rules = [rule for rule in self.table.values() if isinstance(rule, Group)]
        rules.sort(key=lambda rule: rule.number)
        self.table.clear()
        self._written = memo.BLANK
        for part in (self._copies, self._counted.waiting, self._counted.chunks):
            part.reset()
        self._memo.begin_again(empty=reason is ClearReason.ENGINE)
        if reason is ClearReason.ENGINE:
            self._groups.announce(rules, out)

    def _remember(self, out: Translation) -> None:
        self._memo.age = self._copies.held.now
        self._memo.alias_age = self._copies.aliases.now
        packed = self._memo.pack()
        if packed != self._written:
            self._written = packed
            self.table[memo.KEY] = out.rows[memo.KEY] = Note(packed)
        out.caveat = self._memo.caveat

    def _part(self, events: Sequence[BlocksStored | BlocksRemoved], out: Translation) -> None:
        """Events between two clears: the counted group's first, since others are named by it."""
        if self._memo.group is None:
            self._elect(events, out)
        counted = self._memo.group or 0
        take, others = self._counted.take, []
        plain = all(event.group == counted for event in events)
        if not plain:
            others = [e for e in events if e.group != counted and not _unnumbered(e)]
            events = [e for e in events if e.group == counted or _unnumbered(e)]
        self._copies.fallen = {} if others else None
        for event in events:
            take(event, out)
        for event in others:
            self._groups.take(event, out)
        self._copies.trim(out)

    def _elect(self, events: Sequence[BlocksStored | BlocksRemoved], out: Translation) -> None:
        """The first group of full attention is counted; where no kind is told, group 0 is it."""
        for event in events:
            if not isinstance(event, BlocksStored) or not event.tokens or not event.full_attention:
                continue
            if event.kind or event.dense:
                self._memo.group = event.group
                if event.group:
                    self._counted.waiting.forget(out)  # was named by group 0
                return


def _unnumbered(event: BlocksStored | BlocksRemoved) -> bool:
    """Stores of lower tiers know no groups: what they hold is whole, as the counted group's is."""
    return not event.grouped and not event.group and event.tier is not Tier.GPU

"""Copies: how many of each block does a worker hold, in which tier?

Pure: the one that writes rows, counts them by age and lets the oldest go. Used by translation.py
and its helpers, which know what an event means. Open it to change what becomes of a row when a copy
comes or goes.

    make -> row with a copy --more/fewer--> row --last copy gone--> deleted, or kept as an alias
                                                (no copies) where lower tiers name only hashes
"""

from __future__ import annotations

from collections.abc import Iterator

from kvplane.index import TIERS, Row, Value, group_of
from kvplane.vocabulary import BlockHash, Epoch, Tier, Worker

from .ageing import Ageing
from .memo import Memo
from .translated import Limits, Translation

Counts = tuple[int, int, int, int]
ONE: tuple[Counts, ...] = ((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))  # by tier
NONE: Counts = (0, 0, 0, 0)
MOST = 0xFFFF  # as many as a row can be written with
ENGINE_KEYS = b"usb"  # first bytes: a hash that an engine can name


class Copies:
    """The rows of one worker's table."""

    def __init__(
        self,
        worker: Worker,
        epoch: Epoch,
        table: dict[bytes, Value],
        memo: Memo,
        limits: Limits,
    ) -> None:
        self.who = (worker, epoch)
        self.table, self._memo = table, memo
        self.held = Ageing(limits.most_blocks, memo.age)
        self.aliases = Ageing(limits.most_aliases, memo.alias_age)
        self._names: set[bytes] = set()  # keys of the aliases
        self.fallen: dict[bytes, Row] | None = None  # deleted in this batch, where asked for
        for key, row in table.items():
            if isinstance(row, Row):
                self._enter(key, row)

    def reset(self) -> None:
        """The table is empty."""
        self.held.reset()
        self.aliases.reset()
        self._names.clear()

    def make(self, key: bytes, row: Row, old: Value | None, out: Translation) -> None:
        """A row of the age of now; where its name meant other content, that is gone."""
        if isinstance(old, Row):
            self.say_gone(key, old, out)
            self._leave(key, old)
        self.held.counts[row.age] += 1
        self.table[key] = out.rows[key] = row

    def more(self, key: bytes, row: Row, at: int, out: Translation, count: int = 1) -> Row:
        """Copies of a row in one tier more; it is young again."""
        now = list(row.copies)
        now[at] = min(now[at] + count, MOST)
        gpu, cpu, disk, remote = now
        return self._write(key, row, (gpu, cpu, disk, remote), self.held.now, out)

    def fewer(self, key: bytes, row: Row, at: int, out: Translation, count: int = 1) -> int:
        """Copies that are left in this tier; a row without any is deleted, or an alias."""
        if row.copies == ONE[at]:
            self._forget(key, row, out)
            return 0
        now = list(row.copies)
        now[at] -= min(now[at], count)
        if any(now):
            gpu, cpu, disk, remote = now
            self._write(key, row, (gpu, cpu, disk, remote), row.age, out)
        else:
            self._forget(key, row, out)
        return now[at]

    def let_go(self, keys: Iterator[bytes], tier: Tier, at: int, out: Translation) -> bytes | None:
        """The first key that needs a closer look; all before it had their only copy in this tier.

        Nearly all removals are of that kind: `fewer` does the same to one, in four times the time.
        """
        if self._memo.lower or self.fallen is not None:
            return next(keys, None)
        table, rows, counts, one = self.table, out.rows, self.held.counts, ONE[at]
        blocks: list[BlockHash] = []
        odd = None
        for key in keys:
            row = table.get(key)
            if type(row) is not Row or row.copies != one:
                odd = key
                break
            del table[key]
            rows[key] = None
            counts[row.age] -= 1
            blocks.append(row.block)
        if blocks:
            out.gone(self.who, tier, blocks, None)
        return odd

    def _write(self, key: bytes, old: Row, copies: Counts, age: int, out: Translation) -> Row:
        self._leave(key, old)
        row = Row(old.block, old.parent, copies, old.block_size, age)
        self.held.counts[age] += 1
        self.table[key] = out.rows[key] = row
        return row

    def _forget(self, key: bytes, row: Row, out: Translation) -> None:
        """The last copy is gone."""
        if not self._memo.lower or key[0] not in ENGINE_KEYS:
            self._delete(key, row, out)
            return
        self._leave(key, row)
        alias = Row(row.block, row.parent, NONE, row.block_size, self.aliases.now)
        self.table[key] = out.rows[key] = alias
        self._enter(key, alias)
        while self.aliases.over():
            oldest = self.aliases.oldest(self._aliases_of, self._is_alias)
            self._delete(oldest, self.table[oldest], out)
        self.aliases.turn()

    def _delete(self, key: bytes, row: Value, out: Translation) -> None:
        assert type(row) is Row, f"{key!r} is no row"
        self._leave(key, row)
        del self.table[key]
        out.rows[key] = None
        if self.fallen is not None:
            self.fallen[key] = row

    def drop(self, key: bytes, out: Translation) -> None:
        """A row goes with all its copies."""
        row = self.table[key]
        assert isinstance(row, Row), f"{key!r} is no row"
        self.say_gone(key, row, out)
        self._delete(key, row, out)

    def say_gone(self, key: bytes, row: Row, out: Translation) -> None:
        """Of every tier that has copies."""
        for tier, count in zip(TIERS, row.copies, strict=True):
            if count:
                out.gone(self.who, tier, (row.block,), group_of(key))

    def trim(self, out: Translation) -> None:
        """Let the oldest go where there are too many; what is left of their chains only counts
        less deep."""
        held = self.held
        while held.over():
            self.drop(held.oldest(self._rows_of, self._is_held), out)
            out.left_out["cap"] += 1
        held.turn()

    def _enter(self, key: bytes, row: Row) -> None:
        if row.copies != NONE:
            self.held.counts[row.age] += 1
        else:
            self.aliases.counts[row.age] += 1
            self._names.add(key)

    def _leave(self, key: bytes, row: Row) -> None:
        if row.copies != NONE:
            self.held.counts[row.age] -= 1
        else:
            self.aliases.counts[row.age] -= 1
            self._names.discard(key)

    def _rows_of(self, age: int) -> list[bytes]:
        rows = self.table.items()
        return [k for k, r in rows if isinstance(r, Row) and r.age == age and r.copies != NONE]

    def _is_held(self, key: bytes, age: int) -> bool:
        row = self.table.get(key)
        return isinstance(row, Row) and row.age == age and row.copies != NONE

    def _aliases_of(self, age: int) -> list[bytes]:
        return [key for key in self._names if self._is_alias(key, age)]

    def _is_alias(self, key: bytes, age: int) -> bool:
        row = self.table.get(key)
        return isinstance(row, Row) and row.age == age and row.copies == NONE

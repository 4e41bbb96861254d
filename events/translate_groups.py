"""Translate groups: what do the further cache groups of a hybrid model hold?

Pure. Engines name one prefix alike in every group, so a block is found by its name among the rows
of the counted group; never by counting, since window and state groups tell hashes of some blocks
and tokens of all. index/windows.py caps by what is told here. Used by translation.py, after the
counted group's events of the same batch. Open it to follow one more kind of group.

    counted   h1 h2 h3 h4 (dense)   rows h1 -> b1 .. h4 -> b4
    window    h3, tokens of 1..4    row (group, h3) -> b3, Stored(b3, group)
"""

from __future__ import annotations

from collections.abc import Callable

from kvplane.index import Row, Value, extend, group_key, rule_key
from kvplane.vocabulary import BlockHash, Group, GroupKind, Stored, Tier

from .copies import ONE, Copies
from .dialects.base import BlocksRemoved, BlocksStored
from .memo import HYBRID, Memo
from .translated import AT, Translation

KINDS = {  # what an engine calls it -> the rule; what is not here cannot be capped by
    "full_attention": GroupKind.FULL,
    "mla_attention": GroupKind.FULL,
    "sink_full_attention": GroupKind.FULL,
    "sliding_window": GroupKind.WINDOW,
    "sliding_window_mla": GroupKind.WINDOW,
    "mamba": GroupKind.STATE,
    "chunked_local_attention": GroupKind.CHUNK,
}
MOST_TOKENS = 2**32 - 1  # as a rule is written
WITH_TOKENS = (GroupKind.WINDOW, GroupKind.CHUNK)
Place = tuple[BlockHash, BlockHash | None]  # a block and its parent
Root = Callable[[BlocksStored], int]  # event at a root -> number to hash on from


class Groups:
    """All groups of one worker but the counted one."""

    def __init__(
        self, table: dict[bytes, Value], memo: Memo, copies: Copies, root: Root, counts: bool
    ) -> None:
        self._table, self._memo, self._copies = table, memo, copies
        self._root, self._counts = root, counts

    def take(self, event: BlocksStored | BlocksRemoved, out: Translation) -> None:
        """One event of a group that is not the counted one."""
        if isinstance(event, BlocksRemoved):
            self._removed(event, out)
            return
        rule = self._rule(event, out)
        if rule is None:
            out.left_out["group"] += 1
            return
        computed = self._computed(event)
        for position, key in enumerate(event.hashes):
            place = self._named(key)
            if place is None and computed is not None:
                place = computed[position]
            if place is None:
                out.left_out["sparse" if event.tokens else "placeholder"] += 1
            else:
                self._hold(event, key, place, rule, out)

    def announce(self, rules: list[Group], out: Translation) -> None:
        """These groups exist, also now that everything else is void."""
        for rule in rules:
            key = rule_key(rule.number)
            self._table[key] = out.rows[key] = rule
            size = self._memo.size
            out.say(Stored(*self._copies.who, Tier.GPU, None, (), size, rule))

    def _rule(self, event: BlocksStored, out: Translation) -> Group | None:
        """The group's rule, told when it is new; None where there is none to cap by."""
        old = self._table.get(rule_key(event.group))
        known = old if isinstance(old, Group) else None
        size, mine = self._memo.size, event.block_size
        if not size or not mine:
            return known  # a placeholder, or nothing of the counted group is known yet
        if known and not event.kind:
            return known if mine == (known.block_size or size) else None
        kind = KINDS.get(event.kind)
        tokens = event.window if kind in WITH_TOKENS else 0
        bare = kind in WITH_TOKENS and tokens < 1
        if kind is None or bare or mine % size or max(mine, tokens) > MOST_TOKENS:
            self._memo.caveats |= HYBRID
            return None
        rule = Group(event.group, kind, tokens, 0 if mine == size else mine)
        if rule != known:
            self.announce([rule], out)
        return rule

    def _named(self, key: bytes) -> Place | None:
        row = self._table.get(key)
        if row is None and self._copies.fallen is not None:
            row = self._copies.fallen.get(key)
        return (row.block, row.parent) if isinstance(row, Row) else None

    def _computed(self, event: BlocksStored) -> list[Place] | None:
        """Places of all blocks where every block is named and the one before is known."""
        size = self._memo.size
        if not event.dense or (any(event.extra) and event.block_size != size):
            return None
        if all(key in self._table for key in event.hashes):
            return None  # no need
        above: BlockHash | None = None
        if event.parent is None:
            start = self._root(event)
        else:
            before = self._named(event.parent)
            if before is None:
                return None
            start = above = before[0]
        blocks = extend(start, event.tokens, size, event.extra)
        parents = [above, *blocks]
        step = event.block_size // size
        return list(zip(blocks, parents, strict=False))[step - 1 :: step]

    def _hold(
        self, event: BlocksStored, key: bytes, place: Place, rule: Group, out: Translation
    ) -> None:
        """One copy more; a store from the root may be a report of what was hit, and adds none."""
        copies, at, (block, parent) = self._copies, AT[event.tier], place
        mine = group_key(event.group, key)
        row, size = self._table.get(mine), self._memo.size
        if isinstance(row, Row) and row.block == block:
            held = row.copies[at] > 0
            if not held or (self._counts and event.parent is not None):
                copies.more(mine, row, at, out)
            if held:
                return
        else:
            copies.make(mine, Row(block, parent, ONE[at], size, copies.held.now), row, out)
        out.here(copies.who, event.tier, parent, block, size, rule)

    def _removed(self, event: BlocksRemoved, out: Translation) -> None:
        if rule_key(event.group) not in self._table:
            out.left_out["group"] += len(event.hashes)
            return
        at = AT[event.tier]
        for key in event.hashes:
            mine = group_key(event.group, key)
            row = self._table.get(mine)
            if not isinstance(row, Row) or not row.copies[at]:
                out.left_out["unknown-removal"] += 1
            elif not self._copies.fewer(mine, row, at, out):
                out.gone(self._copies.who, event.tier, (row.block,), event.group)

"""Loading: how does a worker's table, in any order, become chains of blocks?

Pure: bytes of stores/rows.py in, numpy inside, chains out; view.py stores them. In three steps, so
that a follower can let others run between and beside them. Open it to make a snapshot load faster.

    add      some of the table -> columns block, parent, tiers       short: thousands of rows
    plan     columns -> chains, each as long as it goes               one go: may run in a thread
    pieces   chains -> (tier, parent, blocks) to be stored            short: thousands of blocks

    rows c<-b  b<-a  x<-b  a      chains [a b c] and [x] behind b; a parent's chain comes first
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvplane.vocabulary import Group

from .facts import Further
from .runs import TIERS, stretches
from .stores.rows import HAS_PARENT, KIND, LONG_ROW, NOTE, SHORT_ROW, decode, group_of

SLICE_ROWS = 16_384  # read in one go: a few ms
SLICE_BLOCKS = 4_096  # stored in one go: a few ms
PIECE = 16  # a chain costs as much as so many blocks more
FEW = 32  # chains that are walked one by one, because they are longer than all others
DEEPEST = 64  # branches of branches that are put in order; those beyond just come last

Ints: TypeAlias = npt.NDArray[np.int64]
Words: TypeAlias = npt.NDArray[np.uint64]
Masks: TypeAlias = npt.NDArray[np.uint8]
Bools: TypeAlias = npt.NDArray[np.bool_]
Columns: TypeAlias = tuple[Words, Words, Bools, Masks]  # block, parent, has parent, tiers
Piece: TypeAlias = tuple[int, int | None, Sequence[int]]  # tier, parent of the first, blocks

_HEAD = [("kind", "u1")]
_SHORT = np.dtype([*_HEAD, ("size", "<u2"), ("block", "<u8"), ("parent", "<u8"), ("gpu", "u1")])
_LONG = np.dtype(
    [*_HEAD, ("size", "<u4"), ("block", "<u8"), ("parent", "<u8"), ("copies", "<u2", (TIERS,))]
)
_FORMS = {_SHORT.itemsize: (_SHORT, SHORT_ROW), _LONG.itemsize: (_LONG, LONG_ROW)}
_APART = frozenset(b"gG")  # first bytes of keys that are not of the counted group


@dataclass(frozen=True, slots=True)
class Chains:
    """Held blocks in chain order; one that lies under two engine keys is there twice.

    Chain i is start[i] .. start[i+1]-1 of blocks and tiers.
    """

    blocks: Words
    tiers: Masks  # bit per tier
    start: Ints
    parent: Words  # of each chain's first block
    rooted: Bools  # there is no such parent


def parts(table: Mapping[bytes, bytes]) -> Iterator[tuple[Sequence[bytes], Sequence[bytes]]]:
    """(keys, values) of a table, a slice at a time."""
    every, each = iter(table), iter(table.values())
    while keys := tuple(islice(every, SLICE_ROWS)):
        yield keys, tuple(islice(each, SLICE_ROWS))


def used_up(table: Mapping[bytes, bytes]) -> Iterator[None]:
    """Empty a dict, a slice at a time: to free a million rows at once takes a tenth of a second."""
    while table and isinstance(table, dict):
        for _ in range(min(SLICE_ROWS, len(table))):
            table.popitem()
        yield


@dataclass(slots=True)
class Sheet:
    """What a table says, gathered slice by slice."""

    block_size: int | None = None  # tokens
    rows: int = 0  # to be planned
    unread: int = 0  # values that this program does not understand; left out
    _columns: list[Columns] = field(default_factory=list)
    _rules: dict[int, Group] = field(default_factory=dict)
    _held: dict[int, list[set[int]]] = field(default_factory=dict)  # by group, per tier

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Take over some of the table."""
        if not _APART.isdisjoint({key[0] if key else 0 for key in keys}):
            values = self._apart(keys, values)
        for rows in self._rows(values):
            self.block_size = int(rows["size"][-1])
            self._columns.append(_columns(rows))
            self.rows += len(rows)

    def groups(self) -> dict[int, Further]:
        """The further groups whose rule is there."""
        return {
            number: Further(rule, self._held.get(number) or _nothing())
            for number, rule in self._rules.items()
        }

    def plan(self) -> Chains:
        """Chains of all that was added. Heavy: a third of a second for a million rows."""
        gathered, self._columns = self._columns, []
        if not gathered:
            gathered = [_columns(np.zeros(0, _SHORT))]
        return _chains(*(np.concatenate(column) for column in zip(*gathered, strict=True)))

    def _apart(self, keys: Sequence[bytes], values: Sequence[bytes]) -> list[bytes]:
        """Keep what belongs to further groups; returns the rest."""
        rest, rows = [], dict[int, list[bytes]]()
        for key, value in zip(keys, values, strict=True):
            if (number := group_of(key)) is not None:
                rows.setdefault(number, []).append(value)
            elif key[:1] == b"G":
                self._rule(value)
            else:
                rest.append(value)
        for number, mine in rows.items():
            held = self._held.setdefault(number, _nothing())
            for found in self._rows(mine):
                blocks, _, _, tiers = _columns(found)
                for tier in range(TIERS):
                    held[tier].update(blocks[(tiers >> tier & 1).astype(bool)].tolist())
        return rest

    def _rule(self, value: bytes) -> None:
        try:
            rule = decode(value)
        except ValueError:
            rule = None
        if isinstance(rule, Group):
            self._rules[rule.number] = rule
        else:
            self.unread += 1

    def _rows(self, values: Sequence[bytes]) -> Iterator[npt.NDArray[Any]]:
        """The rows among some values, those of one form together."""
        lengths = set(map(len, values))
        for length in lengths:
            mine = values if len(lengths) == 1 else [v for v in values if len(v) == length]
            if length not in _FORMS:
                self.unread += sum(value[:1] != bytes((NOTE,)) for value in mine)
                continue
            form, kind = _FORMS[length]
            rows = np.frombuffer(b"".join(mine), form)
            right = rows["kind"] & np.uint8(KIND & ~HAS_PARENT) == kind  # whatever its age
            if not right.all():
                self.unread += int((rows["kind"][~right] != NOTE).sum())
                rows = rows[right]
            if len(rows):
                yield rows


def read(table: Mapping[bytes, bytes]) -> Sheet:
    """All of a table, in one go."""
    sheet = Sheet()
    for keys, values in parts(table):
        sheet.add(keys, values)
    return sheet


def _nothing() -> list[set[int]]:
    return [set() for _ in range(TIERS)]


def _columns(rows: npt.NDArray[Any]) -> Columns:
    """Rows that hold something; those that are only a name are left out."""
    if rows.dtype == _SHORT:
        tiers = (rows["gpu"] > 0).astype(np.uint8)
    else:
        tiers = np.packbits(rows["copies"] > 0, axis=1, bitorder="little")[:, 0]
    held = tiers > 0
    if not held.all():
        rows, tiers = rows[held], tiers[held]
    return rows["block"], rows["parent"], (rows["kind"] & HAS_PARENT).astype(bool), tiers


def _chains(block: Words, parent: Words, has: Bools, tiers: Masks) -> Chains:
    order = np.argsort(block)
    block, parent, has, tiers = block[order], parent[order], has[order], tiers[order]
    above = _above(block, parent, has)
    head, chain, depth = _walk(above)
    rank = _ranked(above, head, chain)
    reached = np.flatnonzero(chain >= 0)  # a ring of rows, which no engine makes, is not
    start = np.zeros(len(head) + 1, np.int64)
    start[1:] = np.cumsum(np.bincount(chain[reached], minlength=len(head))[rank])
    begin = np.empty(len(head), np.int64)
    begin[rank] = start[:-1]
    row = np.empty(len(reached), np.int64)
    row[begin[chain[reached]] + depth[reached]] = reached
    head = head[rank]
    return Chains(block[row], tiers[row], start, parent[head], ~has[head])


def _above(block: Words, parent: Words, has: Bools) -> Ints:
    """Where the parent of each row is among the sorted blocks; -1 where it is not."""
    above = np.full(len(block), -1, np.int64)
    if len(block):
        order = np.argsort(parent)  # sorted questions walk through memory, others jump in it
        asked = parent[order]
        at = np.minimum(np.searchsorted(block, asked), len(block) - 1)
        above[order] = np.where((block[at] == asked) & has[order], at, -1)
    return above


def _walk(above: Ints) -> tuple[Ints, Ints, Ints]:
    """(head of every chain, chain of every row or -1, its place there). All chains step at once."""
    below, child = np.full(len(above), -1, np.int64), np.flatnonzero(above >= 0)
    below[above[child]] = child  # of several children one goes on, the others are heads
    follows = np.zeros(len(above), bool)
    follows[child] = below[above[child]] == child
    head = np.flatnonzero(~follows)
    chain, depth = np.full(len(above), -1, np.int64), np.zeros(len(above), np.int64)
    now, mine, step = head, np.arange(len(head)), 0
    while len(now) > FEW:
        chain[now], depth[now] = mine, step
        now, step = below[now], step + 1
        going = now >= 0
        now, mine = now[going], mine[going]
    following = below.data
    for row, number in zip(now.tolist(), mine.tolist(), strict=True):
        rows = array("q")
        while row >= 0:
            rows.append(row)
            row = following[row]
        found = np.frombuffer(rows, np.int64)
        chain[found], depth[found] = number, np.arange(step, step + len(found))
    return head, chain, depth


def _ranked(above: Ints, head: Ints, chain: Ints) -> Ints:
    """Chains in an order that has those they branch from first, so that runs end at branches."""
    up = above[head]
    of = np.where(up >= 0, chain[up], -1)
    level = np.zeros(len(head), np.int64)
    for _ in range(DEEPEST):
        deeper = np.where(of >= 0, level[of] + 1, 0)
        if (deeper == level).all():
            break
        level = deeper
    return np.argsort(level, kind="stable")


def pieces(chains: Chains) -> Iterator[Piece | None]:
    """What to store, one after the other; None where others may have their turn."""
    work, start, tiers = 0, chains.start.data, chains.tiers.tobytes()
    for first, end, parent, rooted in zip(
        start, start[1:], chains.parent.data, chains.rooted.data, strict=False
    ):
        above = None if rooted else parent
        for at in range(first, end, SLICE_BLOCKS):
            stop = min(end, at + SLICE_BLOCKS)
            blocks = chains.blocks[at:stop].tolist()
            for piece in _by_tier(above, blocks, tiers[at:stop]):
                yield piece
                work += len(piece[2]) + PIECE
                if work >= SLICE_BLOCKS:
                    work = 0
                    yield None
            above = blocks[-1]


def _by_tier(above: int | None, blocks: list[int], tiers: bytes) -> Iterator[Piece]:
    """Unbroken rows of each tier."""
    alike = tiers.count(tiers[:1]) == len(tiers)
    each = np.frombuffer(tiers, np.uint8)
    for tier in range(TIERS):
        if alike:
            if tiers[0] >> tier & 1:
                yield tier, above, blocks
            continue
        bits = np.packbits(each >> tier & 1, bitorder="little").tobytes()
        for start, stop in stretches(int.from_bytes(bits, "little")):
            yield tier, blocks[start - 1] if start else above, blocks[start:stop]

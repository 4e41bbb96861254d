"""Loading: every row that a table can hold is in the view that was loaded from it."""

from __future__ import annotations

import random

import pytest

from kvplane.index import Row, View
from kvplane.index.loading import SLICE_BLOCKS, read
from kvplane.index.stores.base import Snapshot, WorkerState
from kvplane.index.stores.rows import AGES, NOTE
from kvplane.vocabulary import BlockHash, Cursor, Epoch, Pod, Tier, Worker

A = Worker(Pod("a"))
FAR = 100_000


@pytest.mark.parametrize("age", range(AGES))
@pytest.mark.parametrize("copies", [(1, 0, 0, 0), (300, 0, 0, 0), (0, 2, 0, 1)])
def test_a_row_of_any_age_and_form_is_loaded(age: int, copies: tuple[int, int, int, int]) -> None:
    rows = [
        Row(BlockHash(number), BlockHash(number - 1) if number > 1 else None, copies, 16, age)
        for number in (1, 2, 3)
    ]
    table = {b"u" + bytes(7) + bytes([row.block]): row.encode() for row in rows}
    state = WorkerState(A, Epoch(1), 0, (), table)
    view = View()
    view.load(Snapshot(Cursor("x"), (state,), Cursor("x")))
    assert view.depths([row.block for row in rows])[A][0] == 3


def test_what_is_no_row_is_left_out_and_counted_unless_it_is_a_note_of_the_ingest() -> None:
    row, long = (Row(BlockHash(1), None, (1, count, 0, 0), 16).encode() for count in (0, 1))
    assert len(row) != len(long)
    table = {b"u1": row, b"?a": bytes((NOTE,)), b"?b": bytes((NOTE,)) + bytes(len(row) - 1)}
    assert (read(table).rows, read(table).unread) == (1, 0)
    strange = [b"", b"\x3f", b"\x3f" + row[1:], b"\x3f" + long[1:], row + b"x"]
    table |= {b"u%d" % (9 + at): value for at, value in enumerate(strange)}
    assert (read(table).rows, read(table).unread) == (1, len(strange))
    table |= {b"G\0\1": b"\x3f" + row[1:]}  # a rule that is none
    assert read(table).unread == len(strange) + 1


@pytest.mark.parametrize("blocks", [40, SLICE_BLOCKS + 40])
def test_every_block_keeps_its_parent_in_every_tier(blocks: int) -> None:
    """A long chain that is not in all tiers everywhere, and a branch behind every ninth block."""
    chance, rows = random.Random(blocks), dict[bytes, Row]()
    for at in range(blocks):
        for block, parent in ((FAR + at, FAR + at - 1 if at else None), (at, FAR + at)):
            if block >= FAR or not at % 9:
                copies = (chance.choice((0, 1, 1)), chance.choice((0, 0, 2)), 0, 1)
                rows[b"u%d" % block] = Row(
                    BlockHash(block), None if parent is None else BlockHash(parent), copies, 16
                )
    names = sorted(rows, key=lambda _: chance.random())
    table = {key: rows[key].encode() for key in names}
    view = View()
    view.load(Snapshot(Cursor("x"), (WorkerState(A, Epoch(1), 0, (), table),), Cursor("x")))
    found = dict[tuple[Tier, int], int | None]()
    for stored in view.held(A):
        for block, parent in zip(stored.blocks, (stored.parent, *stored.blocks), strict=False):
            found[stored.tier, block] = parent
    tiers = (Tier.GPU, Tier.CPU, Tier.DISK, Tier.REMOTE)
    assert found == {
        (tier, row.block): row.parent
        for row in rows.values()
        for tier, count in zip(tiers, row.copies, strict=True)
        if count
    }

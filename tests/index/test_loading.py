"""Loading: every row that a table can hold is in the view that was loaded from it."""

from __future__ import annotations

import pytest

from kvplane.index import Row, View
from kvplane.index.stores.base import Snapshot, WorkerState
from kvplane.index.stores.rows import AGES
from kvplane.vocabulary import BlockHash, Cursor, Epoch, Pod, Worker

A = Worker(Pod("a"))


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

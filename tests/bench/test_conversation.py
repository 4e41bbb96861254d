"""The rows of a conversation: both turns, and the share of the second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_the_rows_are_both_turns_and_a_share(from_bench: Callable[[str], Any]) -> None:
    rows = list(from_bench("conversation").rows(tokens=4000, rounds=2))
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) == 18
    assert [row.unit for row in rows[:5]] == ["ms"] * 4 + ["%"]
    assert all(len(row.values) == 2 and min(row.values) > 0 for row in rows)
    for kind in ("chat, BPE", "text, BPE", "chat, bytes", "text, bytes"):
        assert f"{kind}, second turn of the first" in names

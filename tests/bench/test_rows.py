"""The rows of `make bench` that start processes: every row is a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_the_directory_rows_are_rates_and_costs(from_bench: Callable[[str], Any]) -> None:
    rows = list(from_bench("directory").rows(seconds=0.1, rounds=2))
    assert [row.unit for row in rows] == ["requests/s", "CPU us"] * 4
    names = " | ".join(row.name for row in rows)
    for part in ("rank GET, 8 ", "rank GET, 64 ", "topology GET, 8 ", "query of 64 rooms"):
        assert part in names
    for row in rows:
        assert len(row.values) == 2 and row.name in row.line()
        assert all(value > 0 for value in row.values if row.unit == "requests/s")

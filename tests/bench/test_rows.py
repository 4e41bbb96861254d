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


def test_the_transfer_rows_are_rates_or_a_reason(from_bench: Callable[[str], Any]) -> None:
    rows = list(from_bench("transfer").rows(0.05, 2, ("fake", "mori", "tcp")))
    lines = [row.line() for row in rows]
    assert "not measured: moves nothing between processes" in lines[0]
    assert "not measured: it needs AMD GPUs" in lines[1]
    assert [row.unit for row in rows[2:]] == ["pages/s", "GB/s"] * 4, lines
    for pages, size in zip(rows[2::2], rows[3::2], strict=True):
        page_bytes = 1 << 20 if "1 MiB" in pages.name else 64 << 10
        assert len(pages.values) == 2 and min(pages.values) > 0
        wanted = [value * page_bytes / 1e9 for value in pages.values]
        assert list(size.values) == wanted and size.name == pages.name


def test_a_backend_that_fails_says_how_and_the_others_go_on(
    from_bench: Callable[[str], Any], monkeypatch: Any
) -> None:
    transfer = from_bench("transfer")
    monkeypatch.setattr(transfer, "MOST_S", 0.01)
    [row] = transfer.rows(0.05, 1, ("tcp",))
    assert "not measured: failed: not done within 0.01 s" in row.line()
    monkeypatch.setattr(transfer, "MOST_S", 60.0)
    monkeypatch.setattr(transfer, "BACKENDS", {"none": None})
    [row] = transfer.rows(0.05, 1, ("none",))
    assert "not measured: failed: KeyError: 'none'" in row.line()


def test_numbers_in_a_row_can_be_read(from_bench: Callable[[str], Any]) -> None:
    row = from_bench("timing").Row("a row", "pages/s", (12_345.6, 0.12345, 999.94))
    assert row.line().split() == [
        "a",
        "row",
        "999.9",
        "pages/s",
        "(0.1235",
        "to",
        "12,346,",
        "3",
        "rounds)",
    ]


def test_the_redis_rows_are_costs_of_the_server(from_bench: Callable[[str], Any]) -> None:
    rows = list(from_bench("redis").rows(blocks=1024, many=20_000, rounds=1))
    assert {row.unit for row in rows} == {"us/block", "times", "B/block", "s", "ms"}
    for part in ("batch of 1: apply", "batch of 256: remove, 32", "apply / SET script", "dies"):
        assert any(part in row.name for row in rows), part
    assert all(min(row.values) >= 0 for row in rows)

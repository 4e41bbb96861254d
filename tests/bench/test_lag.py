"""The lag row: four processes, and every batch is seen in the view."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any

import pytest


def test_every_batch_that_was_sent_is_seen_and_timed(
    from_bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lag = from_bench("lag")
    for rest_s in (1.0, 8.0):  # a busy machine is behind, and catches up
        monkeypatch.setattr(lag, "REST_S", rest_s)
        rows = {row.name: row for row in lag.rows(seconds=0.5, rounds=2)}
        if all(isfinite(value) for row in rows.values() for value in row.values):
            break
    for steps in ("steps of 20 ms", "steps of 10 ms"):
        middle, late = (rows[f"{steps}: engine to view, {p}"].values for p in ("p50", "p99"))
        assert all(isfinite(value) and value > 0 for value in (*middle, *late))
        assert all(few <= most for few, most in zip(middle, late, strict=True))
        assert rows[f"{steps}: sent by 16 engines"].unit == "events/s"
        assert rows[f"{steps}: ingest, CPU of an event"].values[0] > 0


def test_a_batch_that_never_shows_is_no_small_lag(from_bench: Callable[[str], Any]) -> None:
    lags = from_bench("lag").lags
    sent = [[1.0, 2.0, 3.0], [1.5]]
    seen = [[2.5, 0, 1], [2.6, 0, 1]]
    assert list(lags(sent, seen)) == [
        (1.0, 1.5), (2.0, 0.5), (3.0, float("inf")), (1.5, float("inf")),
    ]  # fmt: skip

"""The index rows: the workload says what plain sets say, and every row is a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DYNAMO_PY", raising=False)


@pytest.mark.parametrize(("pods", "prompt", "resident"), [(3, 8, 120), (5, 40, 900), (8, 90, 4000)])
def test_the_workload_agrees_with_plain_sets(
    from_bench: Callable[[str], Any], pods: int, prompt: int, resident: int
) -> None:
    workload, adapter = from_bench("workload"), from_bench("index_adapter")
    load = workload.Workload(workload.Spec(pods, prompt, resident, stems=4))
    index, sets, parents = adapter.Index(pods, 16), from_bench("exact").Sets(), {}
    stored = removed = 0
    for event in load.events():
        change = index.event(event.pod, event.stored, event.parent, event.blocks, event.blocks)
        held = sets.held[change.worker][0] if change.worker in sets.held else set()
        if event.stored:
            assert held.isdisjoint(event.blocks) and event.parent in {None, *held}
            for above, block in zip([event.parent, *event.blocks], event.blocks, strict=False):
                assert parents.setdefault(block, above) == above, "a block has one parent"
            stored += len(event.blocks)
        else:
            assert held.issuperset(event.blocks), "what goes was there"
            removed += len(event.blocks)
        assert 1 <= len(event.blocks) <= 64
        index.apply(change)
        sets.apply(change)
    assert load.resident == stored - removed == sum(len(held[0]) for held in sets.held.values())
    assert removed and load.resident == pytest.approx(resident, rel=0.2)
    for query in load.queries(30):
        found = sets.depths(query.blocks, None)
        depths = {int(worker.pod[4:]): depth for worker, (depth, _) in found.items()}
        assert max(depths.values(), default=0) == query.hit == int(prompt * query.share)
        assert index.find(index.query(query.blocks, query.blocks)) == depths


def test_a_workload_is_the_same_again_and_small(from_bench: Callable[[str], Any]) -> None:
    workload = from_bench("workload")
    spec = workload.Spec(3, 8, 120)
    once, again = (
        [(pod, stored, parent, list(blocks)) for pod, stored, parent, blocks in load.events()]
        for load in (workload.Workload(spec), workload.Workload(spec))
    )
    assert once == again
    with pytest.raises(ValueError, match="two prompts"):
        workload.Workload(workload.Spec(4, 100, 799))


def test_what_is_told_as_bytes_is_held_as_well(from_bench: Callable[[str], Any]) -> None:
    plain, packed = (
        from_bench("index_adapter").Index(2, 16),
        from_bench("index_packed").Packed(2, 16),
    )
    for index in (plain, packed):
        index.apply(index.event(1, True, None, [5, 6, 7], [0, 0, 0]))
        index.apply(index.event(1, False, None, [7], [0]))
    asked = [5, 6, 7]
    assert (
        packed.find(packed.query(asked, asked)) == plain.find(plain.query(asked, asked)) == {1: 2}
    )


def test_the_index_rows_are_figures_of_ours_where_there_is_no_peer(
    from_bench: Callable[[str], Any],
) -> None:
    spec = from_bench("workload").Spec(3, 8, 120)
    *rows, absent = from_bench("index").rows([spec], queries=12, rounds=1)
    assert [row.name for row in rows[::2]] == [
        "apply, 3 x 128, changes",
        "apply, 3 x 128, msgpack",
        "query, 3 x 128, p50",
        "query, 3 x 128, p50",
        "query, 3 x 128, 0% held, p50",
        "query, 3 x 128, 50% held, p50",
        "query, 3 x 128, 95% held, p50",
    ]
    assert all(len(row.values) == 1 and row.values[0] > 0 and not row.peer for row in rows)
    assert "not measured: DYNAMO_PY" in absent.line()


def test_the_memory_row_is_bytes_of_a_block(from_bench: Callable[[str], Any]) -> None:
    spec = from_bench("workload").Spec(4, 64, 40_000)
    row, absent = from_bench("memory").rows(spec, 1)
    assert row.unit == "B/block" and 8 < row.values[0] < 500
    assert "not measured: DYNAMO_PY" in absent.line()


def test_a_peer_that_fails_says_how_and_ours_is_told(
    from_bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAMO_PY", "/bin/false")
    row, absent = from_bench("memory").rows(from_bench("workload").Spec(3, 8, 120), 1)
    assert not row.peer and "not measured: failed: status 1" in absent.line()


def test_a_ratio_is_what_the_peer_needs_of_ours(from_bench: Callable[[str], Any]) -> None:
    row = from_bench("timing").Row("a row", "us", (1.0, 2.0, 4.0), (3.0, 3.0, 6.0))
    assert row.line().endswith("peer 3, 1.50 x (1.5 to 3)")


def test_the_pause_rows_are_times(from_bench: Callable[[str], Any]) -> None:
    rows = list(from_bench("pause").rows(from_bench("workload").Spec(8, 64, 20_000)))
    assert {row.unit for row in rows} == {"ms wall", "ms CPU"}
    for part in ("apply, p99.9", "apply, longest", "sweep, longest", "full, longest"):
        assert any(row.name.endswith(part) and row.values[0] >= 0 for row in rows), part


def test_few_questions_are_answered_right_and_told_with_their_seed(
    from_bench: Callable[[str], Any],
) -> None:
    [row] = from_bench("exact").rows(queries=400, seed=8)
    assert (row.queries, row.wrong) == (400, 0)
    assert "400 queries" in row.line() and "0 wrong (seed 8, 100 changes" in row.line()


def test_a_wrong_answer_is_counted_and_ends_the_benchmark(
    from_bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = from_bench("exact")
    monkeypatch.setattr(exact.View, "prefixes", lambda *_: {})
    rows = exact.rows(queries=400, seed=8)
    assert next(rows).wrong > 100
    with pytest.raises(AssertionError, match="wrong answers, seed 8"):
        next(rows)

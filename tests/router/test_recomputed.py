"""Is what prefill computed fetched, or computed again? What counts as proof; FR-RT-21."""

from __future__ import annotations

import pytest

from kvplane.router.recomputed import ALARM, Counters, Streaks, computed_again, counters

NAME = "vllm:prompt_tokens_by_source_total"


def test_counters_are_summed_over_ranks() -> None:
    page = f"""# HELP {NAME} x
{NAME}{{engine="0",model_name="m",source="local_compute"}} 40.0
{NAME}{{engine="1",model_name="m",source="local_compute"}} 1e2
{NAME}{{engine="0",model_name="m",source="local_cache_hit"}} 96.0
{NAME}{{engine="0",model_name="m",source="external_kv_transfer"}} 104.0
"""
    assert counters(page) == Counters(fetched=104.0, computed=140.0)


@pytest.mark.parametrize("page", ["", "vllm:num_requests_running 1.0", f"{NAME} 3.0", "\x00"])
def test_an_engine_that_does_not_tell_is_not_judged(page: str) -> None:
    assert counters(page) is None


@pytest.mark.parametrize(
    ("fetched", "computed", "again"),
    [(100, 1, False), (0, 100, True), (0, 60, True), (0, 3, False), (3, 100, False)],
)
def test_a_decode_that_fetched_nothing_and_computed_the_prompts_did_it_again(
    fetched: int, computed: int, again: bool
) -> None:
    before = Counters(1000.0, 500.0)
    after = Counters(1000.0 + fetched, 500.0 + computed)
    assert computed_again(before, after, tokens=100) is again


def test_an_alarm_begins_once_and_ends_with_the_first_that_was_fetched() -> None:
    streaks, pair = Streaks(), ("p1", "d1")
    assert [streaks.book(pair, True) for _ in range(ALARM + 2)] == [
        *[False] * (ALARM - 1),
        True,
        False,
        False,
    ]
    assert streaks.alarms() == {pair: ALARM + 2}
    assert not streaks.book(("p1", "d2"), True)
    assert not streaks.book(pair, False)
    assert streaks.alarms() == {}


def test_several_at_once_count_as_many() -> None:
    streaks = Streaks()
    assert streaks.book(("p", "d"), True, times=ALARM)


def test_pairs_are_remembered_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.router.recomputed.MOST_PAIRS", 3)
    streaks = Streaks()
    for number in range(10):
        streaks.book((f"p{number}", "d"), True, times=ALARM)
    assert len(streaks.alarms()) == 3

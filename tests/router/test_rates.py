"""Rates: a burst, then a steady rate; who is refused is told when to come back."""

from __future__ import annotations

import pytest

from kvplane.router.rates import Bucket


def test_a_burst_then_the_rate_and_the_wait_is_the_truth() -> None:
    bucket = Bucket(2.0, 3)
    now = 1000.0
    assert [bucket.take(now) for _ in range(3)] == [0, 0, 0]
    wait = bucket.take(now)
    assert wait == pytest.approx(0.5)
    assert bucket.take(now + wait * 0.9) > 0
    assert bucket.take(now + wait) == 0
    assert bucket.take(now + 100) == 0  # and no more than the burst was saved up
    assert [bucket.take(now + 100) == 0 for _ in range(4)] == [True, True, False, False]


def test_over_an_hour_it_is_the_rate_whatever_the_client_does() -> None:
    bucket, taken = Bucket(1.0, 10), 0
    for tenth in range(36_000):
        taken += bucket.take(5.0 + tenth / 10) == 0
    assert 3600 <= taken <= 3610


def test_no_rate_is_no_limit_and_ten_seconds_worth_is_the_usual_burst() -> None:
    assert all(Bucket(0).take(0.0) == 0 for _ in range(1000))
    bucket = Bucket(0.5)
    assert [bucket.take(0.0) == 0 for _ in range(6)] == [True] * 5 + [False]
    slow = Bucket(0.01)  # less than one in ten seconds
    assert slow.take(0.0) == 0
    assert slow.take(1.0) == pytest.approx(99.0)


def test_a_clock_that_stands_or_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(1.0, 1)
    assert bucket.take(10.0) == 0
    assert bucket.take(9.0) > 0

"""Retry: what is worth another attempt, and when it is enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.retry import Again, Budget, Failed, Stop, decide, wait_s
from kvplane.router.settings import RetrySettings
from kvplane.vocabulary import Pod, Worker

SETTINGS = RetrySettings(retries=2)
P1 = Worker(Pod("p1"))


def asked(failed: Failed, attempt: int = 1, left_s: float = 100.0) -> Again | Stop:
    return decide(failed, attempt, SETTINGS, Budget(SETTINGS), left_s)


@pytest.mark.parametrize("status", [None, 408, 429, 500, 502, 503, 504])
def test_a_failure_before_the_first_byte_is_tried_again_without_the_guilty(
    status: int | None,
) -> None:
    assert asked(Failed((P1,), status)) == Again(SETTINGS.first_wait_s, (P1,))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_a_callers_mistake_is_not_tried_again(status: int) -> None:
    assert asked(Failed((P1,), status)) == Stop("not retryable")


def test_nothing_is_tried_again_after_the_first_byte() -> None:
    assert asked(Failed((P1,), committed=True)) == Stop("committed")


def test_nothing_is_tried_again_for_a_client_that_left() -> None:
    assert asked(Failed(aborted=True)) == Stop("aborted")


def test_attempts_are_counted() -> None:
    assert isinstance(asked(Failed((P1,)), attempt=2), Again)
    assert asked(Failed((P1,)), attempt=3) == Stop("no attempts left")


def test_the_deadline_ends_it() -> None:
    assert asked(Failed((P1,)), left_s=0.04) == Stop("no time left")


def test_the_engines_own_word_is_kept() -> None:
    assert asked(Failed((P1,), 429, retry_after_s=1.0)) == Again(1.0, (P1,))
    assert asked(Failed((P1,), 503, retry_after_s=3600.0)) == Stop("no time left")
    assert asked(Failed((P1,), 429, retry_after_s=1.0), left_s=0.9) == Stop("no time left")


def test_what_one_worker_asks_to_wait_is_not_waited_for_where_another_can_serve() -> None:
    assert asked(Failed((P1,), 429, retry_after_s=3600.0, others=True)) == Again(0.05, (P1,))


def test_the_budget_is_a_share_of_requests() -> None:
    settings = RetrySettings(budget_share=0.2, budget_most=2)
    budget = Budget(settings)
    said = [decide(Failed((P1,)), 1, settings, budget, 100.0) for _ in range(3)]
    assert [type(one) for one in said] == [Again, Again, Stop]
    for _ in range(5):
        budget.earn()
    assert isinstance(decide(Failed((P1,)), 1, settings, budget, 100.0), Again)
    assert decide(Failed((P1,)), 1, settings, budget, 100.0) == Stop("no budget left")


def test_a_fleet_that_is_dead_is_asked_little_more_than_once_per_request() -> None:
    settings = RetrySettings()
    budget, retries = Budget(settings), 0
    for _ in range(1000):
        budget.earn()
        for attempt in (1, 2):
            retries += isinstance(decide(Failed(), attempt, settings, budget, 100.0), Again)
    assert retries <= 1000 * settings.budget_share + settings.budget_most


@given(st.integers(1, 100), st.floats(0, 1, exclude_max=True))
def test_waits_grow_within_their_limits(attempt: int, chance: float) -> None:
    plain = min(0.05 * 1.5 ** (attempt - 1), 5.0)
    assert plain * 0.8 - 1e-9 <= wait_s(attempt, SETTINGS, chance) <= plain * 1.2 + 1e-9

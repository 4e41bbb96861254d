"""Unsettled: when a request that seems wrong is due, and how many may wait."""

from __future__ import annotations

import math

import pytest

from kvplane.router.foretold import Foretold
from kvplane.router.settings import DriftSettings
from kvplane.router.unsettled import Unsettled, Waiting
from kvplane.vocabulary import Epoch, Namespace, Pod, Worker

SETTINGS = DriftSettings()


def waiting(answered: float = 10.0, tokens: int = 100) -> Waiting:
    prompts = (list(range(tokens)),)
    told = Foretold(Worker(Pod("p1")), Epoch(1), 0, True, Namespace("tiny", 16), prompts, {})
    return Waiting(told, 0, answered, answered)


@pytest.mark.parametrize(
    ("now", "in_touch_at", "due"),
    [
        (10.9, math.inf, False),  # the news may be on its way
        (11.0, math.inf, True),
        (11.0, 10.1, True),
        (11.0, 10.0, False),  # asked at the same time: may have been answered before
        (11.0, 9.0, False),
        (14.9, -math.inf, False),
        (15.0, -math.inf, True),  # nobody can judge it: out
    ],
)
def test_it_is_due_when_the_store_was_in_touch_later_or_too_late(
    now: float, in_touch_at: float, due: bool
) -> None:
    queue, one = Unsettled(SETTINGS), waiting()
    assert queue.due(now, in_touch_at) is None
    assert queue.add(one)
    assert queue.due(now, in_touch_at) is (one if due else None)
    assert queue.due(99.0, math.inf) is (None if due else one)


def test_the_oldest_is_due_first_and_each_once() -> None:
    queue, each = Unsettled(SETTINGS), [waiting(at) for at in (10.0, 10.5, 11.5)]
    assert all(map(queue.add, each))
    assert [queue.due(12.0, 11.0) for _ in range(3)] == [each[0], each[1], None]


def test_how_many_wait_is_bounded_in_number_and_tokens_and_one_long_prompt_may() -> None:
    queue = Unsettled(SETTINGS)
    assert [queue.add(waiting()) for _ in range(300)] == [True] * 256 + [False] * 44
    queue = Unsettled(SETTINGS)
    assert queue.add(waiting(tokens=300_000))
    assert not queue.add(waiting())
    assert queue.due(20.0, math.inf) and queue.add(waiting())

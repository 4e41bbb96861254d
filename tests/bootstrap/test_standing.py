"""Standing: how an address is doing, told as people need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvplane.bootstrap import NoDirectory, Silent
from kvplane.bootstrap.standing import Standing
from kvplane.vocabulary import Generation

QUIET = Silent("h:1", 3.0)


def waits() -> Iterator[float]:
    yield from (1.0, 2.0, 4.0)
    while True:
        yield 8.0


def test_an_address_is_told_from_its_first_question_to_its_recovery() -> None:
    """FR-TR-06, FR-BS-08: used again after a time, repeated failures back off, state visible."""
    s, life = Standing(10.0, waits), Generation("g1")
    s.used_at = 11.0
    told = s.view(11.0, None)
    assert (told.state, told.since, told.attempts, told.used_at) == ("asking", 10.0, 0, 11.0)
    s.went_well(12.0)
    told = s.view(99.0, life)
    assert (told.state, told.since, told.generation) == ("ok", 12.0, life)
    s.failed(QUIET, 20.0, 23.0, 60.0)
    told = s.view(23.5, life)
    assert (told.state, told.since, told.attempts, told.again_at) == ("waiting", 23.0, 1, 24.0)
    assert told.why == "resolve-topology: bootstrap server h:1: no answer within 3.0 s"
    told = s.view(24.0, life)
    assert (told.state, told.since, told.again_at) == ("failing", 23.0, None)
    s.failed(QUIET, 24.0, 27.0, 60.0)
    told = s.view(28.0, life)
    assert (told.state, told.since, told.attempts, told.again_at) == ("waiting", 23.0, 2, 29.0)
    s.went_well(30.0)
    told = s.view(30.0, life)
    assert (told.state, told.since, told.attempts, told.why) == ("ok", 30.0, 0, "")


def test_it_is_held_back_with_the_same_sentence_until_the_wait_is_over() -> None:
    """FR-BS-08"""
    s = Standing(0.0, waits)
    s.hold_back(0.0)
    s.failed(QUIET, 0.0, 3.0, 60.0)
    with pytest.raises(Silent, match="no answer within") as caught:
        s.hold_back(3.9)
    assert caught.value is not QUIET  # each raise has its own traceback
    s.hold_back(4.0)
    assert s.failing
    s.went_well(4.0)
    assert not s.failing


def test_questions_that_were_out_together_fail_as_one() -> None:
    s = Standing(0.0, waits)
    for _ in range(8):
        s.failed(QUIET, 0.0, 3.0, 60.0)
        s.failed(QUIET, 2.9, 3.1, 60.0)
    assert (s.view(3.5, None).attempts, s.view(3.5, None).again_at) == (1, 4.0)


def test_the_wait_has_a_limit_and_starts_anew_after_an_answer() -> None:
    """FR-TR-06"""
    s, now = Standing(0.0, waits), 0.0
    for wait in (1.0, 2.0, 3.0, 3.0):
        s.failed(NoDirectory("h:1", "connection refused"), now, now, 3.0)
        assert s.view(now, None).again_at == now + wait
        now += wait
    s.went_well(now)
    s.failed(QUIET, now, now, 60.0)
    assert s.view(now, None).again_at == now + 1.0

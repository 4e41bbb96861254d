"""Judgement of batch numbers, as a table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.events import Gap, Life, Seen, judge, same_life


@pytest.mark.parametrize(
    ("last", "sequence", "verdict"),
    [
        (None, 0, Seen.IN_ORDER),
        (None, 1, Gap(0, 0)),
        (None, 3, Gap(0, 2)),
        (0, 0, Seen.REPEAT),
        (0, 1, Seen.IN_ORDER),
        (7, 8, Seen.IN_ORDER),
        (7, 7, Seen.REPEAT),
        (7, 9, Gap(8, 8)),
        (7, 11, Gap(8, 10)),
        (7, 6, Seen.SUSPECT),
        (7, 0, Seen.SUSPECT),
        (2**53 - 2, 2**53 - 1, Seen.IN_ORDER),
    ],
)
def test_a_number_against_the_last_one(
    last: int | None, sequence: int, verdict: Seen | Gap
) -> None:
    assert judge(last, sequence) == verdict


@given(last=st.none() | st.integers(0, 100), sequence=st.integers(0, 200))
def test_a_gap_is_all_between_and_nothing_else(last: int | None, sequence: int) -> None:
    verdict = judge(last, sequence)
    missing = range(0 if last is None else last + 1, sequence)
    assert isinstance(verdict, Gap) == bool(missing)
    if isinstance(verdict, Gap):
        assert range(verdict.first, verdict.last + 1) == missing


@pytest.mark.parametrize(
    ("matches", "first_replayed", "life"),
    [
        (True, 7, Life.SAME),
        (False, 7, Life.NEW),
        (None, 7, Life.NEW),
        (None, None, Life.NEW),
        (None, 50, Life.BEYOND),
        (False, 50, Life.BEYOND),
        (False, 9, Life.BEYOND),
        (False, 8, Life.NEW),  # nothing is missing, and nothing shows that it is the same
    ],
)
def test_what_the_answer_from_our_last_batch_tells(
    matches: bool | None, first_replayed: int | None, life: Life
) -> None:
    assert same_life(7, matches, first_replayed) is life

"""A block that was put into a family is found there, however much came before and after it."""

from __future__ import annotations

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.index import places
from kvplane.index.families import Families
from kvplane.index.runs import Run

blocks = st.integers(0, 2**64 - 1) | st.integers(0, 40)
rows = st.lists(blocks, min_size=1, max_size=9)


@given(told=st.lists(st.tuples(st.integers(0, places.FAMILIES - 1), rows), max_size=30))
def test_every_block_is_found_in_every_family_it_was_put_into(
    told: list[tuple[int, list[int]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "FEW", 5)
        patch.setattr(places, "MOST", 40)
        kept = places.Places()
        for family, row in told:
            kept.add(family, array("Q", row))
        for family, row in told:
            assert all(family in kept.find(block) for block in row)
        every = [block for _, row in told for block in row]
        assert kept.sift(array("Q", every)).tolist() == every
        assert kept.words + kept._unsorted == sum(len(row) for _, row in told)
        assert all(len(words) <= 40 for words in kept._segments if len(words) > 13)
        assert all((words[1:] >= words[:-1]).all() for words in kept._segments)


def test_what_nobody_put_in_is_hardly_ever_supposed_anywhere() -> None:
    kept = places.Places()
    for family in range(3000):
        start = 1 + family * 0x9E3779B97F4A7C15
        kept.add(family, array("Q", [(start + n * 0xD1B54A32D192ED03) % 2**64 for n in range(20)]))
    assert len(kept._segments) >= 2 and all(
        len(before) > len(after) for before, after in pairwise(kept._segments)
    )
    strange = [n * 0xBF58476D1CE4E5B9 % 2**64 for n in range(1, 2000)]
    assert sum(len(list(kept.find(block))) for block in strange) < 20
    assert len(kept.sift(array("Q", strange))) < 20


@given(rows_of=st.lists(rows, max_size=12), gone=st.sets(st.integers(0, 11)))
def test_what_is_made_anew_has_all_that_is_left_then(
    rows_of: list[list[int]], gone: set[int]
) -> None:
    """Runs may be thrown away before a pass over all of them has come to their turn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(places, "FEW", 5)
        kept = Families()
        runs = [kept.begin(Run(None, array("Q", row))) for row in rows_of]
        kept.renew()
        for at, run in enumerate(runs):
            if at in gone:
                kept.leave(run)
                run.blocks = array("Q")
            kept.again(run)
        kept.renewed()
        left = [block for run in runs for block in run.blocks]
        assert kept.sift(array("Q", left)).tolist() == left
        assert all(kept.find(block)[0] is not None for block in left)

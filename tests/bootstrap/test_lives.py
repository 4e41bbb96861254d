"""Lives: what proves that another instance answers."""

from __future__ import annotations

import dataclasses

import pytest

from kvplane.bootstrap import Topology
from kvplane.bootstrap.lives import Life, Verdict
from kvplane.vocabulary import Generation

SAME, NEW, LATE = Verdict.SAME, Verdict.NEW, Verdict.LATE
ONE = Topology(attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1)
TWO = dataclasses.replace(ONE, attn_tp_size=2)
G1, G2 = Generation("g1"), Generation("g2")
R = (0, 0, 0, 0)


@pytest.mark.parametrize(("first", "second", "sent_at", "verdict"), [
    (G1, G1, 2.0, SAME), (G1, G2, 2.0, NEW), (G1, G2, 1.0, NEW), (G1, G2, 0.5, LATE),
    (G1, G1, 0.5, SAME), (None, None, 2.0, SAME), (None, G1, 2.0, NEW), (G1, None, 2.0, NEW),
])  # fmt: skip
def test_a_generation_tells_lives_apart(
    first: Generation | None, second: Generation | None, sent_at: float, verdict: Verdict
) -> None:
    """FR-BS-10: instance id compare; an answer asked for earlier proves nothing."""
    life = Life()
    assert life.answer(first, 1.0) is SAME
    assert life.answer(second, sent_at) is verdict
    assert life.generation == first


def test_without_generations_the_table_tells() -> None:
    """FR-BS-03 with SGLang's own server."""
    life = Life()
    assert life.topology(ONE, None, 1.0) is SAME
    assert life.rank(R, ("h", 1), None, 1.0) is SAME
    assert life.rank((0, 0, 1, 0), ("h", 2), None, 1.0) is SAME
    assert life.rank(R, ("h", 1), None, 2.0) is SAME
    assert life.rank(R, ("h", 3), None, 1.5) is LATE
    assert life.rank(R, ("h", 3), None, 3.0) is NEW
    assert life.topology(TWO, None, 3.0) is NEW
    assert life.ranks == (R, (0, 0, 1, 0))


def test_with_a_generation_only_the_generation_tells() -> None:
    life = Life()
    assert life.topology(ONE, G1, 1.0) is SAME
    assert life.topology(TWO, G1, 2.0) is SAME
    assert life.rank(R, ("h", 1), G1, 2.0) is SAME
    assert life.rank(R, ("h", 9), G1, 3.0) is SAME
    assert life.rank(R, ("h", 9), G2, 3.0) is NEW


def test_ranks_that_are_missing_of_a_complete_table_are_another_life() -> None:
    life = Life()
    assert not life.lost(1.0)  # it was never complete
    life.topology(ONE, None, 2.0)
    assert not life.lost(1.0)
    assert life.lost(2.0)

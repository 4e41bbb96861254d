"""Pairs: who is guilty of what two did together."""

from __future__ import annotations

import pytest

from kvplane.router.pairs import Pairs
from kvplane.router.settings import BreakerSettings
from kvplane.vocabulary import Pod, Worker

P1, P2, D1, D2 = (Worker(Pod(name)) for name in ("p1", "p2", "d1", "d2"))
SETTINGS = BreakerSettings(pair_faults=3, window_s=120, pause_s=60)


def told(*met: tuple[Worker, Worker]) -> list[tuple[Worker, ...]]:
    pairs = Pairs(SETTINGS)
    return [pairs.failed(prefill, decode, float(at)) for at, (prefill, decode) in enumerate(met)]


@pytest.mark.parametrize(
    ("met", "blamed"),
    [
        ([(P1, D1)] * 20, ()),
        ([(P1, D1), (P1, D2)], (P1,)),
        ([(P1, D1), (P2, D1)], (D1,)),
        ([(P1, D1), (P2, D2)], ()),
        ([(P1, D1), (P1, D2), (P2, D2), (P2, D1)], (P2, D1)),
        ([(P1, D1), (P2, D2), (P1, D2), (P1, D2)], (P1, D2)),
        ([(P1, D1), (P1, D2), (P1, D1), (P1, D2)], (P1,)),
    ],
)
def test_who_fails_with_several_partners_is_guilty(
    met: list[tuple[Worker, Worker]], blamed: tuple[Worker, ...]
) -> None:
    assert told(*met)[-1] == blamed


def test_a_meeting_that_worked_clears_the_pair() -> None:
    pairs = Pairs(SETTINGS)
    pairs.failed(P1, D1, 0.0)
    pairs.succeeded(P1, D1)
    assert pairs.failed(P1, D2, 1.0) == ()


def test_what_is_older_than_the_window_is_forgotten() -> None:
    pairs = Pairs(SETTINGS)
    pairs.failed(P1, D1, 0.0)
    assert pairs.failed(P1, D2, 120.0) == ()


def test_two_that_fail_in_a_row_are_kept_apart_for_a_while_and_again_if_they_fail_again() -> None:
    pairs = Pairs(SETTINGS)
    assert pairs.apart(0.0) == frozenset()
    for at in range(3):
        assert pairs.apart(float(at)) == frozenset()
        pairs.failed(P1, D1, float(at))
    assert pairs.apart(61.9) == {(P1, D1)}
    assert pairs.apart(62.0) == frozenset()
    pairs.failed(P1, D1, 63.0)
    assert pairs.apart(64.0) == {(P1, D1)}
    pairs.succeeded(P1, D1)
    assert pairs.apart(64.0) == frozenset()


def test_whoever_is_guilty_is_kept_from_nobody_its_circuit_opens() -> None:
    pairs = Pairs(SETTINGS)
    for at in range(3):
        pairs.failed(P1, D1, float(at))
    pairs.failed(P1, D2, 3.0)
    assert pairs.apart(3.0) == frozenset()


def test_a_pod_that_left_takes_its_quarrels_along() -> None:
    pairs = Pairs(SETTINGS)
    pairs.failed(P1, D1, 0.0)
    pairs.forget(Pod("d1"))
    assert pairs.failed(P1, D2, 1.0) == ()


def test_a_row_of_faults_without_end_takes_no_memory() -> None:
    pairs = Pairs(SETTINGS)
    for at in range(10_000):
        pairs.failed(P1, D1, float(at))
    assert [len(times) for times in pairs.faults.values()] == [3]

"""Runs: what one stretch of blocks says of blocks that are asked for."""

from __future__ import annotations

from array import array

import pytest

from kvplane.index.runs import FEW, Run


@pytest.mark.parametrize("length", [1, 2, FEW, FEW + 1, FEW + 2, 2 * FEW + 1, 70])
def test_agreement_is_exact_wherever_they_part(length: int) -> None:
    run = Run(None, array("Q", range(100, 100 + length)))
    for at in range(length):
        for same in range(1, length - at + 1):
            for more in (0, 1, length):
                asked = (7, 8, *range(100 + at, 100 + at + same), *range(10_000, 10_000 + more))
                for form in (tuple(asked), array("Q", asked)):
                    assert run.agreement(at, form, 2) == same

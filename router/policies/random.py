"""Random: any order, all equally likely.

Pure, member of policies/. Chance is an argument. Open it to change how chance becomes an order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .base import Candidate, Need, name, passed_over


def shuffled(candidates: Sequence[Candidate], chance: Callable[[], float]) -> list[Candidate]:
    """Fisher and Yates, over the names in order so that equal chance gives equal results."""
    found = sorted(candidates, key=name)
    for last in range(len(found) - 1, 0, -1):
        other = min(last, int(chance() * (last + 1)))
        found[last], found[other] = found[other], found[last]
    return found


def random(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """A shuffle."""
    return passed_over(shuffled(candidates, need.chance), need.chance)

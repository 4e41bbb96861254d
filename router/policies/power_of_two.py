"""Power of two: of two workers taken by chance, the less loaded.

Pure, member of policies/. Spreads nearly as well as least_loaded, without herding where several
gateways each see only their own load. Open it to change how the two are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Need
from .least_loaded import load
from .random import shuffled


def power_of_two(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Two by chance, the less loaded of them first; then the rest, less loaded first."""
    key = load(candidates, need)
    if len(candidates) < 3:  # of two both are drawn
        return sorted(candidates, key=key)
    drawn = shuffled(candidates, need.chance)
    return sorted(drawn[:2], key=key) + sorted(drawn[2:], key=key)

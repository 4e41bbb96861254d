"""Round robin: one after the other, whatever they hold or do.

Pure, member of policies/. Every target remembers when it was last taken. Open it to change the
order of turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Need, in_turn, passed_over


def round_robin(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Who waits longest comes first. One that is passed over would be next each time, so it is
    passed over more often than its share alone says."""
    ordered = in_turn(candidates)
    if not need.shares or not ordered:
        return ordered
    return passed_over(ordered, need.chance, 1 / len(ordered))

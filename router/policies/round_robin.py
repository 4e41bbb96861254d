"""Round robin: one after the other, whatever they hold or do.

Pure, member of policies/. The turn is an argument, so the caller counts. Open it to change the
order of turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Need, rotated


def round_robin(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """By name, beginning one further each turn."""
    return rotated(candidates, need.turn)

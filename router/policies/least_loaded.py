"""Least loaded: the worker with the fewest tokens in flight.

Pure, member of policies/, the default for decode. Open it to change what load means.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Need, rotated


def load(candidate: Candidate) -> tuple[int, int]:
    """Tokens in flight, then requests."""
    return candidate.target.inflight_tokens, candidate.target.inflight_requests


def least_loaded(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Least load first; equals in turn by name."""
    return sorted(rotated(candidates, need.turn), key=load)

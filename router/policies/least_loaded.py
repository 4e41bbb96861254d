"""Least loaded: the worker with the fewest tokens in flight.

Pure, member of policies/, the default for decode. Open it to change what load means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .base import Candidate, Need


def load(need: Need) -> Callable[[Candidate], tuple[float, int, int, str]]:
    """A key to order by: tokens in flight, then requests, then who waits longest. One with half a
    share counts as if it had twice the load, this request included: idle is not idle enough."""
    asked = max(1, need.prompt_tokens)

    def of(candidate: Candidate) -> tuple[float, int, int, str]:
        target, share = candidate.target, candidate.share
        tokens: float = target.inflight_tokens
        if share < 1:
            tokens = (tokens + asked) / share - asked
        return tokens, target.inflight_requests, target.turn, target.name

    return of


def least_loaded(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Least load first; equals in turn."""
    return sorted(candidates, key=load(need))

"""Least loaded: the worker with the fewest tokens in flight.

Pure, member of policies/, the default for decode. Open it to change what load means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from .base import Candidate, Need, whole

Key = Callable[[Candidate], tuple[float, int, int, str]]
LOAD = attrgetter(
    "target.inflight_tokens", "target.inflight_requests", "target.turn", "target.name"
)


def load(candidates: Sequence[Candidate], need: Need) -> Key:
    """A key to order by: tokens in flight, then requests, then who waits longest. One with half a
    share counts as if it had twice the load, this request included: idle is not idle enough."""
    if not need.shares or whole(candidates):
        return LOAD
    asked = max(1, need.prompt_tokens)

    def of(candidate: Candidate) -> tuple[float, int, int, str]:
        share, found = candidate.share, LOAD(candidate)
        return ((found[0] + asked) / share - asked, *found[1:]) if share < 1 else found

    return of


def least_loaded(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Least load first; equals in turn."""
    return sorted(candidates, key=load(candidates, need))

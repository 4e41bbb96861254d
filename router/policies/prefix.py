"""Prefix: the worker that has least left to do before this prompt is computed.

Pure, member of policies/, the default for prefill. `cache_aware` and `prefix_hash` are names of
it. Open it to change how held blocks and waiting work are weighed.

    cost = tokens of the prompt not held + tokens in flight there        cheapest first

A deep prefix on a busy worker loses exactly when the work waiting there exceeds the tokens it
saves: a hot prefix spreads to others once it queues, and no switch between two extremes exists.

    prompt 1200     holds  in flight  cost
    p1               1000        900  1100   <- first
    p2                  0          0  1200
    p1 with one request more (200):   1300   p2 is first, and holds the prefix from now on
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Candidate, Need


def prefix(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Least cost; then deepest; then in turn. One with half a share costs twice as much."""
    asked = need.prompt_tokens

    def cost(candidate: Candidate) -> tuple[float, int, int, str]:
        target, depth = candidate.target, candidate.depth_tokens
        tokens = target.inflight_tokens + (asked - depth if asked > depth else 0)
        if candidate.share < 1:
            return (tokens + 1) / candidate.share, -depth, target.turn, target.name
        return tokens, -depth, target.turn, target.name

    return sorted(candidates, key=cost)

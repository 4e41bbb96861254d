"""Weighing: in which order would the policy try the workers, and why?

Pure: candidates in the policy's own order in, words and numbers out. choice.py orders them exactly
as for a request; door.py asks on behalf of the page. Open it to change how an order is explained.

    prefix   p1  1000 of 1200 tokens held, 200 to compute, 900 in flight   cost 1100   <- first
             p2     0 of 1200 tokens held                                  cost 1200
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..pairing import NoPair, Pair
from ..policies import POLICIES, Candidate
from ..policies.prefix import prefix

Json = dict[str, Any]
WORDS = {
    "power_of_two": "two are drawn by chance, and the less loaded of them goes first",
    "least_loaded": "the fewest tokens in flight go first",
    "consistent_hash": "requests of one key stay together; without one the least loaded goes first",
    "round_robin": "one after the other",
    "random": "any order, by chance",
}
BY_CHANCE = ("power_of_two", "random")  # another question may give another order


def weighed(policy: str, ordered: Sequence[Candidate], tokens: int) -> Json:
    """The order, what stands behind it, and one sentence. `tokens` of the prompt; 0 = not known."""
    by_cost = POLICIES.get(policy) is prefix
    return {
        "policy": policy,
        "by_chance": policy in BY_CHANCE,
        "sentence": _by_cost(ordered, tokens) if by_cost else _by_word(policy, ordered),
        "order": [_line(candidate, tokens, by_cost) for candidate in ordered],
    }


def chosen(prefills: Sequence[Candidate], met: Pair | NoPair | None) -> Json:
    """Who would meet; the same one twice where one worker does both."""
    if isinstance(met, NoPair):
        return {"chosen": None, "why_none": met.reason}
    pair = (met.prefill, met.decode) if met is not None else (prefills[0], prefills[0])
    return {"chosen": [str(one.target.worker) for one in pair], "why_none": ""}


def _line(candidate: Candidate, tokens: int, by_cost: bool) -> Json:
    target = candidate.target
    found: Json = {
        "worker": str(target.worker),
        "held_blocks": candidate.depth_blocks,
        "held_tokens": candidate.depth_tokens,
        "inflight_tokens": target.inflight_tokens,
        "inflight_requests": target.inflight_requests,
        "share": round(candidate.share, 3),
    }
    if by_cost:
        found |= {"to_compute": _left(candidate, tokens), "cost": _cost(candidate, tokens)}
    return found


def _left(candidate: Candidate, tokens: int) -> int:
    return max(0, tokens - candidate.depth_tokens)


def _cost(candidate: Candidate, tokens: int) -> int:
    """As policies/prefix.py counts it."""
    cost = _left(candidate, tokens) + candidate.target.inflight_tokens
    return cost if candidate.share >= 1 else round((cost + 1) / candidate.share)


def _by_cost(ordered: Sequence[Candidate], tokens: int) -> str:
    if not ordered:
        return "nobody can be asked"
    first, waiting = ordered[0], ordered[0].target.inflight_tokens
    said = (
        f"{first.target.worker} has the least to do before this prompt is computed: "
        f"{_left(first, tokens)} tokens of it and {waiting} that are in flight there"
    )
    if len(ordered) == 1:
        return said + "; there is no other"
    second = ordered[1]
    name, cost = second.target.worker, _cost(second, tokens)
    if cost == _cost(first, tokens) and first.depth_tokens == second.depth_tokens:
        return said + f"; {name} has as much, and equals take turns"
    new = "" if second.share >= 1 else ", for it is new or just back and gets a smaller share"
    return said + f"; {name} counts {cost}{new}"


def _by_word(policy: str, ordered: Sequence[Candidate]) -> str:
    if not ordered:
        return "nobody can be asked"
    return f"{policy}: {WORDS.get(policy, 'as the policy orders them')}"

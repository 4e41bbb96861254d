"""Consistent hash: requests of one key go to one worker, as long as it is there.

Pure, member of policies/. Every worker gets a number from key and name, the largest wins
(rendezvous hashing): when a worker leaves, only its keys move, each to its own second choice. One
that is new, or back, takes its keys one after the other: each moves once. Open it to change how
keys stick.
"""

from __future__ import annotations

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from .base import Candidate, Need
from .least_loaded import least_loaded

MOST = 2**64


def consistent_hash(candidates: Sequence[Candidate], need: Need) -> list[Candidate]:
    """Largest number first; a request without a key goes to the least loaded."""
    if not need.key:
        return least_loaded(candidates, need)
    seed = xxh3_64_intdigest(need.key.encode("utf-8", "surrogatepass"))

    def number(candidate: Candidate) -> tuple[bool, int, str]:
        name = candidate.target.name
        return seed < candidate.share * MOST, xxh3_64_intdigest(name.encode(), seed=seed), name

    return sorted(candidates, key=number, reverse=True)

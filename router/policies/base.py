"""Policy seam: in which order are these workers tried?

Seam of pure functions: choice.py makes Candidates from the fleet and the ranking, a policy orders
them, pairing.py takes the first pair that fits. Open it to change what every policy is told.

Two rules hold for all of them. Equals take turns by when each was last taken (`target.turn`), not
by a count of requests: two models, or an attempt that fails and is repeated, cannot fall into step
with it. And a candidate with a `share` below 1 is new or back: it gets that part of the load it
would get otherwise, by weight where load is compared, else by being passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Protocol

import msgspec

from ..target import Target


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A target with what it holds of this prompt."""

    target: Target
    depth_blocks: int = 0  # unbroken from the start
    depth_tokens: int = 0
    share: float = 1.0  # of the load others have


def half() -> float:
    """Chance for those who need none: always the middle."""
    return 0.5


class Need(msgspec.Struct, frozen=True, gc=False):
    """What is asked for, and the chance a policy may use."""

    prompt_tokens: int = 0  # all prompts of the request together; 0 = not known
    key: str = ""  # requests of one key belong together: a routing key, a session, a user
    chance: Callable[[], float] = half  # uniform in [0, 1)
    shares: bool = True  # may anybody have less than a whole one? Else nobody looks


class Policy(Protocol):
    """Best first: a permutation of the candidates. Same input, same order; never raises."""

    def __call__(self, candidates: Sequence[Candidate], need: Need) -> list[Candidate]: ...


def in_turn(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Who waits longest comes first; by name where two never served."""
    return sorted(candidates, key=turn)


turn = attrgetter("target.turn", "target.name")  # orders equals
name = attrgetter("target.name")


def whole(candidates: Sequence[Candidate]) -> bool:
    """Has everybody a whole share? Nearly always."""
    for candidate in candidates:  # noqa: SIM110  # a generator costs more than all the rest
        if candidate.share < 1:
            return False
    return True


def passed_over(
    ordered: list[Candidate], chance: Callable[[], float], each: float = 1.0
) -> list[Candidate]:
    """The same with those at the end whose share says so this time; nobody where all have a whole
    one. `each`: how often one comes first by itself, where that is not by chance already."""
    if whole(ordered):
        return ordered
    named = sorted(ordered, key=name)
    late = {one.target.worker for one in named if one.share < 1 and chance() >= one.share * each}
    return sorted(ordered, key=lambda candidate: candidate.target.worker in late)

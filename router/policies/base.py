"""Policy seam: in which order are these workers tried?

Seam of pure functions: gateway.py makes Candidates from the fleet and the ranking, a policy orders
them, pairing.py takes the first pair that fits. Open it to change what every policy is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..target import Target


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target with what it holds of this prompt."""

    target: Target
    depth_blocks: int = 0  # unbroken from the start
    depth_tokens: int = 0


def half() -> float:
    """Chance for those who need none: always the middle."""
    return 0.5


@dataclass(frozen=True, slots=True)
class Need:
    """What is asked for, and the time and chance a policy may use."""

    prompt_tokens: int = 0  # all prompts of the request together; 0 = not known
    key: str = ""  # requests of one key belong together: a routing key, a session, a user
    turn: int = 0  # counts requests; the only memory round robin has
    chance: Callable[[], float] = half  # uniform in [0, 1)


class Policy(Protocol):
    """Best first: a permutation of the candidates. Same input, same order; never raises."""

    def __call__(self, candidates: Sequence[Candidate], need: Need) -> list[Candidate]: ...


def rotated(candidates: Sequence[Candidate], turn: int) -> list[Candidate]:
    """By name, beginning one further each turn. Where everything else is equal, load spreads."""
    named = sorted(candidates, key=lambda candidate: candidate.target.worker)
    start = turn % len(named) if named else 0
    return named[start:] + named[:start]

"""Sides: who may serve one model, and what follows from who they are.

Pure. fleet.py finds both sides and forgets them with every change; choice.py asks for each request.
Open it to keep one more thing that is the same for all requests while nobody comes or goes.

    prefills p1 p2   decodes d1 d2   ->   a Candidate of each, of whom nothing is known yet
    all fit all: the best of both meet   else pairing.py looks for those that do
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvplane.vocabulary import Namespace, Worker

from .pairing import Compatible, misfit
from .policies.base import Candidate
from .target import Target


class Spaces(msgspec.Struct, frozen=True):
    """In which namespace each prefill is asked for prompts without a name or salt of their own."""

    turn: int  # of the view that told the block sizes
    model: str
    adapter: str  # "" where the name that is asked for is no adapter's
    of: dict[Worker, Namespace]
    groups: tuple[tuple[Namespace, list[Worker]], ...]  # the same, each namespace once


@dataclass(slots=True, eq=False)
class Sides:
    """Prefills and decodes; or unified workers and nobody."""

    prefills: tuple[Target, ...]
    decodes: tuple[Target, ...] = ()
    firsts: Sequence[Candidate] = field(init=False)  # of the prefills
    seconds: Sequence[Candidate] = field(init=False)
    several: bool = field(init=False)  # is there anybody to choose between?
    spaces: Spaces | None = None  # depths.py's, as long as the view says the same
    fits: bool | None = None  # all fit all; None: nobody asked yet
    turn: int = -1  # of the view that the choices were made under
    choices: dict[Any, Any] = field(default_factory=dict)  # choice.py's, that requests share
    usual: dict[Any, Any] = field(default_factory=dict)  # of them: all could be taken, both meet

    def __post_init__(self) -> None:
        self.firsts = tuple(map(Candidate, self.prefills))
        self.seconds = tuple(map(Candidate, self.decodes))
        self.several = len(self.prefills) > 1 or len(self.decodes) > 1

    def __iter__(self) -> Iterator[tuple[Target, ...]]:
        return iter((self.prefills, self.decodes))

    def fit(self, compatible: Compatible) -> bool:
        """Does every prefill fit every decode? Looked at once: of each kind there is one is asked,
        and `compatible` is always the same."""
        if self.fits is None:
            ones, others = _kinds(self.firsts), _kinds(self.seconds)
            found = (misfit(one, other, compatible) for one in ones for other in others)
            self.fits = not any(found)
        return self.fits


def _kinds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """One of each that pairing can tell apart."""
    kinds = {(c.target.way, c.target.model, c.target.up.shape): c for c in candidates}
    return list(kinds.values())

"""Belief: how far may the index be believed of one worker, and what does it foretell?

Pure: asks the view and the checks it is given. choice.py asks it of whoever was chosen, depths.py
whose blocks count for nothing. Open it to change what is made of two that do not say the same.

    what ingest wrote    exact  partial  dark
    our own checks       -      partial  dark     the worse of both is told
"""

from __future__ import annotations

from collections.abc import Callable

from kvplane.index import View
from kvplane.vocabulary import Knowledge, Namespace, Worker

from .depths import Ranked
from .foretold import Foretold
from .plans import Prompt
from .target import Judged

Doubt = Callable[[Worker], Judged | None]
WORSE = list(Knowledge)  # worst last
ASSUMED_BLOCK = 256  # tokens, where nobody tells a block size; few engines have larger ones


class Belief:
    """What is asked of the index and held against it."""

    def __init__(
        self,
        view: View,
        blind: Callable[[], str],  # why the view itself cannot be believed now
        doubt: Doubt,  # our own checks of what the index says of a worker
    ) -> None:
        self._view, self._blind, self._doubt = view, blind, doubt

    def is_dark(self, worker: Worker) -> bool:
        """Does our own check say that its blocks cannot be relied on?"""
        doubt = self._doubt(worker)
        return doubt is not None and doubt[0] is Knowledge.DARK

    def of(self, worker: Worker) -> tuple[Judged, Judged | None]:
        """What ingest wrote, as long as the view can be believed; and what our checks say."""
        return self._told(worker), self._doubt(worker)

    def foretold(
        self, worker: Worker, ranked: Ranked, prompt: Prompt, told: Judged, doubt: Judged | None
    ) -> Foretold:
        """What is compared later. Samples of one prompt are counted by each engine its own way."""
        facts, space = self._view.facts(worker), ranked.spaces.get(worker)
        dark = doubt is not None and doubt[0] is Knowledge.DARK
        return Foretold(
            worker,
            facts.epoch if facts else None,
            facts.last if facts else None,
            told[0] is Knowledge.EXACT and not dark and worker in ranked.depths,
            space or Namespace(ranked.model, ASSUMED_BLOCK, ranked.adapter, prompt.salt),
            prompt.tokens or (),
            ranked.depths,
        )

    def _told(self, worker: Worker) -> Judged:
        if blind := self._blind():
            return Knowledge.DARK, blind
        known = self._view.known(worker)
        if known is None:
            return Knowledge.DARK, f"{worker} was never heard of"
        return known.state, "" if known.state is Knowledge.EXACT else known.reason


def worse(told: Judged, doubt: Judged | None) -> Judged:
    """Of what ingest wrote about a worker and our own checks of it."""
    if doubt is not None and WORSE.index(doubt[0]) >= WORSE.index(told[0]):
        return doubt  # of two that say as much, ours has seen it
    return told

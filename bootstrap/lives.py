"""Lives: is the instance behind an address still the one we knew?

Pure. One per known life in resolver.py. Open it to change what proves that an instance was
replaced.

    our own server tells its generation with every answer      another one: another life
    SGLang's tells none                                        another table: another life
    an answer whose question is older than what we know        late: of the life before, maybe
"""

from __future__ import annotations

from enum import Enum

from kvplane.vocabulary import Generation

from .topology import Topology

Rank = tuple[int, int, int, int]  # dp, cp, tp, pp
Where = tuple[str, int]  # host, port


class Verdict(Enum):
    """What an answer says of the life that gave it."""

    SAME = "same"  # or the first we hear
    NEW = "new"
    LATE = "late"  # differs, but was asked for before what we know now


class Life:
    """What was heard of one life; a NEW verdict ends it."""

    def __init__(self) -> None:
        self.heard = False
        self.generation: Generation | None = None
        self._at = 0.0  # when the newest question was sent that was answered
        self._topology: Topology | None = None
        self._ranks: dict[Rank, Where] = {}

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """Whose places were told."""
        return tuple(self._ranks)

    def answer(self, generation: Generation | None, sent_at: float) -> Verdict:
        """An answer that tells no table."""
        return self._judge(generation, sent_at, True)

    def topology(self, found: Topology, generation: Generation | None, sent_at: float) -> Verdict:
        """An answer that tells what the instance looks like."""
        same = generation is not None or self._topology in (None, found)
        verdict = self._judge(generation, sent_at, same)
        if verdict is Verdict.SAME:
            self._topology = found
        return verdict

    def rank(
        self, rank: Rank, where: Where, generation: Generation | None, sent_at: float
    ) -> Verdict:
        """An answer that tells where one rank is."""
        same = generation is not None or self._ranks.get(rank, where) == where
        verdict = self._judge(generation, sent_at, same)
        if verdict is Verdict.SAME:
            self._ranks[rank] = where
        return verdict

    def lost(self, sent_at: float) -> bool:
        """An answer that ranks are missing: none were, so this is another life."""
        return self._topology is not None and sent_at >= self._at

    def _judge(self, generation: Generation | None, sent_at: float, same: bool) -> Verdict:
        if self.heard and not (same and generation == self.generation):
            return Verdict.LATE if sent_at < self._at else Verdict.NEW
        self.heard, self.generation = True, generation
        self._at = max(self._at, sent_at)
        return Verdict.SAME

"""Walks: how long attempts were in each of the gateway's own stages, as a histogram.

Edge: hears from the ledger of every attempt that is over, and counts many at once: when many
requests were answered, and before a scrape. Open it to change how stages are counted. Nothing is
lost: whoever waits here is counted at the next scrape.

    begun    1.0  1.1  1.1  1.4   ended 1.9        one row of each walk and outcome
             1.5  1.6  1.6  1.8         2.4        a column less the one before: seconds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter, sub

from kvplane.tallies import Spreads
from kvplane.vocabulary import Stage

from .meeting import ENDS, Meeting

MOST_KINDS = 1000  # of walks that are kept once for all; most gateways see four

STAGES, TIMES = slice(0, None, 2), slice(1, None, 2)  # of a trail's steps
BEGUN, ENDED = attrgetter("steps"), attrgetter("ended")  # of one that is over

Kind = tuple[tuple[Stage, ...], str]  # a walk, and how the attempt ended


class Walks:
    """Attempts that are over, on their way into a histogram of stage and outcome."""

    def __init__(self, spreads: Spreads, requests: Spreads) -> None:
        """`requests`: what is observed of each of them; how often attempts are counted."""
        self._spreads = spreads
        self._waiting: list[Meeting] = []
        self._known: dict[tuple[Stage, ...], tuple[Stage, ...]] = {}
        self.ended: Callable[[Meeting], None] = self._waiting.append  # it is over
        spreads.on_show.append(self.fold)
        requests.on_many.append(self.fold)

    def fold(self) -> None:
        """Count those that wait; of 256 in half a millisecond, in which nobody is served."""
        waiting, known = self._waiting[:], self._known
        rows: dict[Kind, list[Meeting]] = defaultdict(list)
        del self._waiting[: len(waiting)]
        if len(known) > MOST_KINDS:
            known.clear()
        for meeting in waiting:
            steps = tuple(meeting.steps)
            walk = steps[STAGES]
            meeting.walk, meeting.steps = known.setdefault(walk, walk), steps[TIMES]
            rows[walk, meeting.outcome].append(meeting)
        for (walk, outcome), each in rows.items():
            self._count(walk, ENDS.get(outcome, "failed"), each)

    def _count(self, walk: Sequence[Stage], outcome: str, each: list[Meeting]) -> None:
        columns = [*zip(*map(BEGUN, each), strict=True), [*map(ENDED, each)]]
        for at, stage in enumerate(walk):
            ended = outcome if at == len(walk) - 1 else "ok"
            self._spreads.of[stage, ended].observe_all(map(sub, columns[at + 1], columns[at]))

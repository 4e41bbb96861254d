"""Walks: how long attempts were in each of the gateway's own stages, as a histogram.

Edge: hears from the ledger of every attempt that is over, and counts many at once; before a scrape
those that wait. Open it to change when or how stages are counted. Nothing is lost: whoever waits
here is counted at the next scrape.

    begun    1.0  1.1  1.1  1.4   ended 1.9        one row of each walk and outcome
             1.5  1.6  1.6  1.8         2.4        a column less the one before: seconds
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter, sub

from kvplane.tallies import Spreads
from kvplane.vocabulary import Stage

from .meeting import ENDS, Meeting

MOST_WAITING = 256  # attempts; to count them is half a millisecond in which nobody is served
MOST_KINDS = 1000  # of walks that are kept once for all; most gateways see four

STAGES, TIMES = slice(0, None, 2), slice(1, None, 2)  # of a trail's steps
BEGUN, ENDED = attrgetter("steps"), attrgetter("ended")  # of one that is over

Kind = tuple[tuple[Stage, ...], str]  # a walk, and how the attempt ended


class Walks:
    """Attempts that are over, on their way into a histogram of stage and outcome."""

    def __init__(self, spreads: Spreads) -> None:
        self._spreads = spreads
        self._waiting: list[Meeting] = []
        self._known: dict[tuple[Stage, ...], tuple[Stage, ...]] = {}
        spreads.on_show.append(self.fold)

    def ended(self, meeting: Meeting) -> None:
        """It is over."""
        self._waiting.append(meeting)
        if len(self._waiting) >= MOST_WAITING:
            self.fold()

    def fold(self) -> None:
        """Count those that wait."""
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

"""Sequence: did we miss anything a worker said?

Pure: no clock, no sockets, no logging. Sits below events/subscriber.py, which acts on verdicts.
Open it to change what counts as a gap, a repeat or a restart; nothing else decides that.

    last was 7:   8 -> IN_ORDER    7 -> REPEAT    11 -> Gap(8, 10)    0 -> SUSPECT
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Seen(Enum):
    """What a live batch number tells when nothing is missing."""

    IN_ORDER = "in order"
    REPEAT = "repeat"
    SUSPECT = "suspect"  # from the past: late, sent again, or a new life; the edge asks replay


@dataclass(frozen=True, slots=True)
class Gap:
    """First and last missing batch, both included."""

    first: int
    last: int


def judge(last: int | None, sequence: int) -> Seen | Gap:
    """Compare a live batch with the last one applied; `None` before the first of a life.

    A first batch that is not 0 is a gap: the worker spoke before we listened. A number alone
    never proves a restart. Source: publishers count from 0 in each life.
    """
    expected = 0 if last is None else last + 1
    if sequence > expected:
        return Gap(expected, sequence - 1)
    if sequence == expected:
        return Seen.IN_ORDER
    return Seen.REPEAT if sequence == last else Seen.SUSPECT


class Life(Enum):
    """What the replay answer to "from the last batch I applied" tells about the publisher."""

    SAME = "same"
    NEW = "new"
    BEYOND = "beyond"  # the buffer no longer holds our last batch: the publisher went on past it


def same_life(last: int, matches: bool | None, first_replayed: int | None) -> Life:
    """Is the publisher still the one whose batch `last` we applied?

    Asked: a replay from `last`. A living publisher still holds its newest batch, so an answer
    without any batch means its counter is below ours: a new life. `matches` says whether the
    replayed batch `last` is the one we applied; None where the first replayed is another. BEYOND
    proves no life, and need not: there is a gap, and what we had is cleared. An answer that begins
    right behind our last batch has none, so it is taken for a new life.

        answer []        -> NEW       answer [7 equal, 8] -> SAME
        answer [7 other] -> NEW       answer [50, 51]     -> BEYOND      answer [8] -> NEW
    """
    if first_replayed is not None and first_replayed > last + 1:
        return Life.BEYOND
    return Life.SAME if matches and first_replayed == last else Life.NEW

"""States: what SGLang makes of the messages about one room.

Pure. Facts a peer must respect: numbers of states, of ranks, when a room may start, and when the
metadata row proves that the right room has arrived. Open it when SGLang counts otherwise.
Source: SGLang 0.5.23.

    one rank:    a state only grows; FAILED is final although it is the lowest
    all ranks:   the lowest counts, so one FAILED fails the room
    a room may start when as many sessions as dst_info_num says told where its pages go
    metadata row of room 71:   0 -> NOT_LANDED    71 -> OURS    72 -> FOREIGN
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, IntEnum


class Poll(IntEnum):
    """As said in a status message."""

    FAILED = 0
    BOOTSTRAPPING = 1
    WAITING_FOR_INPUT = 2
    TRANSFERRING = 3
    SUCCESS = 4


class Row(Enum):
    """What the room in a metadata row says."""

    NOT_LANDED = "not landed"  # a freed row is zeroed: shown as transferring, 500 at commit
    OURS = "ours"
    FOREIGN = "foreign"  # of another room: the request ends with 500, context corruption


def judge_row(row_room: int, room: int) -> Row:
    """Compare the room in a row with ours. Room 0 never passes: it cannot be told from no row."""
    if row_room == 0:
        return Row.NOT_LANDED
    return Row.OURS if row_room == room else Row.FOREIGN


def later(old: Poll | None, said: Poll) -> Poll | None:
    """State of one rank after a message; None stays None unless the message may open a room."""
    if old is None:
        return said if said in (Poll.BOOTSTRAPPING, Poll.WAITING_FOR_INPUT) else None
    if Poll.FAILED in (old, said):
        return Poll.FAILED
    return max(old, said)


def of_room(states: Collection[Poll]) -> Poll:
    """State of a room from those of its ranks; one at least."""
    return min(states)


def rank_number(tp: int, pp: int, cp: int, pp_size: int, cp_size: int) -> int:
    """How a prefill rank signs its messages; distinct ones are counted.

    tp 2, pp 1 of 2, cp 0 of 1 -> 5
    """
    return tp * (pp_size * cp_size) + pp * cp_size + cp

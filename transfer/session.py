"""Session: in which state is one room, and what may happen next?

Pure: one table, both sides. Used by offer.py (prefill) and pull.py (decode). Open it to change
the life of a room.

    Bootstrapping --bound--> WaitingForInput --first page--> Transferring --agreed--> Success
          \\___________________________|_________________________/
                                    failed  -> Failed          Success and Failed are final
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where one room stands."""

    BOOTSTRAPPING = "Bootstrapping"  # ranks not resolved, or the other side not there
    WAITING = "WaitingForInput"  # both sides met and agreed; nothing moved
    TRANSFERRING = "Transferring"
    SUCCESS = "Success"
    FAILED = "Failed"


class Happened(StrEnum):
    """What moves a room on."""

    BOUND = "bound"  # offers agree, the room is bound at all shards
    FIRST_PAGE = "first page"  # posted (prefill) or first byte seen (decode)
    AGREED = "agreed"  # prefill: good verdict; decode: all shards committed and verified
    FAILED = "failed"  # deadline, peer gone, refused, abort, mismatch


NEXT: dict[tuple[State, Happened], State] = {
    (State.BOOTSTRAPPING, Happened.BOUND): State.WAITING,
    (State.BOOTSTRAPPING, Happened.FAILED): State.FAILED,
    (State.WAITING, Happened.FIRST_PAGE): State.TRANSFERRING,
    (State.WAITING, Happened.AGREED): State.SUCCESS,  # one-sided: moved between two polls
    (State.WAITING, Happened.FAILED): State.FAILED,
    (State.TRANSFERRING, Happened.FIRST_PAGE): State.TRANSFERRING,  # of a later chunk
    (State.TRANSFERRING, Happened.AGREED): State.SUCCESS,
    (State.TRANSFERRING, Happened.FAILED): State.FAILED,
}
FINAL = frozenset({State.SUCCESS, State.FAILED})


def step(state: State, happened: Happened) -> State:
    """The state after; a final state stays, anything else outside the table is our own bug."""
    if state in FINAL and happened is Happened.FAILED:
        return state  # a late failure of a room that is over changes nothing
    after = NEXT.get((state, happened))
    assert after is not None, f"room in {state}: {happened!r} cannot happen"
    return after

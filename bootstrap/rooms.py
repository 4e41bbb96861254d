"""Rooms: numbers of meetings, and which dp rank a room went to.

Pure. mint is used by router/, RoomTable by api.py. Open it to change how a room is numbered or how
long a directory remembers one.

    mint(..., dp_rank=3, dp_size=4)   ->   a number from 1 to 2**63-1 that is 3 modulo 4
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sortedcontainers import SortedList

from kvplane.vocabulary import MAX_ROOM, Room

SWEEP = 256  # expired rooms dropped per registration: more than come in, and never a long pause

Told = tuple[float, int, int]  # deadline, room, dp rank; one object in both tables


def mint(random63: Callable[[], int], dp_rank: int = 0, dp_size: int = 1) -> Room:
    """A fresh room that engines which follow rooms send to `dp_rank`; never 0, below 2**63.

    `random63` gives 0 .. 2**63-1. Raises ValueError for a rank outside its size.
    """
    if dp_size == 1 and dp_rank == 0:  # nearly all: each request mints one
        return random63() or 1  # type: ignore[return-value]  # Room() is a call of its own
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank {dp_rank}: must be 0 to {dp_size - 1}")
    drawn = random63()
    room = drawn - drawn % dp_size + dp_rank
    if room > MAX_ROOM:
        room -= dp_size
    return Room(room if room > 0 else room + dp_size)


class RoomTable:
    """Room -> dp rank for `ttl_s` seconds after it was told last, at most `most` rooms."""

    def __init__(self, ttl_s: float = 240.0, most: int = 300_000) -> None:
        self._ttl_s, self._most = ttl_s, most
        self._rooms: dict[int, Told] = {}
        self._deadlines = SortedList()  # of the same Tolds, the next to go first
        self.expired = 0  # rooms whose time was over
        self.forgotten = 0  # rooms whose meeting was over
        self.pushed_out = 0  # rooms that went before their time because the table was full

    def __len__(self) -> int:
        return len(self._rooms)

    def register(self, room: int, dp_rank: int, now: float) -> None:
        """Remember it, anew if it was known. Negative numbers pass, as they do in SGLang."""
        self._drop(room)
        told = (now + self._ttl_s, room, dp_rank)
        self._rooms[room] = told
        self._deadlines.add(told)
        self.expire(now, SWEEP)
        if len(self._rooms) > self._most:
            del self._rooms[self._deadlines.pop(0)[1]]
            self.pushed_out += 1

    def query(self, rooms: Iterable[int], now: float) -> dict[int, int]:
        """The ranks of those known, in the order asked; asking does not make one live longer."""
        found = {}
        for room in rooms:
            told = self._rooms.get(room)
            if told is not None and now < told[0]:
                found[room] = told[2]
        return found

    def forget(self, room: int) -> bool:
        """Its meeting is over; whether it was known."""
        known = self._drop(room)
        self.forgotten += known
        return known

    def expire(self, now: float, most: int | None = None) -> int:
        """Drop rooms past their deadline, oldest first, at most `most`; how many went."""
        gone = 0
        while self._deadlines and (most is None or gone < most) and self._deadlines[0][0] <= now:
            del self._rooms[self._deadlines.pop(0)[1]]
            gone += 1
        if not self._rooms:
            self._rooms.clear()  # gives back the memory of the emptied table
        self.expired += gone
        return gone

    def _drop(self, room: int) -> bool:
        told = self._rooms.pop(room, None)
        if told is not None:
            self._deadlines.remove(told)
        return told is not None

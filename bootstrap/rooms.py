"""Rooms: numbers of meetings, and which dp rank a room went to.

Pure. mint is used by router/, RoomTable by api.py. Open it to change how a room is numbered or how
long a directory remembers one.

    mint(..., dp_rank=3, dp_size=4)   ->   a number from 1 to 2**63-1 that is 3 modulo 4
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvplane.vocabulary import MAX_ROOM, Room

SWEEP = 256  # expired rooms dropped per registration: more than come in, and never a long pause


def mint(random63: Callable[[], int], dp_rank: int = 0, dp_size: int = 1) -> Room:
    """A fresh room that engines which follow rooms send to `dp_rank`; never 0, below 2**63.

    `random63` gives 0 .. 2**63-1. Raises ValueError for a rank outside its size.
    """
    if not 0 <= dp_rank < dp_size:
        raise ValueError(f"dp_rank {dp_rank}: must be 0 to {dp_size - 1}")
    drawn = random63()
    room = drawn - drawn % dp_size + dp_rank
    if room > MAX_ROOM:
        room -= dp_size
    return Room(room if room > 0 else room + dp_size)


class RoomTable:
    """Room -> dp rank for `ttl_s` seconds after it was told last, at most `most` rooms.

    Every room lives equally long, so the order of telling is the order of deadlines.
    """

    def __init__(self, ttl_s: float = 240.0, most: int = 300_000) -> None:
        self._ttl_s, self._most = ttl_s, most
        self._rooms: OrderedDict[int, tuple[int, float]] = OrderedDict()  # room -> rank, deadline
        self.pushed_out = 0  # rooms that went before their time because the table was full

    def __len__(self) -> int:
        return len(self._rooms)

    def register(self, room: int, dp_rank: int, now: float) -> None:
        """Remember it, anew if it was known. Negative numbers pass, as they do in SGLang."""
        self._rooms[room] = (dp_rank, now + self._ttl_s)
        self._rooms.move_to_end(room)
        self.expire(now, SWEEP)
        if len(self._rooms) > self._most:
            self._rooms.popitem(last=False)
            self.pushed_out += 1

    def query(self, rooms: Iterable[int], now: float) -> dict[int, int]:
        """The ranks of those known, in the order asked; asking does not make one live longer."""
        found = {}
        for room in rooms:
            entry = self._rooms.get(room)
            if entry is not None and now < entry[1]:
                found[room] = entry[0]
        return found

    def forget(self, room: int) -> None:
        """Its meeting is over."""
        self._rooms.pop(room, None)

    def expire(self, now: float, most: int | None = None) -> int:
        """Drop rooms past their deadline, oldest first, at most `most`; how many went."""
        gone = 0
        while self._rooms and (most is None or gone < most):
            oldest = next(iter(self._rooms))
            if now < self._rooms[oldest][1]:
                break
            del self._rooms[oldest]
            gone += 1
        return gone

"""Gathering: all decode ranks of one room on the side of one prefill rank.

Edge (futures). Used by offer.py; meeting.py is one decode rank of it. How many come is told by the
first that binds. Open it to change when a room is full, or how long it is kept for those who queue.

    bind 0 of 2 ... bind 1 of 2 -> full      hold: somebody will come, the lease begins anew
    any of them lost -> the room is lost for all
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

from kvplane.vocabulary import Room

from .control import Channel
from .errors import LeaseExpired, PrefillFailed, Refused, TransferError
from .frames import BindFrame
from .meeting import Meeting
from .session import State


class Gathering:
    """`lost` gets an exception as soon as this room cannot succeed."""

    def __init__(self, room: Room) -> None:
        loop = asyncio.get_running_loop()
        self.room = room
        self.shards: int | None = None  # decode ranks that will come
        self.meetings: dict[int, Meeting] = {}
        self.claimed = False  # deliver() has it
        self.lost: asyncio.Future[None] = loop.create_future()
        self._full: asyncio.Future[None] = loop.create_future()
        self._lease: asyncio.Timeout | None = None
        self._lease_s = 0.0

    @property
    def peer(self) -> str:
        """The decode, for sentences."""
        return next((meeting.peer for meeting in self.meetings.values()), self._nobody)

    @property
    def pages(self) -> int:
        """Page numbers kept for it."""
        return sum(len(meeting.bind.pages) for meeting in self.meetings.values())

    @property
    def other_bytes(self) -> int:
        """What else is kept for it."""
        return sum(meeting.bind.other_bytes for meeting in self.meetings.values())

    @property
    def _nobody(self) -> str:
        return f"decode of room {self.room}"

    @property
    def state(self) -> State:
        """Of the rank that is least far."""
        states = [meeting.state for meeting in self.meetings.values()]
        order = list(State)
        return min(states, key=order.index) if states else State.BOOTSTRAPPING

    def fault(self, bind: BindFrame) -> str | None:
        """Why this rank cannot come in; None = it can."""
        if bind.shard in self.meetings:
            return f"room {self.room} is bound already"
        if self.shards not in (None, bind.shards):
            return f"shards: {bind.shards}, others of room {self.room} said {self.shards}"
        return None

    def bind(self, channel: Channel, frame: BindFrame) -> Meeting:
        """A decode rank is there and fits."""
        self.shards = frame.shards
        meeting = self.meetings[frame.shard] = Meeting(channel, frame, self.lose, self.claimed)
        if len(self.meetings) == self.shards:
            self._full.set_result(None)
        return meeting

    def claim(self) -> None:
        """deliver() takes over; its deadline counts from here."""
        self.claimed = True
        for meeting in self.meetings.values():
            meeting.claim()

    def renew(self) -> None:
        """Somebody has this room in its queue: the lease begins anew."""
        if self._lease is not None:
            with suppress(RuntimeError):  # it has just run out, or nobody waits any more
                self._lease.reschedule(asyncio.get_running_loop().time() + self._lease_s)

    async def full(self, lease_s: float) -> None:
        """Until every decode rank is bound; LeaseExpired so long after the last renewal."""
        try:
            async with asyncio.timeout(lease_s) as self._lease:
                self._lease_s = lease_s
                await asyncio.shield(self._full)
        except TimeoutError as error:
            raise LeaseExpired(self.missing(), self.room, lease_s) from error

    def missing(self) -> str:
        """Who has not come, for sentences."""
        if self.shards is None or len(self.meetings) == self.shards:
            return self._nobody
        late = [str(shard) for shard in range(self.shards) if shard not in self.meetings]
        some = ", ".join(late[:8]) + (", ..." if len(late) > 8 else "")
        return f"{self._nobody}, rank {some} of {self.shards}"

    def lose(self, error: TransferError) -> None:
        """It cannot succeed any more; the first reason counts."""
        if not self.lost.done():
            self.lost.set_exception(error)
            self.lost.exception()  # whoever waits will see it; nobody must

    def end(self, error: BaseException | None) -> None:
        """Final: tell every bound decode rank why, and let its connection go."""
        if not self._full.done():
            self._full.cancel()
        for meeting in self.meetings.values():
            meeting.end(error)


class Ended:
    """Rooms that are over, so that who comes late is told at once. Bounded in number and time."""

    def __init__(self, most: int, keep_s: float) -> None:
        self._most, self._keep_s = most, keep_s
        self._rooms: OrderedDict[Room, tuple[float, TransferError | None]] = OrderedDict()

    def add(self, room: Room, error: TransferError | None, now: float) -> None:
        """None = delivered. The first end counts."""
        self._rooms.setdefault(room, (now, error))
        while len(self._rooms) > self._most:
            self._rooms.popitem(last=False)

    def find(self, room: Room, now: float) -> TransferError | None:
        """Why nobody can meet in this room any more; None = not known to be over."""
        while self._rooms:
            at, _ = next(iter(self._rooms.values()))
            if now - at < self._keep_s:
                break
            self._rooms.popitem(last=False)
        if room not in self._rooms:
            return None
        _, error = self._rooms[room]
        return error or Refused("prefill", f"room {room} was delivered already")

    def __len__(self) -> int:
        return len(self._rooms)


def given_up(room: Room, reason: str) -> PrefillFailed:
    """The engine said so."""
    return PrefillFailed("itself", room, reason)

"""Meeting: one room on the prefill side, from whoever comes first to its end.

Edge (futures), used by offer.py and delivery.py. Open it to change what is remembered of a room.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import suppress

from kvplane.vocabulary import Room, Stage

from .control import Channel
from .errors import DeadlineExceeded, PeerGone, PrefillFailed, Refused, TransferError
from .frames import (
    MOST_REASON,
    AbortFrame,
    BadFrame,
    BindFrame,
    CommitFrame,
    FailedFrame,
    VerdictFrame,
)
from .session import FINAL, Happened, State, step


class Meeting:
    """Who waits for whom. `lost` gets an exception as soon as this room cannot succeed."""

    def __init__(self, room: Room) -> None:
        loop = asyncio.get_running_loop()
        self.room = room
        self.state = State.BOOTSTRAPPING
        self.claimed = False  # deliver() has it
        self.committed = False  # the decode was asked for its verdict
        self.bound: asyncio.Future[BindFrame] = loop.create_future()
        self.verdict: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self._channel: Channel | None = None
        self._limit: asyncio.Timeout | None = None

    @property
    def peer(self) -> str:
        """The decode, for sentences."""
        return self._channel.peer if self._channel else f"decode of room {self.room}"

    def moved(self, happened: Happened) -> None:
        """Advance by the table."""
        self.state = step(self.state, happened)

    def lose(self, error: TransferError) -> None:
        """It cannot succeed any more; the first reason counts."""
        if not self.lost.done():
            self.lost.set_exception(error)
            self.lost.exception()  # whoever waits will see it; nobody must

    def bind(self, channel: Channel, frame: BindFrame) -> None:
        """The decode is there and fits."""
        self._channel = channel
        self.moved(Happened.BOUND)
        self.bound.set_result(frame)

    def claim(self) -> None:
        """deliver() takes over; its deadline counts from here."""
        self.claimed = True
        if self._limit is not None:
            with suppress(RuntimeError):  # it is just running out: `lost` will tell
                self._limit.reschedule(None)

    async def commit(self, pages: int) -> None:
        """Tell the decode that everything is applied, and wait for what it says."""
        assert self._channel is not None
        self.committed = True
        self._channel.post(CommitFrame(pages=pages))
        await self._channel.drain()
        await self.verdict

    def reset(self) -> None:
        """Cut the control connection without a word."""
        if self._channel is not None:
            self._channel.reset()

    def end(self, error: BaseException | None) -> None:
        """Final: tell a bound decode why, and let its connection go."""
        if self.state not in FINAL:
            self.moved(Happened.AGREED if error is None else Happened.FAILED)
        if self._channel is not None:
            reason = str(error) or type(error).__name__
            last = None if error is None else FailedFrame(reason=reason[:MOST_REASON])
            self._channel.finish(last)

    async def listen(self, channel: Channel, bootstrapping_s: float) -> None:
        """Read what the decode says until it is over; never raises but for cancel."""
        try:
            async with asyncio.timeout(None if self.claimed else bootstrapping_s) as self._limit:
                while not self.verdict.done():
                    self._hear(await channel.read())
        except TimeoutError:
            self.lose(DeadlineExceeded("prefill", "the prompt's KV", bootstrapping_s))
        except BadFrame as error:
            self.lose(Refused(channel.peer, str(error), Stage.VERIFY))
        except TransferError as error:
            self.lose(error)

    def _hear(self, frame: object) -> None:
        if isinstance(frame, VerdictFrame) and frame.ok and self.committed:
            self.verdict.set_result(None)
        elif isinstance(frame, VerdictFrame) and frame.ok:
            raise BadFrame("a good verdict before the commit")
        elif isinstance(frame, VerdictFrame):
            raise Refused(self.peer, f"verify: {frame.reason}", Stage.VERIFY)
        elif isinstance(frame, AbortFrame):
            raise PeerGone(self.peer, f"aborted: {frame.reason}")
        else:
            raise BadFrame(f"{type(frame).__name__} from a decode")


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

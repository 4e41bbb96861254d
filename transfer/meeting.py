"""Meeting: one room with one decode rank, on the prefill side, from its bind to its end.

Edge (futures), used by gathering.py, offer.py and delivery.py. Open it to change what is heard from
a decode, or what it is told at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvplane.vocabulary import Stage

from .control import Channel
from .errors import DeadlineExceeded, PeerGone, Refused, TransferError
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
    """Who waits for whom. `lose` is the room's: it ends all decode ranks of it together."""

    def __init__(
        self,
        channel: Channel,
        bind: BindFrame,
        lose: Callable[[TransferError], None],
        claimed: bool,
    ) -> None:
        self.bind = bind
        self.state = step(State.BOOTSTRAPPING, Happened.BOUND)
        self.committed = False  # the decode was asked for its verdict
        self.clean = True  # every write begun for it is confirmed
        self.ended = asyncio.Event()  # its last word is said
        self._verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel, self._lose, self._claimed = channel, lose, claimed
        self._limit: asyncio.Timeout | None = None

    @property
    def peer(self) -> str:
        """The decode rank, for sentences."""
        shards = self.bind.shards
        return self._channel.peer + (f" (rank {self.bind.shard} of {shards})" if shards > 1 else "")

    def moved(self, happened: Happened) -> None:
        """Advance by the table."""
        self.state = step(self.state, happened)

    def claim(self) -> None:
        """deliver() takes over; its deadline counts from here."""
        self._claimed = True
        if self._limit is not None:
            with suppress(RuntimeError):  # it is just running out: `lost` will tell
                self._limit.reschedule(None)

    async def commit(self, pages: int) -> None:
        """Tell the decode that everything is applied, and wait for what it says."""
        self.committed = True
        self._channel.post(CommitFrame(pages=pages))
        await self._channel.drain()
        await asyncio.shield(self._verdict)  # a verdict may still come when we are cancelled

    def reset(self) -> None:
        """Cut the control connection without a word."""
        self._channel.reset()

    def end(self, error: BaseException | None) -> None:
        """Final: tell the decode why, and let its connection go."""
        if self.state not in FINAL:
            self.moved(Happened.AGREED if error is None else Happened.FAILED)
        reason = (str(error) or type(error).__name__)[:MOST_REASON]
        last = None if error is None else FailedFrame(reason=reason, clean=self.clean)
        self._channel.finish(last)
        self.ended.set()

    async def listen(self, bootstrapping_s: float) -> None:
        """Read what the decode says until it is over; never raises but for cancel."""
        try:
            async with asyncio.timeout(None if self._claimed else bootstrapping_s) as self._limit:
                while not self._verdict.done():
                    self._hear(await self._channel.read())
        except TimeoutError:
            self._lose(DeadlineExceeded("prefill", "the prompt's KV", bootstrapping_s))
        except BadFrame as error:
            self._lose(Refused(self.peer, str(error), Stage.VERIFY))
        except TransferError as error:
            self._lose(error)

    def _hear(self, frame: object) -> None:
        if isinstance(frame, VerdictFrame) and frame.ok and self.committed:
            self._verdict.set_result(None)
        elif isinstance(frame, VerdictFrame) and frame.ok:
            raise BadFrame("a good verdict before the commit")
        elif isinstance(frame, VerdictFrame):
            raise Refused(self.peer, f"verify: {frame.reason}", Stage.VERIFY)
        elif isinstance(frame, AbortFrame):
            raise PeerGone(self.peer, f"aborted: {frame.reason}")
        else:
            raise BadFrame(f"{type(frame).__name__} from a decode")

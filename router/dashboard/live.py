"""Live: the picture as server-sent events, for as many pages as are open.

Door: an endless answer, and the one picture that all of its readers share. Nothing is queued: a
slow reader gets the newest picture when it takes one. Open it to change how often pages are told.

    page 1 --\\
    page 2 ----> Board: at most one picture a beat, none where nobody watches
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvplane.runtime import Clock

from ..errors import GatewayError

BEAT_S = 0.5  # a person sees a change at once, and a picture of a hundred workers costs 3 ms
MOST_PAGES = 64  # open at once; each costs a connection and what it is sent
KIND = "text/event-stream"
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class Board:
    """The newest picture, made when somebody asks and the last one is a beat old. A Part: stop()
    ends all pages, which would hold up the end of the process else."""

    def __init__(self, make: Callable[[], dict[str, Any]], clock: Clock) -> None:
        self._make, self._clock = make, clock
        self._at, self._shown = float("-inf"), b""
        self._ended = asyncio.Event()
        self.pages = 0

    async def start(self) -> None:
        """Nothing to prepare."""

    async def stop(self) -> None:
        """No page is told anything more."""
        self._ended.set()

    async def beat(self) -> bool:
        """Wait for the time of the next picture; False where there is none."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), BEAT_S)
        return not self._ended.is_set()

    def shown(self) -> bytes:
        """The event, as it is sent."""
        now = self._clock.now()
        if now - self._at >= BEAT_S * 0.9:
            self._at = now
            self._shown = b"event: picture\ndata: %b\n\n" % msgspec.json.encode(self._make())
        return self._shown

    def join(self) -> None:
        """One more page. Raises GatewayError where there are too many."""
        if self.pages >= MOST_PAGES:
            raise GatewayError(
                "overloaded", f"{MOST_PAGES} pages are open already", retry_after="5"
            )
        self.pages += 1

    def leave(self) -> None:
        """It was closed."""
        self.pages -= 1


class Live(StreamingResponse):
    """The answer to one page. Takes a place when made and gives it back on every path."""

    def __init__(self, board: Board) -> None:
        board.join()
        self._board = board
        super().__init__(self._events(), media_type=KIND, headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the page goes."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._board.leave()

    async def _events(self) -> AsyncIterator[bytes]:
        yield self._board.shown()
        while await self._board.beat():
            yield self._board.shown()

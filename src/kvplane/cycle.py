"""Cycle: one request of a connection and its answer.

Edge. connections.py makes one per request and tells it what comes. An ASGI app has its `receive`
and `send`, and in `scope["extensions"]["kvplane.cycle"]` the cycle itself, which answers without
messages, copies or waiting where nothing is to be waited for (reply.py); a direct route (doors.py)
has nothing but it. Open it to change how a body is handed over or who hears that a client left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from kvplane.framing import CLOSE, Lines
from kvplane.reply import Line, Reply

log = logging.getLogger(__name__)

EXTENSION = "kvplane.cycle"
KEPT = 64  # bytes of memory that a part of a body costs beside its own: it may have but one
BODY_S = 120.0  # between two parts of a body that is waited for; apps may be stricter
FAULTS = {500: b"Internal Server Error", 503: b"Service Unavailable"}  # an app broke; we end


Rest = Coroutine[Any, Any, None]


class Cycle(Reply):
    """From the end of a request's head to the end of its answer."""

    __slots__ = ("_news", "headers", "url")

    def __init__(self, line: Line, method: bytes, url: bytes, version: str, headers: Lines) -> None:
        super().__init__(line, method, version)
        self.url, self.headers, self._news = url, headers, False  # names in small letters

    def begin(self, answer: Direct) -> Rest | None:
        """Have it answered. What is to be waited for is a task's; over() hears of its end."""
        try:
            if (rest := answer(self)) is None:
                self._ended()
            return rest
        except Exception:
            log.exception("an app failed")
            self._failed(500)
            return None

    def over(self, task: asyncio.Task[None]) -> None:
        """Nobody answers any more; what is left undone is undone here."""
        self._line.tasks.discard(task)
        if task.cancelled():
            self._failed(503)
        elif (error := task.exception()) is not None:
            log.error("an app failed", exc_info=error)
            self._failed(500)
        elif not self.response_complete:
            self._ended()

    def _ended(self) -> None:
        """Nobody says any more."""
        if not self.response_complete:
            if not self.disconnected:
                log.error("an app returned without a whole answer")
            self._failed(500)

    def _failed(self, fault: int) -> None:
        said, writer = FAULTS[fault], self._line.writer
        shown = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(said))]
        if not (self.response_started or self.disconnected or writer.is_closing()):
            # Though the client may not drain: it is short.
            writer.write(self._begin(fault, [*shown, CLOSE]) + self._framed(said, more=False))
            self._complete()
        if not self.response_complete:
            writer.close()

    # -- what the connection tells

    def came(self, data: bytes) -> None:
        """A part of the body."""
        self._parts.append(data)
        self.size += len(data) + KEPT
        self._news = True
        if self._waiter is not None:
            self._wake()

    def came_whole(self, data: bytes) -> None:
        """All of the body, before anybody waits for it."""
        self._parts, self.size = [data], len(data) + KEPT
        self.more_body, self._news = False, True

    def ended(self) -> None:
        """The body is whole."""
        self.more_body, self._news = False, True
        if self._waiter is not None:
            self._wake()

    def last(self) -> None:
        """No request follows this one."""
        self.keep_alive = False
        if self.response_complete:
            self._line.writer.close()

    def lost(self) -> None:
        """The client left; the app hears of it once, where its answer is not over."""
        if not self.response_complete:
            self.disconnected, self._open = True, False
        leave, self._leave = self._leave, None
        self._wake()
        if leave is not None:
            leave()

    def _wake(self) -> None:
        self._news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what the app asks

    def take(self) -> bytes:
        """What came of the body since the last time."""
        parts, self._parts, self.size = self._parts, [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def on_leave(self, call: Callable[[], None]) -> None:
        """Call when the client leaves before its answer ended; now, where it has left. For the
        app, once it has the whole body: nothing else of this connection is read then."""
        self._line.flow.resume_reading()
        if self.disconnected or self._line.writer.is_closing():
            self.disconnected, self._open = True, False  # else no answer is an error
            call()
        else:
            self._leave = call

    def cut(self) -> None:
        """The answer breaks off: only the end of the connection tells the client."""
        self.disconnected, self._open = True, False
        self._line.writer.close()

    async def receive(self) -> dict[str, Any]:
        """ASGI."""
        line = self._line
        if self.awaits_100 and self.more_body and not line.writer.is_closing():
            line.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.awaits_100 = False
        if not (self.disconnected or self.response_complete):
            line.flow.resume_reading()
            if not self._news:
                self._waiter = line.loop.create_future()
                late = line.loop.call_later(BODY_S, self._late) if self.more_body else None
                try:
                    await self._waiter
                finally:
                    self._waiter = None
                    if late is not None:
                        late.cancel()
            self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self.take(), "more_body": self.more_body}

    def _late(self) -> None:
        self._line.refuse(408, f"no byte of the body came within {BODY_S:g} s")

    async def send(self, message: dict[str, Any]) -> None:
        """ASGI; waits while the client does not drain."""
        if self._line.flow.write_paused and not self.disconnected:
            await self._line.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        wanted = "http.response.body" if self.response_started else "http.response.start"
        if self.response_complete or kind != wanted:
            raise RuntimeError(f"{kind} was sent where {wanted} is due, or nothing any more")
        writer = self._line.writer
        if not self.response_started:
            writer.write(self._begin(message["status"], message.get("headers", ())))
            return
        more = message.get("more_body", False)
        writer.write(self._framed(message.get("body", b""), more))
        if not more:
            self._complete()


# Answers one request; what it returns is still to be run, None: it was answered at once.
Direct = Callable[[Cycle], Rest | None]

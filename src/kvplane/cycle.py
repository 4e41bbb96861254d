"""Cycle: one request of a connection and its answer.

Edge. connections.py makes one per request and tells it what comes. An ASGI app has its `receive`
and `send`, and in `scope["extensions"]["kvplane.cycle"]` the cycle itself, which answers without
messages, copies or waiting where nothing is to be waited for; a direct route (doors.py) has nothing
but it. Open it to change how a body is handed over or how an answer is framed.

    head + length     content-length: 9 | its 9 bytes
    head alone        transfer-encoding: chunked | 5 hello 0
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvplane.writing import Writer

log = logging.getLogger(__name__)

Lines = list[tuple[bytes, bytes]]
Headers = Sequence[tuple[bytes, bytes]]
EXTENSION = "kvplane.cycle"
CLOSE = (b"connection", b"close")
BARE = (204, 304)  # statuses without a body, nor any framing
JOINED = 64 * 1024  # head and body up to this are one piece; beyond it a copy costs more
KEPT = 64  # bytes of memory that a part of a body costs beside its own: it may have but one
BODY_S = 120.0  # between two parts of a body that is waited for; apps may be stricter
_line = b": ".join
FAULTS = {500: b"Internal Server Error", 503: b"Service Unavailable"}  # an app broke; we end


class Line(Protocol):
    """What a cycle needs of its connection."""

    flow: FlowControl
    writer: Writer
    loop: asyncio.AbstractEventLoop

    def usual_headers(self) -> Headers: ...  # of every answer
    def finished(self) -> None: ...  # the answer has left
    def refuse(self, status: int, why: str) -> None: ...  # and end


class Cycle:
    """From the end of a request's head to the end of its answer."""

    # What most requests leave as it is: nothing is written for it.
    keep_alive = more_body = True
    awaits_100 = disconnected = response_started = response_complete = False
    size = 0  # what parts of the body that are not taken yet cost to keep
    _left_bytes = 0  # of the length that was told
    _bare = _chunked = _endless = _news = False
    _waiter: asyncio.Future[None] | None = None
    _leave: Callable[[], None] | None = None

    def __init__(self, line: Line, method: bytes, url: bytes, version: str, headers: Lines) -> None:
        self._line, self.method, self.url = line, method, url
        self.version, self.headers = version, headers  # names in small letters
        self._parts: list[bytes] = []  # of the body, not taken yet

    def begin(self, answer: Direct) -> Awaitable[None] | None:
        """Have it answered; what is to be waited for is for run()."""
        try:
            if (rest := answer(self)) is None:
                self._ended()
            return rest
        except Exception:
            log.exception("an app failed")
            self._failed(500)
            return None

    async def run(self, rest: Awaitable[None]) -> None:
        """The rest of it; what is left undone is undone here."""
        fault = 500
        try:
            await rest
            fault = 0
        except Exception:
            log.exception("an app failed")
        except asyncio.CancelledError:
            fault = 503
            raise
        finally:
            if fault:
                self._failed(fault)
            else:
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
            self.disconnected = True
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
            self.disconnected = True  # else no answer is an error
            call()
        else:
            self._leave = call

    def answer(self, status: int, headers: Headers, data: bytes, more: bool) -> bool:
        """The head and what there is of the body; with `more` the rest follows. False where
        nothing was done: the client does not drain, or left."""
        if self._line.flow.write_paused or self.disconnected or self._line.writer.is_closing():
            return False
        head, body = self._begin(status, headers), self._framed(data, more)
        writer = self._line.writer
        if len(body) <= JOINED:
            writer.write_now(head + body)
        else:
            writer.write_now(head)
            writer.write_now(body)
        if not more:
            self._complete()
        return True

    def put(self, data: bytes) -> bool:
        """A part of a chunked answer that began, at once. False where nothing was done."""
        if self._line.flow.write_paused or self.disconnected or not self._chunked:
            return False
        if not self.response_started or self.response_complete:
            return False
        if data:  # nothing would be the end
            self._line.writer.write_now(b"%x\r\n%b\r\n" % (len(data), data))
        return True

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

    # -- bytes

    def _begin(self, status: int, headers: Headers) -> bytes:
        """The head. Raises RuntimeError for what would split the answer."""
        lines, told = [*self._line.usual_headers(), *headers], dict(headers)
        length, bare = told.get(b"content-length"), status in BARE or self.method == b"HEAD"
        if length is None or b"connection" in told or b"transfer-encoding" in told:
            lines = self._frame(lines, told, bare)
        if self.awaits_100 and self.more_body:  # a body may still come, or a request instead
            self.keep_alive = False
        if not self.keep_alive:
            lines.append(CLOSE)
        head = b"\r\n".join((STATUS_LINE[status][:-2], *map(_line, lines))) + b"\r\n\r\n"
        breaks = len(lines) + 2
        if head.count(b"\n") != breaks or head.count(b"\r") != breaks or b"\0" in head:
            raise RuntimeError("a header holds a byte that would split the answer")
        self.response_started, self.awaits_100, self._bare = True, False, bare
        self._left_bytes = int(length or 0)
        return head

    def _frame(self, lines: Lines, told: Mapping[bytes, bytes], bare: bool) -> Lines:
        """How the body ends, where no length says it; what we say of the connection ourselves."""
        if (close := told.get(b"connection")) is not None:
            self.keep_alive &= b"close" not in close.lower()
            lines = [pair for pair in lines if pair[0] != b"connection"]
        chunked = b"transfer-encoding" in told
        if b"content-length" not in told and not bare:
            if self.version < "1.1":  # it knows no chunks: the connection ends with the body
                chunked, self._endless, self.keep_alive = False, True, False
                lines = [pair for pair in lines if pair[0] != b"transfer-encoding"]
            elif not chunked:
                chunked = True
                lines.append((b"transfer-encoding", b"chunked"))
        self._chunked = chunked and not bare
        return lines

    def _framed(self, data: bytes, more: bool) -> bytes:
        """A part of the body as it leaves. Raises RuntimeError where it is not as long as told."""
        if self._chunked:
            part = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            return part if more else part + b"0\r\n\r\n"
        if self._bare:
            return b""
        self._left_bytes -= len(data)
        if (self._left_bytes < 0 or (self._left_bytes and not more)) and not self._endless:
            raise RuntimeError(f"the answer is not as long as it said: {-self._left_bytes:+d}")
        return data

    def _complete(self) -> None:
        self.response_complete = True
        self._leave = None
        if self.size:  # of a body that nobody wanted; the connection may idle long
            self._parts, self.size = [], 0
        if self._waiter is not None:
            self._wake()
        self._line.writer.flush()  # nothing follows that it could wait for
        if not self.keep_alive:
            self._line.writer.close()
        self._line.finished()


# Answers one request; what it returns is still to be awaited, None: it was answered at once.
Direct = Callable[[Cycle], Awaitable[None] | None]

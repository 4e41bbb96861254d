"""Reply: how the answer of one request leaves.

Edge. Half of a Cycle (cycle.py), which is asked and told the rest. Where nothing is to be waited
for an answer leaves at once, without messages or copies. Open it to change how an answer is framed.

    head + length     content-length: 9 | its 9 bytes
    head alone        transfer-encoding: chunked | 5 hello 0
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from kvplane.framing import BARE, CLOSE, END, Headers, Lines, chunk, head
from kvplane.writing import Writer

_FIRST = {status: line[:-2] for status, line in STATUS_LINE.items()}
JOINED = 64 * 1024  # head and body up to this are one piece; beyond it a copy costs more


class Line(Protocol):
    """What a cycle needs of its connection."""

    flow: FlowControl
    writer: Writer
    loop: asyncio.AbstractEventLoop
    tasks: set[asyncio.Task[None]]  # that answer requests

    def usual_headers(self) -> Headers: ...  # of every answer
    def usual(self) -> bytes: ...  # the same, as they are written
    def finished(self) -> None: ...  # the answer has left
    def refuse(self, status: int, why: str) -> None: ...  # and end


class Reply:
    """Of one request. Subclasses wake whoever waits for the end, where somebody may."""

    # Slots and stores: what a class has instead is slower to read than all of it is to write.
    __slots__ = (
        "_bare", "_chunked", "_endless", "_leave", "_left_bytes", "_line", "_open", "_parts",
        "_waiter", "awaits_100", "disconnected", "keep_alive", "method", "more_body",
        "response_complete", "response_started", "size", "version",
    )  # fmt: skip

    def __init__(self, line: Line, method: bytes, version: str) -> None:
        self._line, self.method, self.version = line, method, version
        self._parts: list[bytes] = []  # of the body, not taken yet
        self.size = self._left_bytes = 0  # what they cost to keep; of the length that was told
        self.keep_alive = self.more_body = True
        self.awaits_100 = self.disconnected = False
        self.response_started = self.response_complete = False
        self._bare = self._chunked = self._endless = False
        self._open = False  # for chunks: the head is out, the end is not, the client is there
        self._leave: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None  # for the body, or for the end

    def _wake(self) -> None:
        """The answer is over."""

    def answer(self, status: int, headers: Headers, data: bytes, more: bool) -> bool:
        """The head and what there is of the body; with `more` the rest follows. False where
        nothing was done: the client does not drain, or left."""
        if self._line.flow.write_paused or self.disconnected or self._line.writer.is_closing():
            return False
        begun, body = self._begin(status, headers), self._framed(data, more)
        writer = self._line.writer
        if len(body) <= JOINED:
            writer.write_now(begun + body)
        else:
            writer.write_now(begun)
            writer.write_now(body)
        if not more:
            self._complete()
        return True

    def say(self, ready: bytes, data: bytes) -> bool:
        """A whole answer of status 200: these lines of a head, written before, and its body. False
        where nothing was done: as with answer(), or there is more to say of the connection."""
        line = self._line
        if line.flow.write_paused or self.disconnected or line.writer.is_closing():
            return False
        if not self.keep_alive or self.awaits_100 or len(data) > JOINED:
            return False
        told = line.usual(), len(data), ready, data
        line.writer.write_now(b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n%b\r\n%b" % told)
        self.response_started = True
        self._complete()
        return True

    def relay(self, chunks: bytes) -> bool:
        """Whole chunks of a chunked answer that began, at once. False where nothing was done."""
        if not self._open or self._line.flow.write_paused:
            return False
        if chunks:
            self._line.writer.write_now(chunks)
        return True

    def put(self, data: bytes) -> bool:
        """The same of a part that is no chunk yet."""
        return self.relay(chunk(data))

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
        begun = head(_FIRST[status], lines)
        self.response_started, self.awaits_100, self._bare = True, False, bare
        self._open = self._chunked
        self._left_bytes = int(length or 0)
        return begun

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
            return chunk(data) if more else chunk(data) + END
        if self._bare:
            return b""
        self._left_bytes -= len(data)
        if (self._left_bytes < 0 or (self._left_bytes and not more)) and not self._endless:
            raise RuntimeError(f"the answer is not as long as it said: {-self._left_bytes:+d}")
        return data

    def _complete(self) -> None:
        self.response_complete, self._open = True, False
        self._leave = None
        if self.size:  # of a body that nobody wanted; the connection may idle long
            self._parts, self.size = [], 0
        if self._waiter is not None:
            self._wake()
        self._line.writer.flush()  # nothing follows that it could wait for
        if not self.keep_alive:
            self._line.writer.close()
        self._line.finished()

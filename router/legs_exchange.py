"""Leg exchange: one request to one engine and what came back so far.

Edge: waits on a bell, buffers the body, tells its connection to pause. legs_connection.py fills
it, legs.py owns it, dispatch.py reads it. Open it to change how an answer is read or given up.

    begin -> CONNECT -> SENT -> HEAD -> BODY -> over (complete | error)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from .legs_errors import BODY, CONNECT, Aborted, LegError, Phase, PoolFull, TimedOut, TooLarge
from .legs_heads import Head, Pairs
from .legs_settings import LegSettings
from .legs_wire import Origin


class Bell:
    """Rung by many, awaited by one: how one task races two legs and a client without tasks."""

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the waiter, now or when it next waits."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._rung = True
        else:
            self._waiter = None
            waiter.set_result(None)

    def wait(self) -> asyncio.Future[None]:
        """What to await until it is rung; over already where it was since the last wait. One waiter
        at a time: it looks at how things stand before it waits again."""
        waiter = self._waiter
        assert waiter is None or waiter.done(), "a bell has one waiter"
        waiter = asyncio.Future()
        if self._rung:
            self._rung, self._waiter = False, None
            waiter.set_result(None)
        else:
            self._waiter = waiter
        return waiter


class Rung(Protocol):
    """What an exchange needs of the one who waits for it."""

    def ring(self) -> None: ...
    def wait(self) -> asyncio.Future[None]: ...


class Line(Protocol):
    """What an exchange needs of its connection."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...


class Exchange(msgspec.Struct, eq=False):
    """One leg. Whoever began it ends it: reads it to its end or calls `abort()` in `finally`."""

    origin: Origin
    head_out: bytes  # and the body, where it is short
    body_out: bytes
    _settings: LegSettings
    bell: Rung
    patient: bool = False  # its head comes with its end: no deadline but the whole leg's
    calm: bool = False  # nobody need look before it is over, refused, or holds too much
    slow: bool = False  # nor before a while has passed: what comes is read in large parts
    _begun: float = 0.0  # by the pool's clock
    since: float = 0.0  # that it is in its phase
    moved_at: float = 0.0  # when the connection last brought bytes
    line: Line | None = None  # its connection
    phase: Phase = CONNECT
    reused: bool = False
    on_over: Callable[[Exchange], None] | None = None  # the pool's, before it has a connection
    status: int = 0  # 0 until the head came
    stream: bool = False  # it is answered with server-sent events
    error: LegError | None = None
    complete: bool = False
    over: bool = False  # complete or failed: nothing more will come
    paused: bool = False
    received_bytes: int = 0
    buffered_bytes: int = 0  # of the body, that came and were not taken
    tap: Callable[[bytes], bool] | None = None  # may take a part as it comes
    relay: Callable[[bytes], bool] | None = None  # the same of whole chunks, framing and all
    waits: bool = False  # all connections are taken: it has none to be made either
    _head: Head | None = None
    _length: bytes = b""  # of this answer, where its head was known already
    _data: bytes = b""  # of the body, not taken yet
    _more: list[bytes] | None = None  # behind that

    @property
    def headers(self) -> Pairs:
        """Of the answer, names in lower case; none before they came."""
        return [] if self._head is None else self._head.of_length(self._length)

    def header(self, name: bytes) -> bytes:
        """First value of a header, b"" where absent."""
        return next((value for key, value in self.headers if key == name), b"")

    def passed_back(self) -> Pairs:
        """A new list of those the client may see."""
        return [] if self._head is None else self._head.passed_back(self._length)

    # -- the reader's side

    def take(self) -> bytes:
        """All body bytes that came since the last call, in order; b"" where none did."""
        data, self._data = self._data, b""
        if self.buffered_bytes:  # else it was here whole, or nothing is
            self.buffered_bytes = 0
            if self._more is not None:
                data, self._more = b"".join([data, *self._more]), None
            if self.paused:
                self.paused = False
                if self.line is not None:
                    self.line.resume()
        return data

    async def head(self) -> int:
        """Wait for the status. Raises LegError."""
        while not self.status and self.error is None:
            await self._wait()
        if self.error is not None:
            raise self.error.again()
        return self.status

    async def chunk(self) -> bytes:
        """Wait for more body; b"" at its end. Raises LegError for a body that did not end."""
        while not self._data and not self.over:
            await self._wait()
        if self._data:
            return self.take()
        if self.error is not None:
            raise self.error.again()
        return b""

    async def read(self, most_bytes: int) -> bytes:
        """The whole body. Raises LegError, TooLarge where it is longer than `most_bytes`."""
        parts, size = [], 0
        while data := await self.chunk():
            parts.append(data)
            size += len(data)
            if size > most_bytes:
                self.abort()
                text = f"answer longer than {most_bytes} bytes"
                raise TooLarge(str(self.origin), self.phase, text, self.received_bytes, self.reused)
        return b"".join(parts)

    async def _wait(self) -> None:
        try:
            await self.bell.wait()
        except asyncio.CancelledError:
            self.abort()
            raise

    def abort(self) -> None:
        """Give the leg up now: its connection is closed, nothing is kept. Idempotent."""
        self._data, self._more, self.buffered_bytes = b"", None, 0
        if not self.over:
            self.fail(Aborted, "aborted by the gateway")

    def hurry(self) -> None:
        """From now on somebody waits for its end."""
        self.slow = False
        if self.line is not None and not self.paused:
            self.line.resume()

    # -- the connection's and the pool's side

    def dialled(self, now: float) -> None:
        """A connection is being made for it; what it waited before is no connect's fault."""
        self.waits, self.since = False, now

    def got_head(self, head: Head) -> None:
        """The head is complete; never an informational one."""
        self._head, self.status, self.stream = head, head.status, head.stream
        self.phase = BODY
        refused = not 200 <= head.status < 300
        if refused:
            self.slow = False  # somebody waits for the reason
        elif self.stream and not self.slow:
            self.calm = False
        if refused or not self.calm:
            self.bell.ring()

    def got_body(self, data: bytes) -> None:
        """All that one read brought of the body, and more will come. Asks the connection to pause
        where nobody drains it."""
        if self.tap is not None and self.tap(data):
            return
        self._keep(data)
        if self.buffered_bytes >= self._settings.pause_bytes and not self.paused:
            self.paused = True
            if self.line is not None:
                self.line.pause()
        elif self.calm:
            return
        self.bell.ring()

    def _keep(self, data: bytes) -> None:
        """Until somebody takes it; what comes behind it has to wait too."""
        self.tap = self.relay = None
        self.buffered_bytes += len(data)
        if not self._data:
            self._data = data
        elif self._more is None:
            self._more = [data]
        else:
            self._more.append(data)

    def got_whole(self, head: Head, length: bytes, body: bytes, size: int) -> None:
        """A whole answer of so many bytes, in one read."""
        self._head, self._length, self.status = head, length, head.status
        self._data, self.received_bytes = body, size
        self.complete = self.over = True
        self.line = None
        if head.stream:
            self.stream = True
        self.bell.ring()

    def finish(self, data: bytes = b"") -> None:
        """The answer is complete with these; what is buffered may still be read."""
        if self.over:
            return
        if data:
            self._keep(data)
        self.complete = self.over = True
        self.line = self.tap = self.relay = None
        self.bell.ring()

    def fail(self, kind: type[LegError], detail: str) -> None:
        """End the leg with an error. Idempotent; the first error stays."""
        if self.over:
            return
        self.over = True
        self.error = kind(str(self.origin), self.phase, detail, self.received_bytes, self.reused)
        line, self.line = self.line, None
        self.tap = self.relay = None
        if line is not None:
            line.abort()
        if self.on_over is not None:
            self.on_over(self)
        self.bell.ring()

    def check(self, now: float) -> None:
        """Fail the leg where one of its deadlines passed. The sweeper calls it."""
        limits, since = self._settings, now - self.since
        if self.paused:
            self.moved_at = now  # we are the slow side; the engine's idle time does not run
        if now - self._begun > limits.total_s:
            self.fail(TimedOut, f"not finished within {limits.total_s:g} s")
        elif self.phase is Phase.BODY:
            if now - self.moved_at > limits.idle_s:
                self.fail(TimedOut, f"body silent for {limits.idle_s:g} s")
        elif self.phase is not Phase.CONNECT:
            if since > limits.head_s and not self.patient:
                self.fail(TimedOut, f"no head within {limits.head_s:g} s")
        elif self.waits:
            if since > limits.wait_s:
                self.fail(PoolFull, f"no connection became free within {limits.wait_s:g} s")
        elif since > limits.connect_s:
            self.fail(TimedOut, f"no connection within {limits.connect_s:g} s")

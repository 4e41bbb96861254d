"""Leg exchange: one request to one engine and what came back so far.

Edge: waits on a bell, buffers the body, tells its connection to pause. legs_connection.py fills
it, legs.py owns it, dispatch.py reads it. Open it to change how an answer is read or given up.

    begin -> CONNECT -> SENT -> HEAD -> BODY -> over (complete | error)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .legs_errors import Aborted, LegError, Phase, PoolFull, TimedOut, TooLarge
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
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until rung since the last wait. One waiter at a time."""
        if not self._rung:
            assert self._waiter is None, "a bell has one waiter"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False


class Line(Protocol):
    """What an exchange needs of its connection."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def abort(self) -> None: ...


class Exchange:
    """One leg. Whoever began it ends it: reads it to its end or calls `abort()` in `finally`."""

    __slots__ = (
        "_begun", "_chunks", "_moved", "_settings", "_since", "bell", "body_out",
        "buffered_bytes", "calm", "complete", "error", "head_out", "headers", "line", "on_over",
        "origin", "over", "patient", "paused", "phase", "received_bytes", "reused", "status",
        "tap", "waits",
    )  # fmt: skip

    def __init__(
        self, origin: Origin, head: bytes, body: bytes, settings: LegSettings, bell: Bell
    ) -> None:
        self.origin = origin
        self.head_out, self.body_out = head, body
        self.bell = bell
        self.phase = Phase.CONNECT
        self.status = 0  # 0 until the head came
        self.headers: list[tuple[bytes, bytes]] = []  # names in lower case
        self.error: LegError | None = None
        self.complete = False
        self.over = False  # complete or failed: nothing more will come
        self.paused = False
        self.received_bytes = 0
        self.reused = False
        self.line: Line | None = None
        self.on_over: Callable[[Exchange], None] | None = None  # the pool lets go of it
        self._settings = settings
        self._chunks: deque[bytes] = deque()
        self.buffered_bytes = 0  # of the body, that came and were not taken
        self.calm = False  # nobody need look before it is over, refused, or holds too much
        self.tap: Callable[[bytes], bool] | None = None  # may take a part as it comes
        self.patient = False  # its head comes with its end: no deadline but the whole leg's
        self.waits = False  # all connections are taken: it has none to be made either
        self._begun = self._since = self._moved = 0.0  # by the pool's clock

    def header(self, name: bytes) -> bytes:
        """First value of a header, b"" where absent."""
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    # -- the reader's side

    def take(self) -> bytes:
        """All body bytes that came since the last call, in order; b"" where none did."""
        if not self._chunks:
            return b""
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self.buffered_bytes = 0
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
            raise self.error
        return self.status

    async def chunk(self) -> bytes:
        """Wait for more body; b"" at its end. Raises LegError for a body that did not end."""
        while not self._chunks and not self.over:
            await self._wait()
        if self._chunks:
            return self.take()
        if self.error is not None:
            raise self.error
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
        self._chunks.clear()
        self.buffered_bytes = 0
        if not self.over:
            self.fail(Aborted, "aborted by the gateway")

    # -- the connection's and the pool's side

    def begin(self, now: float) -> None:
        """The leg starts to count its time."""
        self._begun = self._since = self._moved = now

    def dialled(self, now: float) -> None:
        """A connection is being made for it; what it waited before is no connect's fault."""
        self.waits, self._since = False, now

    def sent(self, line: Line, now: float, reused: bool) -> None:
        """The request was handed to a connection."""
        self.line, self.phase, self.reused, self.waits = line, Phase.SENT, reused, False
        self._since = self._moved = now

    def got_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The head is complete; never an informational one."""
        self.status, self.headers, self.phase = status, headers, Phase.BODY
        if not self.calm or not 200 <= status < 300:
            self.bell.ring()

    def got_body(self, data: bytes) -> None:
        """Body bytes; asks the connection to pause where nobody drains them."""
        self._chunks.append(data)
        self.buffered_bytes += len(data)
        if self.buffered_bytes >= self._settings.pause_bytes and not self.paused:
            self.paused = True
            if self.line is not None:
                self.line.pause()
            self.bell.ring()

    def stir(self) -> None:
        """All that one read brought is here, and more will come."""
        if not self._chunks or self.calm:
            return
        if self.tap is not None and not self.paused:
            held = self._chunks
            if self.tap(held[0] if len(held) == 1 else b"".join(held)):
                held.clear()
                self.buffered_bytes = 0
                return
        self.bell.ring()

    def moved(self, size: int, now: float) -> None:
        """Bytes of the answer came, framing included."""
        self.received_bytes += size
        self._moved = now
        if self.phase is Phase.SENT:
            self.phase = Phase.HEAD

    def finish(self) -> None:
        """The answer is complete; what is buffered may still be read."""
        if not self.over:
            self.complete = self.over = True
            self.line = None
            self._let_go()

    def fail(self, kind: type[LegError], detail: str) -> None:
        """End the leg with an error. Idempotent; the first error stays."""
        if self.over:
            return
        self.over = True
        self.error = kind(str(self.origin), self.phase, detail, self.received_bytes, self.reused)
        line, self.line = self.line, None
        if line is not None:
            line.abort()
        self._let_go()

    def _let_go(self) -> None:
        if self.on_over is not None:
            self.on_over(self)
        self.bell.ring()

    def check(self, now: float) -> None:
        """Fail the leg where one of its deadlines passed. The sweeper calls it."""
        limits, since = self._settings, now - self._since
        if self.paused:
            self._moved = now  # we are the slow side; the engine's idle time does not run
        if now - self._begun > limits.total_s:
            self.fail(TimedOut, f"not finished within {limits.total_s:g} s")
        elif self.phase is Phase.BODY:
            if now - self._moved > limits.idle_s:
                self.fail(TimedOut, f"body silent for {limits.idle_s:g} s")
        elif self.phase is not Phase.CONNECT:
            if since > limits.head_s and not self.patient:
                self.fail(TimedOut, f"no head within {limits.head_s:g} s")
        elif self.waits:
            if since > limits.wait_s:
                self.fail(PoolFull, f"no connection became free within {limits.wait_s:g} s")
        elif since > limits.connect_s:
            self.fail(TimedOut, f"no connection within {limits.connect_s:g} s")

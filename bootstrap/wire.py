"""Wire: messages of joining.py over one TCP connection.

Edge. Used by link.py and rendezvous.py. Open it to change how bytes become messages or how a
connection ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from kvplane.runtime import Clock

from .errors import BootstrapError
from .joining import Frames, Message, frame

READ_BYTES = 256 * 1024


class Closed(BootstrapError):
    """The connection is over; says who ended it."""


class Wire:
    """One connection. Reading and writing may happen in different tasks."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, clock: Clock
    ) -> None:
        self._reader, self._writer, self._clock = reader, writer, clock
        self._frames = Frames()
        self._early: deque[Message] = deque()
        self._writing = asyncio.Lock()
        self.heard_at = clock.now()  # any byte is a sign of life
        host, port = (writer.get_extra_info("peername") or ("unknown", 0))[:2]
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.host: str = host
        self.reached: str | None = (writer.get_extra_info("sockname") or (None,))[0]  # of ours

    def allow(self, most_bytes: int) -> None:
        """From now on frames may be this long."""
        self._frames.most = most_bytes

    async def read(self) -> Message:
        """The next message. Raises Closed at the end, BadFrame for garbage."""
        while not self._early:
            try:
                data = await self._reader.read(READ_BYTES)
            except OSError as error:
                why = error.strerror or str(error) or type(error).__name__
                raise Closed(f"connection lost: {why}") from error
            if not data:
                raise Closed("connection closed")
            self.heard_at = self._clock.now()
            self._early.extend(self._frames.feed(data))
        return self._early.popleft()

    def post(self, message: Message) -> None:
        """Write without waiting; a dead peer shows in `read`."""
        if not self._writer.is_closing():
            self._writer.write(frame(message))

    async def send(self, message: Message) -> None:
        """Write and wait until the peer takes it; one such message at a time."""
        async with self._writing:
            self.post(message)
            with contextlib.suppress(OSError):  # shows in read
                await self._writer.drain()

    @property
    def waiting(self) -> int:
        """Bytes that the peer has not taken."""
        return self._writer.transport.get_write_buffer_size()

    def close(self, last: Message | None = None) -> None:
        """A last message, then the end; never waits for a peer that does not read. Idempotent."""
        if last is not None:
            self.post(last)
        if self.waiting:
            self._writer.transport.abort()
        self._writer.close()

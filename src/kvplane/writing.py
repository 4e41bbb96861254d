"""Writing: how often we write for one answer, and how a connection ends whose client still sends.

Edge. Between connections.py and its transport. What one turn of the loop writes leaves in one
system call; and whoever is refused while still sending is heard out for a moment, unread: a socket
closed over unread bytes is reset, and the reset takes the answer with it.

    close:   nothing more is coming -> closed      else -> our side ends, theirs is thrown away,
                                                          closed when they end, or after LINGER_S
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from typing import Any

JOINED = 16 * 1024  # bytes that wait for more at most; then they leave at once
LINGER_S = 3.0  # a client notices an answer within this, also while it sends
STALL_S = 120.0  # a client that takes not a byte of what waits for it this long is let go
ENDED = getattr(select, "POLLRDHUP", 0)  # its side ended, or reset; elsewhere a reset alone tells


class Writer:
    """A transport that joins writes, and closes so that the last word arrives."""

    def __init__(
        self,
        inner: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        sending: Callable[[], bool] = bool,  # is the client within a request?
        stall_s: float = STALL_S,
        stalled: Callable[[], None] = lambda: None,  # hears of a client that is let go
    ) -> None:
        self._inner, self._loop, self._sending = inner, loop, sending
        self._stall_s, self._stalled = stall_s, stalled
        self._held: list[bytes] = []
        self._size = 0
        self._end: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None
        self.deaf = False  # is everything that still comes thrown away?
        self._lost = False

    def write(self, data: bytes) -> None:
        """Soon, with what follows; at once where it is much; never after the last word."""
        if self.deaf:
            return
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._size += len(data)
        if self._size >= JOINED:
            self.flush()

    def write_now(self, data: bytes) -> None:
        """What follows comes later than this turn: at once, behind what is held."""
        if self._held:
            self.write(data)
            self.flush()
        elif not self.deaf:
            self._inner.write(data)

    def is_closing(self) -> bool:
        """Has the last word been said?"""
        return self.deaf or self._inner.is_closing()

    def left(self) -> bool:
        """Has the client ended its side? For a connection that is not read, whose loop cannot hear
        of it."""
        if (sock := self._inner.get_extra_info("socket")) is None or self.is_closing():
            return False
        poll = select.poll()
        poll.register(sock.fileno(), ENDED)  # a reset is always told
        return bool(poll.poll(0))

    def close(self) -> None:
        """What is held leaves before."""
        self.flush()
        if self.deaf or not self._sending() or not self._inner.can_write_eof():
            self._close()
            return
        with contextlib.suppress(RuntimeError, OSError):  # it is gone already
            self._inner.write_eof()
            self._inner.resume_reading()
        self._end, self.deaf = self._loop.call_later(LINGER_S, self._close), True

    def ended(self) -> None:
        """The connection is lost: nobody is waited for, and nothing keeps it in memory."""
        self.drained()
        if self._end is not None:
            self._end.cancel()
        self._sending, self.deaf, self._lost = bool, True, True

    def _close(self) -> None:
        self._inner.close()
        if not self._lost and self._stuck is None and self._inner.get_write_buffer_size():
            self.waits()

    def waits(self) -> None:
        """More stands in the buffer than should: is it taken?"""
        self.drained()
        self._look(self._inner.get_write_buffer_size() + 1)

    def drained(self) -> None:
        """Enough of it was taken."""
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _look(self, before: int) -> None:
        """The app writes nothing meanwhile, so that less is progress, and as much is none."""
        left = self._inner.get_write_buffer_size()
        if left < before:
            self._stuck = self._loop.call_later(self._stall_s, self._look, left)
        else:
            self._stalled()
            self._inner.abort()

    def flush(self) -> None:
        """Now, if anything is held."""
        held, self._held, self._size = self._held, [], 0
        if held:
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

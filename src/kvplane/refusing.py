"""Refusing: when a client is let go of for its head, and what it is told.

Door. Between offers.py and connections.py, which reads requests; refusals.py has the words. A head
has a time and a size. Open it to change when a client is refused, or what of it is logged.
"""

from __future__ import annotations

import asyncio
import logging
from typing import ClassVar

from kvplane.cycle import Cycle
from kvplane.offers import Declining
from kvplane.refusals import refusal, too_long

log = logging.getLogger(__name__)

# Without a byte of a body: head, chunk lines or trailers; others take 8-64 K.
MOST_BYTES = 64 * 1024
HEAD_S = 10.0  # for a head to arrive whole, counted from its first byte or from the connection
TELL_S = 1.0  # a flood of bad heads is not a flood of log lines


class Refusing(Declining):
    """A connection that may be told why it ends."""

    refused: ClassVar[int] = 0  # connections of the whole process; a gauge reads it
    head_s: ClassVar[float] = HEAD_S
    most_bytes: ClassVar[int] = MOST_BYTES
    told_at: ClassVar[float] = 0.0  # when the log last heard of a refusal

    _quiet = 0  # bytes since a request or a part of a body was complete
    _within = False  # between the first byte of a request and its last
    _headed = False  # and its head was whole, so that an app has it
    _late: asyncio.TimerHandle | None = None
    newest: Cycle | None = None  # of the head that was read last
    turn: Cycle | None = None  # whose answer is due
    url = b""

    def send_400_response(self, msg: str) -> None:
        """What the parser could not take, or we did not."""
        status, why = self._why or (400, msg)
        Refusing.refused += 1
        self._tell(status, why)
        if not self._answered():
            self.transport.write(refusal(status, why))
        self.transport.close()

    def _answered(self) -> bool:
        """Has what is refused an answer, or is one on its way that ours would fall into?"""
        if self.turn is not None:
            return self.turn.response_started
        return self.newest is not None and self._within and self._headed

    def refuse(self, status: int = 400, why: str = "") -> None:
        if self.transport.is_closing():
            return
        if not why and not (self._quiet and self._within):  # opened ahead of time, or left idle
            self.transport.close()
            return
        self._why = status, why or f"the head did not arrive whole within {self.head_s:g} s"
        self.send_400_response("")

    def _too_long(self) -> tuple[int, str]:
        """Of a head, or else of what stands between two parts of a body."""
        if self._within and self._headed:
            return 400, f"{self._quiet} bytes came without one of a body"
        return too_long(self._quiet, len(self.url), 0, self.most_bytes)

    def _tell(self, status: int, why: str) -> None:
        now = self.loop.time()
        if now - Refusing.told_at >= TELL_S:
            Refusing.told_at = now
            who = self.client[0] if self.client else "?"
            log.warning("request refused client=%s status=%d why=%s", who, status, why)

    def _await_rest(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self.refuse)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

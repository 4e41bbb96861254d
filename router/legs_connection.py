"""Leg connection: bytes of one kept-alive socket -> head, body and end of one exchange at a time.

Edge: an asyncio Protocol. An answer that came whole behind a head that legs_heads.py knows needs no
parser, nor do whole chunks (legs_chunks.py) that somebody hands on as they are; legs_answer.py
parses all else. legs.py makes and keeps these; legs_exchange.py receives what is read. Open it to
change when a connection may be used again. A connection never sends a request twice.

    idle -> send -> head -> body -> end of message -> (feed returned, nothing left over) -> idle
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from .legs_answer import Answer
from .legs_chunks import whole
from .legs_errors import HEAD, SENT, Cut, LegError, Malformed, Phase, Stale
from .legs_exchange import Exchange
from .legs_heads import NONE, Heads
from .legs_settings import LegSettings

BRISK_READS = 3  # of an answer that nobody looks at, without a pause: most end with these
STALE_S = 1.0  # a kept connection that is dead is known to be so in a round trip; and a busy loop
MOST_BREATH_S = 0.16  # between two reads of an answer that nobody looks at; the first is shorter


class Connection(asyncio.Protocol):
    """One socket to one engine; carries one exchange at a time."""

    exchange: Exchange | None = None
    lost = False
    free_since = 0.0
    stale = False  # it turned out to be dead on reuse
    stale_after_s = 0.0  # and how long it had idled then
    closing: Callable[[], bool]  # as soon as the connection is made
    _transport: asyncio.Transport
    _answer: Answer | None = None  # that is being parsed
    _reads, _breath_s = 0, 0.0

    def __init__(
        self,
        settings: LegSettings,
        now: Callable[[], float],
        on_free: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
        heads: Heads | None = None,
    ) -> None:
        self._settings, self._now = settings, now
        self._on_free, self._on_lost = on_free, on_lost
        self._heads = heads or Heads()
        self.expire_s = settings.expire_s

    # -- towards the pool

    def usable(self, now: float) -> bool:
        """Of one that idles: open, and not past the time after which the engine may close it."""
        return now - self.free_since < self.expire_s and not self.closing()

    def send(self, exchange: Exchange, reused: bool = False) -> None:
        """Write the request of one that waited for a connection. `reused`: this one was kept."""
        exchange.line, exchange.phase, exchange.reused = self, SENT, reused
        self.carry(exchange)

    def carry(self, exchange: Exchange) -> None:
        """Write the request of one that has this connection; all bytes are its own from now on."""
        assert self.exchange is None, "connection is not idle"
        self.exchange = exchange
        if exchange.body_out:
            self._transport.writelines([exchange.head_out, exchange.body_out])
        else:
            self._transport.write(exchange.head_out)

    def pause(self) -> None:
        """Stop reading: the exchange holds enough."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, whatever is under way. Idempotent, never puts back."""
        self.exchange = None
        self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        self.closing = transport.is_closing
        self.free_since = self._now()

    def data_received(self, data: bytes) -> None:
        exchange, answer = self.exchange, self._answer
        if exchange is None:
            self.abort()  # nobody asked for it: this connection is not to be trusted
        elif answer is None:
            if (found := self._heads.whole(data)) is None:
                self._begin(exchange, data)
                return
            head, length, body = found
            self.exchange = None
            exchange.got_whole(head, length, body, len(data))
            self._free(head.kept_s)
        elif (
            (relay := exchange.relay) is not None and answer.between and whole(data) and relay(data)
        ):
            exchange.received_bytes += len(data)
            exchange.moved_at = self._now()
        else:
            self._read(exchange, answer, data)

    def _begin(self, exchange: Exchange, data: bytes) -> None:
        """The first bytes of an answer that is not here whole."""
        raw, head = self._heads.opening(data)
        self._answer = answer = Answer(self._settings, head, raw)
        self._breath_s, self._reads = self._settings.breath_s, 0
        exchange.phase = HEAD
        if raw:
            exchange.received_bytes = len(raw)
            self._read(exchange, answer, data[len(raw) :])
            return
        self._read(exchange, answer, data)
        if answer.head is not NONE:
            self._heads.learn(data, answer.head)

    def _read(self, exchange: Exchange, answer: Answer, data: bytes) -> None:
        exchange.received_bytes += len(data)
        exchange.moved_at = self._now()
        body = answer.feed(data)
        if not exchange.status and answer.head is not NONE:
            exchange.got_head(answer.head)
        if self.exchange is None:  # somebody gave it up when he heard of its head
            return
        if answer.ended:
            self.exchange = None
            paused = exchange.paused
            exchange.finish(body)
            if paused:
                self.resume()
            self._parsed()
            self._free(0.0 if answer.broken or answer.glued else answer.head.kept_s)
            return
        if body:
            exchange.got_body(body)
        if answer.broken or not body:
            self._look(exchange, answer)
        elif exchange.slow and self.exchange is not None and not exchange.paused:
            self._breathe()

    def _look(self, exchange: Exchange, answer: Answer) -> None:
        """Can more come?"""
        if self.exchange is None:  # what came of it made somebody give it up
            return
        if fault := answer.fault(exchange.received_bytes):
            self._fail(Malformed, fault)
        elif exchange.slow and not exchange.paused and answer.head is not NONE:
            self._breathe()

    def _breathe(self) -> None:
        """Nobody looks at this answer before it is whole: it is read a few times, not a hundred."""
        self._reads += 1
        if self._reads <= BRISK_READS:
            return
        self.pause()
        asyncio.get_running_loop().call_later(self._breath_s, self._read_on)
        self._breath_s = min(2 * self._breath_s, MOST_BREATH_S)

    def _read_on(self) -> None:
        if self.exchange is None or not self.exchange.paused:
            self.resume()

    def eof_received(self) -> bool | None:
        return None  # the transport closes itself; connection_lost follows

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        exchange, answer = self.exchange, self._answer
        if exchange is not None:
            if exc is None and answer is not None and answer.until_close:
                self.exchange = None
                exchange.finish()
            else:
                how = "reset" if exc is not None else "closed"
                self.stale = stale = self._was_dead(exchange)
                self.stale_after_s = exchange.since - self.free_since if stale else 0.0
                self._fail(Stale if stale else Cut, f"connection {how} by the engine")
        self._parsed()
        self._on_lost(self)

    def _was_dead(self, exchange: Exchange) -> bool:
        """Before the request came? Else the engine had it, and died over it perhaps."""
        unheard = exchange.reused and exchange.phase is Phase.SENT
        return unheard and self._now() - exchange.since < STALE_S

    def _fail(self, kind: type[LegError], detail: str) -> None:
        exchange, self.exchange = self.exchange, None
        self._parsed()
        self._transport.abort()
        if exchange is not None:
            exchange.fail(kind, detail)

    def _parsed(self) -> None:
        """Nothing more of this answer is read."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.end()

    def _free(self, kept_s: float) -> None:
        """The message is complete and the parser has returned: only now may another follow, if the
        engine keeps the connection that long, and read the whole request before it answered."""
        if kept_s <= 0.0 or self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self.expire_s, self.free_since = kept_s, self._now()
            self._on_free(self)

"""Leg connection: bytes of one kept-alive socket -> head, body and end of one exchange at a time.

Edge: an asyncio Protocol around httptools' parser; an answer that came whole behind a head that
legs_heads.py knows does without. legs.py makes and keeps these; legs_exchange.py receives what is
read. Open it to change what counts as a valid answer or when a connection may be used again. A
connection never sends a request twice.

    idle -> send -> head -> body -> end of message -> (feed returned, nothing left over) -> idle
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from .legs_errors import SENT, Cut, LegError, Malformed, Phase, Stale
from .legs_exchange import Exchange
from .legs_heads import NONE, Heads, Pairs, read
from .legs_settings import LegSettings

BRISK_READS = 3  # of an answer that nobody looks at, without a pause: most end with these
MOST_BREATH_S = 0.16  # between two reads of an answer that nobody looks at; the first is shorter
SLACK = 8192  # bytes of status lines and 1xx heads, on top of the cap of the head itself


class BadAnswer(Exception):
    """Raised inside a parser callback: the answer breaks one of our rules."""


class Connection(asyncio.Protocol):
    """One socket to one engine; carries one exchange at a time."""

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
        self._transport: asyncio.Transport | None = None
        self.exchange: Exchange | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._parts: list[bytes] = []  # of the body, of one read
        self.on_body = self._parts.append  # the parser's callback: no step of ours for each chunk
        self.lost = self.used = self._in_body = self._until_close = False
        self.free_since = self._idled_s = 0.0
        self.expire_s = settings.expire_s
        self.stale_after_s = 0.0  # how long it had idled when it turned out to be dead

    # -- towards the pool

    def usable(self, now: float) -> bool:
        """Open, idle, and not past the time after which the engine may close it."""
        return (
            now - self.free_since < self.expire_s
            and self.exchange is None
            and self._transport is not None
            and not self._transport.is_closing()
        )

    def send(self, exchange: Exchange, now: float) -> None:
        """Write the request; from now on all bytes belong to `exchange`."""
        assert self._transport is not None and self.exchange is None, "connection is not idle"
        self.exchange = exchange
        self._idled_s = now - self.free_since
        exchange.line, exchange.phase, exchange.waits = self, SENT, False
        exchange.since = exchange.moved_at = now
        exchange.reused, self.used = self.used, True
        head, body = exchange.head_out, exchange.body_out
        if len(body) < self._settings.joined_bytes:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    def pause(self) -> None:
        """Stop reading: the exchange holds enough."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, whatever is under way. Idempotent, never puts back."""
        self.exchange = None
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one by shape only
        self.free_since = self._now()

    def data_received(self, data: bytes) -> None:
        exchange, parser = self.exchange, self._parser
        if exchange is None:
            self.abort()  # nobody asked for it: this connection is not to be trusted
            return
        if parser is None:
            if (found := self._heads.whole(data)) is None:
                self._begin(exchange, data)
                return
            head, length, body = found
            self.exchange = None
            exchange.got_whole(head, length, body, len(data))
            self._free(head.kept_s, False)
            return
        exchange.received_bytes += len(data)
        exchange.moved_at = self._now()
        broken, parts, body = "", self._parts, b""
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            broken = str(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = f"not a valid answer: {error}"
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            self._silent_bytes = 0
        if self.exchange is None:  # aborted by a callback's reader
            return
        if self._ended:
            self.exchange = None
            exchange.finish(body)
            self._free(0.0 if broken or self._glued else self._head.kept_s, exchange.paused)
            return
        if body:
            exchange.got_body(body)
        else:
            self._silent_bytes += len(data)
        if broken or not self._in_body or not body or exchange.slow:
            self._check(exchange, broken)

    def _begin(self, exchange: Exchange, data: bytes) -> None:
        """The first bytes of an answer that has to be parsed."""
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Pairs = []
        self._head = NONE
        self._head_bytes = self._lines = self._silent_bytes = self._informational = 0
        self._in_body = self._ended = self._glued = self._until_close = False
        self._breath_s, self._reads = self._settings.breath_s, 0
        exchange.phase = Phase.HEAD
        self.data_received(data)
        if self._in_body:
            self._heads.learn(data, self._head)

    def _check(self, exchange: Exchange, broken: str) -> None:
        """More is to come, if all is well."""
        most = self._settings.head_bytes
        if self.exchange is None:  # what came of it made somebody give it up
            return
        if broken:
            self._fail(Malformed, broken)
        elif not self._in_body:
            if exchange.received_bytes > most + SLACK:
                self._fail(Malformed, f"{exchange.received_bytes} bytes and no end of the head")
        elif self._silent_bytes > most:
            self._fail(Malformed, f"{self._silent_bytes} bytes of framing without an end")
        elif exchange.slow and not exchange.paused:
            self._reads += 1
            if self._reads > BRISK_READS:
                self._breathe()

    def _breathe(self) -> None:
        """Nobody looks at this answer before it is whole: it is read a few times, not a hundred."""
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
        exchange = self.exchange
        if exchange is not None:
            if exc is None and self._until_close and exchange.status:
                self.exchange = None
                exchange.finish()
            else:
                how = "reset" if exc is not None else "closed"
                stale = exchange.reused and exchange.phase is Phase.SENT
                self.stale_after_s = self._idled_s if stale else 0.0
                self._fail(Stale if stale else Cut, f"connection {how} by the engine")
        self._parser = None
        self._on_lost(self)

    def _fail(self, kind: type[LegError], detail: str) -> None:
        exchange, self.exchange = self.exchange, None
        self._parser = None
        if self._transport is not None:
            self._transport.abort()
        if exchange is not None:
            exchange.fail(kind, detail)

    def _free(self, kept_s: float, paused: bool) -> None:
        """The message is complete and the parser has returned: only now may another follow, if the
        engine keeps the connection that long, and read the whole request before it answered."""
        transport, self._parser = self._transport, None
        assert transport is not None
        self.expire_s = kept_s
        if kept_s <= 0.0 or transport.get_write_buffer_size():
            transport.abort()
            return
        if paused:
            transport.resume_reading()
        self.free_since = self._now()
        self._on_free(self)

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self._ended:
            self._glued = True
            raise BadAnswer("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._lines > self._settings.head_lines:
            raise BadAnswer(f"more than {self._settings.head_lines} headers")
        if self._head_bytes > self._settings.head_bytes:
            raise BadAnswer(f"head longer than {self._settings.head_bytes} bytes")
        if not self._in_body:  # trailers are counted, not kept
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, exchange = self._parser, self.exchange
        assert parser is not None
        status = int(parser.get_status_code())
        if status == 101:
            raise BadAnswer("the engine wants to switch protocols")
        if not 100 <= status < 600:
            raise BadAnswer(f"status {status}: must be from 100 to 599")
        if status < 200:
            self._informational += 1
            self._headers.clear()
            if self._informational > self._settings.informational:
                raise BadAnswer("too many 1xx answers")
            return
        self._check_length(status)
        keep = bool(parser.should_keep_alive())
        self._head = read(status, self._headers, keep, self._settings.expire_s)
        self._in_body = True
        if exchange is not None:
            exchange.got_head(self._head)

    def _check_length(self, status: int) -> None:
        """How the body ends. The parser refuses two lengths, and a length with chunks."""
        names = {name for name, _ in self._headers}
        for name, value in self._headers:
            if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                raise BadAnswer(f"transfer-encoding {value[:40]!r}: only chunked is understood")
        framed = b"content-length" in names or b"transfer-encoding" in names
        self._until_close = not framed and status not in (204, 304)

    def on_message_complete(self) -> None:
        self._ended = self._in_body

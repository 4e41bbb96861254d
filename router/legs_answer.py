"""Leg answer: one answer that does not come whole behind a head that is known.

Edge: httptools' parser, which calls it back, and no socket. legs_connection.py feeds it and reads
what came of it. Behind a head that was read before plain chunks need no parser; it is begun, with
that head, when anything else comes. Open it to change what counts as a valid answer.

    feed -> head, body, ...  -> ended        or broken: nothing behind that can be trusted
"""

from __future__ import annotations

import httptools

from .legs_chunks import LAST, closed, held
from .legs_heads import CHUNKED, END, LENGTH, NONE, Head, Pairs, read
from .legs_settings import LegSettings

SLACK = 8192  # bytes of status lines and 1xx heads, on top of the cap of the head itself


class BadAnswer(Exception):
    """Raised inside a parser callback: the answer breaks one of our rules."""


class Answer:
    """What came of it so far. `end()` it: the parser holds it."""

    until_close = False  # its end is the connection's
    ended = glued = False  # it is whole; and something came behind it
    broken = ""  # why it is no answer
    _head_bytes = _lines = _informational = _silent_bytes = 0
    _headers: Pairs
    _parts: list[bytes]  # of the body, of one read

    def __init__(self, settings: LegSettings, head: Head = NONE, raw: bytes = b"") -> None:
        """`head`: where its first bytes, `raw`, are one of chunks that was read before."""
        self._settings, self._raw = settings, raw
        self.head = head  # of the answer itself, never an informational one
        self.between = head is not NONE  # the last read ended where a chunk may begin
        self._parser: httptools.HttpResponseParser | None = None

    def feed(self, data: bytes) -> bytes:
        """More of it, behind `raw`; returns what of that is body."""
        parser = self._parser
        if parser is None:
            if self.between and (body := self._plain(data)) is not None:
                return body
            parser = self._begin()
        parts, before = self._parts, self.head
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self.broken = str(error.__context__ or error)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.broken = f"not a valid answer: {error}"
        if not parts:
            self._silent_bytes += len(data)
            self.between = before is NONE and self.head.chunked and data.endswith(END)
            return b""
        self.between = self.head.chunked and closed(data, parts[-1])
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._silent_bytes = 0
        return body

    def _plain(self, data: bytes) -> bytes | None:
        """The same of whole chunks, and of no more than the end behind them; None of all else."""
        if data.endswith(LAST):
            body = held(data[: -len(LAST)]) if len(data) > len(LAST) else b""
            if body is not None:
                self.ended = True
                return body
        return held(data) if data else b""

    def _begin(self) -> httptools.HttpResponseParser:
        """A parser, which has to read the head too."""
        self._headers, self._parts = [], []
        self.on_body = self._parts.append  # the parser's callback: no step of ours for each chunk
        self._parser = parser = httptools.HttpResponseParser(self)
        if self._raw:
            self.head = NONE
            parser.feed_data(self._raw)
        return parser

    def fault(self, received_bytes: int) -> str:
        """Why it cannot go on; "" where it can. `received_bytes` of all of it."""
        most = self._settings.head_bytes
        if self.broken:
            return self.broken
        if self.head is NONE:
            floods = received_bytes > most + SLACK
            return f"{received_bytes} bytes and no end of the head" if floods else ""
        if self._silent_bytes > most:
            return f"{self._silent_bytes} bytes of framing without an end"
        return ""

    def end(self) -> None:
        """Nothing more is fed: it and its parser let go of each other."""
        self._parser = None

    # -- httptools callbacks

    def on_message_begin(self) -> None:
        if self.ended:
            self.glued = True
            raise BadAnswer("bytes after the end of the answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += 1
        self._head_bytes += len(name) + len(value) + 4
        if self._lines > self._settings.head_lines:
            raise BadAnswer(f"more than {self._settings.head_lines} headers")
        if self._head_bytes > self._settings.head_bytes:
            raise BadAnswer(f"head longer than {self._settings.head_bytes} bytes")
        if self.head is NONE:  # trailers are counted, not kept
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
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
        self.head = read(status, self._headers, keep, self._settings.expire_s)

    def _check_length(self, status: int) -> None:
        """How the body ends. The parser refuses two lengths, and a length with chunks."""
        told = dict(self._headers)
        if CHUNKED in told:
            for name, value in self._headers:
                if name == CHUNKED and value.strip().lower() != b"chunked":
                    raise BadAnswer(f"transfer-encoding {value[:40]!r}: only chunked is understood")
        framed = CHUNKED in told or LENGTH in told
        self.until_close = not framed and status not in (204, 304)

    def on_message_complete(self) -> None:
        self.ended = self.head is not NONE

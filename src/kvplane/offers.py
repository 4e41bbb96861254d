"""Offers: a client that offers another protocol gets the one it speaks.

Door. Between uvicorn's protocol and connections.py. Java's HTTP client and `curl --http2` offer h2c
with their first request, `Connection: Upgrade, HTTP2-Settings`. The parser takes that for the last
of HTTP and leaves the body unread; so the same head is read again without the offer, and what
follows it is the body. Open it when a protocol is to be changed to.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

OFFERED = {b"upgrade", b"http2-settings"}  # lines of the head that go, and words of `connection`


class Declining(HttpToolsProtocol, ABC):
    """uvicorn's protocol that changes to no other."""

    why: ClassVar[tuple[int, str]] = (400, "CONNECT is not served: this is no proxy")

    _why: tuple[int, str] | None = None  # a head was refused, though the parser took it
    _offered = False  # the head that was just read holds an offer; nothing is begun

    def data_received(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError as error:
                self.send_400_response(f"this is no valid HTTP/1.1: {error}")
                return
            except httptools.HttpParserUpgrade as offer:
                data = self._head() + data[offer.args[0] :]

    def on_headers_complete(self) -> None:
        self._offered = self.parser.should_upgrade()
        if not self._offered:
            self.begin()
        elif self.parser.get_method() == b"CONNECT":
            self._why = self.why
            raise ValueError("refused")  # the parser says that to send_400_response

    @abstractmethod
    def begin(self) -> None:
        """A head is whole: its request begins. connections.py does that."""

    def _head(self) -> bytes:
        """What was read, without the offer, for a parser that knows nothing of it."""
        version = self.parser.get_http_version().encode()
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)
        kept = [(name, _kept(name, value)) for name, value in self.headers if name not in OFFERED]
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # of httptools before 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return line + b"".join(b"%s: %s\r\n" % pair for pair in kept) + b"\r\n"


def _kept(name: bytes, value: bytes) -> bytes:
    if name != b"connection":
        return value
    words = [word.strip() for word in value.split(b",")]
    return b", ".join(word for word in words if word.lower() not in OFFERED)

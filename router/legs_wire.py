"""Leg wire: an engine's address and the bytes of a request's head.

Pure: text in, bytes out. Used by legs.py and dispatch.py.
Open it to change which headers reach an engine or what is refused as a header.

    http://[::1]:30000 -> Origin("::1", 30000)      Host: [::1]:30000
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

import msgspec

Headers = Iterable[tuple[bytes, bytes]]

NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
TARGET = re.compile(rb"/[\x21-\x7e]*")
METHOD = re.compile(rb"(GET|POST|PUT|DELETE|PATCH)")

# Taken over from the client on both legs; everything else, all hop-by-hop and all
# x-override-* headers (SGLang lets them replace the bootstrap triple) stay behind.
FORWARDED = frozenset(
    {b"authorization", b"traceparent", b"tracestate", b"x-correlation-id", b"x-smg-routing-key"}
)
# Of the engine's answer: what belongs to our own connection with the client, or to us.
HELD_BACK = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer"}
    | {b"transfer-encoding", b"upgrade", b"date", b"server", b"x-request-id"}
)


class Origin(msgspec.Struct, frozen=True, cache_hash=True):
    """Where an engine listens. `host` holds no brackets."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # path in front of every route, no trailing slash

    @staticmethod
    @lru_cache(maxsize=4096)  # asked for each leg; engines are few
    def parse(url: str) -> Origin:
        """Of a base URL. Raises ValueError that names what is wrong."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url {url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url {url!r}: must be http://host:port or https://host:port")
        if parts.query or parts.fragment or parts.username:
            raise ValueError(f"url {url!r}: must hold no user, query or fragment")
        tls = parts.scheme == "https"
        return Origin(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@lru_cache(maxsize=4096)  # the same few routes of the same few engines, over and over
def request_line(method: str, origin: Origin, target: str) -> bytes:
    """The first line and the host. Raises ValueError for what could split the request."""
    path = (origin.prefix + target).encode("latin-1", "replace")
    if not METHOD.fullmatch(method.encode("latin-1", "replace")):
        raise ValueError(f"method {method!r}: not one that is sent to engines")
    if not TARGET.fullmatch(path):
        raise ValueError(f"path {target!r}: must start with '/' and hold no blank or control byte")
    return b"%s %s HTTP/1.1\r\nhost: %s\r\n" % (method.encode(), path, str(origin).encode())


def header_lines(headers: Headers) -> bytes:
    """Each header as a line. Raises ValueError for a name or value that is none."""
    found = []
    for name, value in headers:
        if not NAME.fullmatch(name) or not VALUE.fullmatch(value):
            raise ValueError(f"header {name!r}: name or value holds a byte that is not allowed")
        found.append(b"%s: %s\r\n" % (name, value))
    return b"".join(found)


def forwarded(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The client's headers that an engine may see."""
    return [(name, value) for name, value in headers if name.lower() in FORWARDED]


def beyond_us(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """A client's headers (names in small letters) without those its `connection` keeps to us."""
    held = {word for name, value in headers if name == b"connection" for word in _words(value)}
    held &= FORWARDED
    return [pair for pair in headers if pair[0] not in held] if held else headers


def passed_back(headers: Headers, stream: bool = False) -> list[tuple[bytes, bytes]]:
    """The engine's headers that the client may see; `connection` may name more to hold back.

    A stream's length stays behind too: where it breaks, what is said of that comes on top.
    """
    held, more = HELD_BACK, {b"content-length"} if stream else set()
    for name, value in headers:
        if name == b"connection":
            more |= _words(value)
    if more:
        held = HELD_BACK | more
    return [(n, v) for n, v in headers if n not in held and not n.startswith(b"x-kvplane-")]


def _words(value: bytes) -> set[bytes]:
    return {word.strip().lower() for word in value.split(b",")}

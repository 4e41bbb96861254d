"""Framing: the bytes around an answer's body.

Pure. cycle.py decides how a body ends and sends what is made here. Open it to change how a head or
a part of a body is written.

    200 + lines  ->  HTTP/1.1 200 OK | date: ... | content-length: 9 |      "hello"  ->  5 | hello
"""

from __future__ import annotations

from collections.abc import Sequence

Lines = list[tuple[bytes, bytes]]
Headers = Sequence[tuple[bytes, bytes]]

CLOSE = (b"connection", b"close")
BARE = (204, 304)  # statuses without a body, nor any framing
END = b"0\r\n\r\n"  # of a chunked body
_line = b": ".join


def head(first: bytes, lines: Headers) -> bytes:
    """Of an answer; `first` is its first line, without the end of that. Raises RuntimeError for
    what would split it."""
    found = b"\r\n".join((first, *map(_line, lines))) + b"\r\n\r\n"
    breaks = len(lines) + 2
    if found.count(b"\n") != breaks or found.count(b"\r") != breaks or b"\0" in found:
        raise RuntimeError("a header holds a byte that would split the answer")
    return found


def written(lines: Headers) -> bytes:
    """Lines of a head, for whoever sends the same ones again and again."""
    return b"".join([b"%b: %b\r\n" % pair for pair in lines])


def chunk(data: bytes) -> bytes:
    """A part of a chunked body; nothing of nothing, which would be its end."""
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""

"""Repeats: a request whose head says again what the one before it said.

Door. Between connections.py and doors.py. A client that keeps its connection sends the same head
with every request, but for the length of the body. What the parser made of it is true again, byte
for byte: so bytes are compared, a tenth of the work of reading them, and the body is cut out by its
length. Whatever differs is the parser's. Open it to change what counts as the same.

    POST /rank HTTP/1.1 | host: a | content-length: 9731 | accept: */*      body
    ------------- before ------------------------- ~~~~ --- after ----      9731 bytes
"""

from __future__ import annotations

import re

import msgspec

from kvplane.connections import Connection
from kvplane.cycle import Cycle, Direct

TRIES = 3  # heads in turn that differ from the one before; then nobody compares any more
DIGITS = 15  # of a length
MOST_BYTES = 4096  # of a head that is kept; connections may idle long

_LENGTH = re.compile(rb"\r\ncontent-length: *", re.IGNORECASE)
# What a length alone does not say, or what has to be answered before the body.
_UNUSUAL = re.compile(rb"\r\n(?:transfer-encoding|expect|upgrade)[ \t]*:", re.IGNORECASE)


class Repeat(msgspec.Struct, frozen=True, gc=False):
    """One head that was read."""

    before: bytes  # the length's digits
    after: bytes
    method: bytes
    url: bytes
    version: str
    headers: tuple[tuple[bytes, bytes], ...]
    at: int  # of the length, among them
    direct: Direct | None  # who answers it without ASGI

    def body(self, data: bytes) -> tuple[bytes, int] | None:
        """The length that is told here, and where the body begins; None where it is another head,
        or not all of one."""
        if not data.startswith(self.before):
            return None
        start = len(self.before)
        end = data.find(b"\r", start, start + DIGITS + 1)
        if end < 0 or not (told := data[start:end]).isdigit():
            return None
        return (told, end + len(self.after)) if data.startswith(self.after, end) else None


def repeat(data: bytes, cycle: Cycle, direct: Direct | None) -> Repeat | None:
    """Of what a request began with, all of whose head is in it; None where it is better read anew:
    a connection that ends, a body without a length, lines that end or go on in odd ways."""
    end = data.find(b"\r\n\r\n", 0, MOST_BYTES) + 4
    head = data[:end]
    if not 4 <= end <= MOST_BYTES or not cycle.keep_alive or _UNUSUAL.search(head):
        return None
    lengths = _LENGTH.findall(head)
    lines = len(cycle.headers) + 2
    if len(lengths) != 1 or head.count(b"\r\n") != lines or head.count(b"\n") != lines:
        return None
    names = [name for name, _ in cycle.headers]
    told = _LENGTH.search(head)
    if told is None or names.count(b"content-length") != 1:
        return None
    at = names.index(b"content-length")
    digits = cycle.headers[at][1]
    if not (digits.isdigit() and head.startswith(digits + b"\r\n", told.end())):
        return None
    after = head[told.end() + len(digits) :]
    return Repeat(
        head[: told.end()], after, cycle.method, cycle.url, cycle.version,
        tuple(cycle.headers), at, direct,
    )  # fmt: skip


class Repeating(Connection):
    """A connection that reads no head twice."""

    _known: Repeat | None = None
    _tries = TRIES
    _owed = 0  # bytes of a body that still come, past the parser

    def data_received(self, data: bytes) -> None:
        if self.writer.deaf:
            return
        if self._owed:
            data = self._more(data)
            if not data:
                return
        begins = self._tries and self.turn is None and not self._within
        if begins and self._known is not None and self._again(self._known, data):
            return
        before = self.newest
        super().data_received(data)
        if begins and self.newest is not None and self.newest is not before:
            self._remember(data, self.newest)

    def _remember(self, data: bytes, cycle: Cycle) -> None:
        """Only of a request that came alone."""
        if self._known is not None:
            self._tries -= 1  # it was another one
        if not self.ahead:
            self._known = repeat(data, cycle, self.straight(cycle))

    def _again(self, known: Repeat, data: bytes) -> bool:
        """Begin the request that came, if its head is the known one. What follows it, or lacks a
        body, is the parser's too."""
        found = known.body(data)
        if found is None:
            return False
        told, first = found
        size, body = int(told), data[first:]
        if not size or len(body) > size:
            return False
        headers = list(known.headers)
        headers[known.at] = b"content-length", told
        cycle = Cycle(self, known.method, known.url, known.version, headers)
        self.newest, self._tries, self._quiet = cycle, TRIES, 0
        self._headed, self.headers = True, []
        if len(body) == size:
            cycle.came_whole(body)
        else:
            self._within, self._owed = True, size
            if body:
                self._more(body)
        self.start(cycle, known.direct)
        return True

    def _more(self, data: bytes) -> bytes:
        """A part of a body; what follows it."""
        part = data[: self._owed]
        self._owed -= len(part)
        self.on_body(part)
        if not self._owed:
            self.on_message_complete()
        return data[len(part) :]

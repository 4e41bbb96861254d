"""Leg heads: what the head of an answer says, and which heads were read before.

Pure. legs_connection.py asks. The parser alone says what a valid head is; engines say the same one
over and over but for its length (and a date, once a second), so one that was taken once is known by
its other bytes, and an answer that is whole behind it needs no parser. The head of one in chunks
is known by all its bytes. Open it to change what is read off a head, or which are remembered.

    HTTP/1.1 200 OK | content-type: application/json | content-length: | 413 |      413: any number
"""

from __future__ import annotations

import re

import msgspec

from .legs_wire import passed_back

Pairs = list[tuple[bytes, bytes]]

END = b"\r\n\r\n"
LENGTH = b"content-length"
CHUNKED = b"transfer-encoding"  # the parser takes no other than chunked
BEFORE = b"content-length: "
MOST_HEADS = 512  # remembered; each is some engine's way to say 200, in one second
MOST_BYTES = 2048  # of one


class Head(msgspec.Struct):
    """Of one answer, or of many that differ in their length alone."""

    status: int
    headers: Pairs  # names in lower case
    kept_s: float = 0.0  # how long its connection may idle; 0 = it is not used again
    stream: bool = False  # server-sent events
    chunked: bool = False
    _passed: Pairs | None = None  # but for the length
    _length: bytes = b""  # that is passed on where none is given

    def of_length(self, length: bytes) -> Pairs:
        """The headers of one answer; `length` as its own head has it, b"" where `headers` do."""
        if not length:
            return self.headers
        return [(n, length if n == LENGTH else value) for n, value in self.headers]

    def passed_back(self, length: bytes = b"") -> Pairs:
        """A new list of what the client may see of it; its length comes last."""
        if self._passed is None:
            passed = passed_back(self.headers, self.stream)
            self._length = next((value for name, value in passed if name == LENGTH), b"")
            self._passed = [pair for pair in passed if pair[0] != LENGTH]
        if not self._length:
            return self._passed.copy()
        return [*self._passed, (LENGTH, length or self._length)]


NONE = Head(0, [])  # as long as none is complete


def read(status: int, headers: Pairs, keep: bool, usual_s: float) -> Head:
    """What a complete head says. `keep`: it lets its connection be used again, `usual_s` long where
    it says no other time."""
    told = dict(reversed(headers))  # the first of a name counts
    idle_s = kept_s(headers, usual_s) if keep else 0.0
    stream = told.get(b"content-type", b"").startswith(b"text/event-stream")
    return Head(status, headers, idle_s, stream, CHUNKED in told)


def kept_s(headers: Pairs, usual_s: float) -> float:
    """How long this connection may idle: `usual_s`, or one second below the engine's own limit.

    keep-alive: timeout=3 -> 2 s        keep-alive: max=0 -> 0 s: do not keep it
    """
    for name, value in headers:
        if name == b"keep-alive":
            if re.search(rb"\bmax=0\b", value):
                return 0.0
            if found := re.search(rb"\btimeout=(\d{1,9})", value):
                return max(0.0, min(usual_s, float(found[1]) - 1.0))
    return usual_s


class Heads:
    """Heads that the parser took: one of these for connections of the same limits."""

    def __init__(self) -> None:
        self._known: dict[bytes, Head] = {}
        self._last = END, 0, END, NONE  # found last: before its length, how long, behind it
        self._chunked: dict[bytes, Head] = {}  # those of chunks, by all their bytes
        self._opening = END, NONE  # of them, found last

    def whole(self, data: bytes) -> tuple[Head, bytes, bytes] | None:
        """Head, length and body of an answer whose head is known and which is all of `data`."""
        before, at, behind, head = self._last
        if data.startswith(before):
            length, found, body = data[at:].partition(behind)
            if found and length == b"%d" % len(body):
                return head, length, body
        return None if data.startswith(self._opening[0]) else self._another(data)

    def opening(self, data: bytes) -> tuple[bytes, Head]:
        """What `data` begins with where that is a known head of chunks, whose body follows."""
        raw, head = self._opening
        if head is NONE or not data.startswith(raw):
            raw = data[: data.find(END) + 4]
            head = self._chunked.get(raw, NONE)
            if head is NONE:
                return b"", NONE
            self._opening = raw, head
        return raw, head

    def _another(self, data: bytes) -> tuple[Head, bytes, bytes] | None:
        """The same of one that is not like the last."""
        end = data.find(END) + 4
        at = data.find(BEFORE, 0, end) + len(BEFORE)
        stop = data.find(b"\r", at, end)
        before, behind = data[:at], data[stop:end]
        head = self._known.get(before + behind, NONE)
        if head is NONE:
            return None
        self._last, length = (before, at, behind, head), data[at:stop]
        return (head, length, data[end:]) if length == b"%d" % (len(data) - end) else None

    def learn(self, data: bytes, head: Head) -> None:
        """Remember what the parser made of the begin of `data`, if its bytes say where it ends and
        that nothing but its length may differ."""
        end = data.find(END) + 4
        if end > MOST_BYTES or not _plain(data[:end], head):
            return
        if head.chunked:
            _keep(self._chunked, data[:end], head)
            return
        at = data.find(BEFORE, 0, end) + len(BEFORE)
        stop = data.find(b"\r", at, end)
        line = data[at - len(BEFORE) - 2 : at] == b"\r\n" + BEFORE
        if line and data[at:stop].isdigit():
            _keep(self._known, data[:at] + data[stop:end], head)


def _keep(known: dict[bytes, Head], text: bytes, head: Head) -> None:
    if len(known) >= MOST_HEADS:
        known.clear()
    known[text] = head


def _plain(text: bytes, head: Head) -> bool:
    """Nothing in front of it, one framing, and no line that ends or goes on in another way than
    most: then every reader finds the same end of it."""
    if head.status not in (200, 201, 202) or not text.startswith(b"HTTP/1.1 %d " % head.status):
        return False  # or a 1xx is in front
    names = [name for name, _ in head.headers]
    if names.count(LENGTH) + names.count(CHUNKED) != 1:
        return False
    ends = text.count(b"\r\n")
    return ends == text.count(b"\r") == text.count(b"\n") == len(names) + 2

"""Leg bytes: any answer, cut anywhere, against an independent parser; and bytes that are none.

No sockets: the connection is fed by hand, so that thousands of answers take a second.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.wait import until

from kvplane.router.legs_chunks import whole
from kvplane.router.legs_connection import BRISK_READS, Connection
from kvplane.router.legs_errors import Cut, LegError, Malformed
from kvplane.router.legs_exchange import Bell, Exchange
from kvplane.router.legs_heads import MOST_HEADS, Heads
from kvplane.router.legs_settings import LegSettings
from kvplane.router.legs_wire import Origin, passed_back

LIMITS = LegSettings()
MOST_HELD = 4 * 1024 * 1024


class Wire:
    """A transport that goes nowhere."""

    closing = False

    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.closing = True

    def get_write_buffer_size(self) -> int:
        return 0


@dataclass
class Came:
    """What became of one exchange."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    complete: bool
    error: type[LegError] | None
    kept: bool  # the connection may carry another


def feed(parts: list[bytes], eof: bool = True, heads: Heads | None = None) -> Came:
    kept: list[Connection] = []
    connection = Connection(LIMITS, lambda: 0.0, kept.append, lambda _: None, heads)
    wire = Wire()
    connection.connection_made(cast(asyncio.Transport, wire))
    leg = Exchange(Origin("h", 1), b"", b"", LIMITS, Bell())
    connection.send(leg)
    for part in parts:
        if wire.closing:
            break
        connection.data_received(part)
    usable = bool(kept) and not wire.closing
    if eof:
        connection.connection_lost(None)
    error = type(leg.error) if leg.error is not None else None
    return Came(leg.status, leg.headers, leg.take(), leg.complete, error, usable)


def h11_says(raw: bytes) -> Came:
    """The same answer, read by another."""
    one = h11.Connection(h11.CLIENT)
    one.send(
        h11.Request(method="POST", target="/", headers=[("host", "h"), ("content-length", "0")])
    )
    one.send(h11.EndOfMessage())
    one.receive_data(raw)
    one.receive_data(b"")
    status, headers, body = 0, [], b""
    while True:
        event = one.next_event()
        if isinstance(event, h11.Response):
            status, headers = event.status_code, list(event.headers)
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            return Came(status, headers, body, True, None, False)
        elif not isinstance(event, h11.InformationalResponse):
            raise AssertionError(f"the strategy made no valid answer: {event}")


TOKEN = st.text("abcdefghijklmnopqrstuvwxyzABCXYZ0123456789-_!#$", min_size=1, max_size=12)
TEXT = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=0, max_size=30)
OURS = {"content-length", "transfer-encoding", "connection", "upgrade", "trailer", "host", "te"}
HEADER = st.tuples(TOKEN.filter(lambda name: name.lower() not in OURS), TEXT)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """A valid answer in any framing."""
    status = draw(st.sampled_from([200, 201, 202, 299, 400, 404, 429, 500, 503, 599]))
    lines = [f"{name}: {value}".encode() for name, value in draw(st.lists(HEADER, max_size=6))]
    body = draw(st.binary(max_size=300))
    framing = draw(st.sampled_from(["length", "chunks", "close"]))
    end = body
    if framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
    elif framing == "chunks":
        lines.append(b"Transfer-Encoding: chunked")
        end = _chunked(draw, body)
    head = b"HTTP/1.1 %d %s\r\n" % (status, draw(TEXT).encode())
    early = b"HTTP/1.1 103 Early\r\nlink: </a>\r\n\r\n" * draw(st.integers(0, 2))
    return early + head + b"".join(line + b"\r\n" for line in lines) + b"\r\n" + end


def _chunked(draw: st.DrawFn, body: bytes) -> bytes:
    found, at = b"", 0
    while at < len(body):
        size = draw(st.integers(1, len(body) - at))
        more = draw(st.sampled_from([b"", b";a=b", b';q="x y"']))
        found += b"%x%s\r\n%s\r\n" % (size, more, body[at : at + size])
        at += size
    return found + b"0\r\n" + b"x-sum: 1\r\n" * draw(st.integers(0, 2)) + b"\r\n"


@settings(max_examples=150)
@given(answers(), st.lists(st.floats(0, 1), max_size=6))
def test_any_valid_answer_cut_anywhere_is_what_another_parser_reads(
    raw: bytes, places: list[float]
) -> None:
    expected = h11_says(raw)
    cuts = sorted({0, len(raw), *(int(place * len(raw)) for place in places)})
    came = feed([raw[a:b] for a, b in pairwise(cuts)])
    assert came.error is None and came.complete
    assert (came.status, came.body) == (expected.status, expected.body)
    assert came.headers == [(name.lower(), value) for name, value in expected.headers]


@settings(max_examples=150)
@given(answers(), st.integers(0, 5), st.lists(st.floats(0, 1), max_size=2))
@example(b"HTTP/1.1 200 OK\r\nContent-Type: a\r\ncontent-length: 2\r\n\r\nhi", 1, [])
def test_an_answer_whose_head_was_read_before_is_read_as_if_it_were_new(
    raw: bytes, longer: int, places: list[float]
) -> None:
    heads = Heads()
    raw = raw.replace(b"Content-Length:", b"content-length:")
    assert feed([raw], heads=heads) == feed([raw]) == feed([raw], heads=heads)
    head, mark, rest = raw.partition(b"content-length: ")
    if mark:  # the same with another body
        length = rest[: rest.index(b"\r")]
        raw = head + mark + b"%d" % (int(length) + longer) + rest[len(length) :] + b"x" * longer
    cuts = sorted({0, len(raw), *(int(place * len(raw)) for place in places)})
    parts = [raw[a:b] for a, b in pairwise(cuts)]
    assert feed(parts, heads=heads) == feed(parts)


LEARNT = b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 5\r\nc: d\r\n\r\n"
LIKE_IT = [
    b"hell", b"hello!", b"", b"hello" + LEARNT + b"again",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 5\r\nc: d\r\ncontent-length: 5\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 05\r\nc: d\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: +5\r\nc: d\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: \r\nc: d\r\n\r\n",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 5\nc: d\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 5, 5\r\nc: d\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\na: b\r\n" + b"content-length: 5" * 2 + b"\r\nc: d\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\na: b\r\ncontent-length: 5\r\nc: d\r\n\r\nhello\r\n\r\n",
    b"HTTP/1.1 204 OK\r\na: b\r\ncontent-length: 5\r\nc: d\r\n\r\nhello",
]  # fmt: skip


@pytest.mark.parametrize(
    "raw", [end if end.startswith(b"HTTP") else LEARNT + end for end in LIKE_IT]
)
def test_what_only_looks_like_a_known_answer_is_read_as_any_other(raw: bytes) -> None:
    heads = Heads()
    assert feed([LEARNT + b"hello"], heads=heads).complete
    assert heads.whole(LEARNT + b"hello") is not None
    assert feed([raw], heads=heads) == feed([raw])


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 103 Early\r\ncontent-length: 2\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 No\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 No\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n",
        b"HTTP/1.1 103 Early\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2 \r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nx: %b\r\ncontent-length: 2\r\n\r\nhi" % (b"a" * 2048),
    ],
)
def test_a_head_that_is_not_plain_is_not_remembered(raw: bytes) -> None:
    heads = Heads()
    feed([raw], heads=heads)
    assert heads.whole(raw) is None and not heads.opening(raw)[0]


def test_before_any_head_is_known_none_is() -> None:
    for raw in (b"", b"content-length: 5\r\n\r\nhello", b"\r\n\r\n", LEARNT + b"hello"):
        assert Heads().whole(raw) is None


def test_heads_of_several_engines_are_known_side_by_side() -> None:
    heads, bodies = Heads(), (b"hello", b"hello, you", b"")
    head = b"HTTP/1.1 %d OK\r\nserver: %d\r\ncontent-length: %d\r\na: b\r\n\r\n%b"
    for known in (False, True, True):
        for engine, status in enumerate((200, 201, 200, 202)):
            for body in bodies:
                raw = head % (status, engine, len(body), body)
                assert (heads.whole(raw) is not None) == known or body is not bodies[0]
                assert feed([raw], heads=heads) == feed([raw])
                found = heads.whole(raw)
                assert found is not None and found[0].status == status and found[2] == body


def test_heads_that_are_remembered_are_bounded() -> None:
    heads = Heads()
    for date in range(MOST_HEADS + 7):
        raw = b"HTTP/1.1 200 OK\r\ndate: %d\r\ncontent-length: 2\r\n\r\nhi" % date
        assert feed([raw], heads=heads).kept and heads.whole(raw) is not None
        raw = b"HTTP/1.1 200 OK\r\ndate: %d\r\ntransfer-encoding: chunked\r\n\r\n" % date
        assert feed([raw], heads=heads).status and heads.opening(raw)[0] == raw
    assert len(heads._known) <= MOST_HEADS and len(heads._chunked) <= MOST_HEADS


@settings(max_examples=100)
@given(answers(), st.data())
def test_a_valid_answer_cut_short_is_never_taken_for_a_whole_one(
    raw: bytes, data: st.DataObject
) -> None:
    until_close = b"Content-Length:" not in raw and b"Transfer-Encoding:" not in raw
    at = data.draw(st.integers(0, len(raw) - 1))
    came = feed([raw[:at]])
    if until_close and came.status:
        return  # ends where it ends: nothing can tell
    whole = h11_says(raw)
    assert came.error is Cut and not came.complete
    assert whole.body.startswith(came.body)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
CORPUS = [
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nhello",
]


@settings(max_examples=300)
@given(st.sampled_from(CORPUS), st.lists(st.tuples(st.integers(0, 80), st.binary(max_size=3)),
       min_size=1, max_size=4), st.integers(1, 80))  # fmt: skip
@example(CORPUS[0], [(0, b"")], 1)
def test_mutated_bytes_are_a_result_or_one_of_our_errors(
    raw: bytes, changes: list[tuple[int, bytes]], step: int
) -> None:
    for place, put in changes:
        at = place % len(raw)
        raw = raw[:at] + put + raw[at + 1 :]
    came = feed([raw[at : at + step] for at in range(0, len(raw), step)])
    assert came.complete != (came.error is not None)
    for name, value in passed_back(came.headers):
        assert not any(byte in b"\r\n\0" for byte in name + value), "it could split our answer"
    assert 0 <= came.status < 600
    assert len(came.body) <= len(raw)


@settings(max_examples=100)
@given(st.binary(max_size=2000), st.integers(1, 500))
def test_noise_is_one_of_our_errors(raw: bytes, step: int) -> None:
    came = feed([raw[at : at + step] for at in range(0, len(raw), step)])
    assert came.error in (Cut, Malformed)
    assert not came.kept


def frames(data: bytes) -> bytes:
    """What chunks hold; each must be written in the one plain way."""
    found = b""
    while data:
        size = data[: data.index(b"\r\n")]
        at = len(size) + 2 + int(size, 16)
        assert size == b"%x" % int(size, 16) != b"0" and data[at : at + 2] == b"\r\n"
        found, data = found + data[len(size) + 2 : at], data[at + 2 :]
    return found


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN = st.binary(min_size=1, max_size=40).map(lambda data: b"%x\r\n%b\r\n" % (len(data), data))
ODD = st.sampled_from(
    [b"3;a=b\r\nabc\r\n", b"A\r\n0123456789\r\n", b"003\r\nabc\r\n", b"4\r\n\r\n\r\n\r\n",
     b"6\r\n1\r\na\r\n\r\n", b"5\r\nhello\r\n"]
)  # fmt: skip


@settings(max_examples=200)
@given(
    st.lists(PLAIN | ODD, max_size=8),
    st.lists(st.floats(0, 1), max_size=8),
    st.lists(st.booleans(), min_size=1),
)
@example([b"5\r\nhello\r\n", b"6\r\n, you!\r\n"], [0.85, 0.95], [True])
def test_chunks_handed_on_as_they_are_hold_what_another_parser_reads_however_cut(
    chunks: list[bytes], places: list[float], takes: list[bool]
) -> None:
    """Also where whoever takes them does not, now and then; whether its head is known or not."""
    raw = STREAM + b"".join(chunks) + b"0\r\n\r\n"
    edges = [len(STREAM + b"".join(chunks[:at])) for at in range(len(chunks) + 1)]
    cuts = sorted({0, len(raw), *edges[::2], *(int(place * len(raw)) for place in places)})
    kept: list[Connection] = []
    connection = Connection(LIMITS, lambda: 0.0, kept.append, lambda _: None)
    connection.connection_made(cast(asyncio.Transport, Wire()))
    got: list[bytes] = []

    def taken(data: bytes) -> bool:
        if take := takes[len(got) % len(takes)]:
            got.append(data)
        return take

    for _ in ("its head is new", "its head is known"):
        got.clear()
        kept.clear()
        leg = Exchange(Origin("h", 1), b"", b"", LIMITS, Bell())
        connection.send(leg)
        for a, b in pairwise(cuts):
            connection.data_received(raw[a:b])
            got.append(leg.take())
            leg.tap, leg.relay = taken, lambda chunks: taken(frames(chunks))
        assert leg.complete and kept and leg.received_bytes == len(raw)
        assert b"".join(got) == h11_says(raw).body


KNOWN = Heads()  # of these two


@settings(max_examples=200)
@given(
    st.sampled_from([STREAM, CHUNKED]),
    st.lists(PLAIN | ODD, max_size=6),
    st.sampled_from([b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"00\r\n\r\n", b"0;a\r\n\r\n", b"", b"x"]),
    st.lists(st.floats(0, 1), max_size=6),
)
@example(STREAM, [b"3\r\n0\r\n\r\n"], b"0\r\n\r\n", [0.9])
@example(STREAM, [b"3\r\n0\r\n\r\n"], b"", [])
@example(STREAM, [b"5\r\nhello\r\n"], b"0\r\n\r\n0\r\n\r\n", [])
def test_chunks_behind_a_known_head_are_read_as_if_it_were_new(
    head: bytes, chunks: list[bytes], end: bytes, places: list[float]
) -> None:
    raw = head + b"".join(chunks) + end
    edges = [len(head + b"".join(chunks[:at])) for at in range(len(chunks) + 1)]
    cuts = sorted({0, len(raw), *edges[::2], *(int(place * len(raw)) for place in places)})
    parts = [raw[a:b] for a, b in pairwise(cuts)]
    assert feed(parts, heads=KNOWN) == feed(parts)
    assert feed([raw], heads=KNOWN) == feed([raw])
    assert KNOWN.opening(head + b"x")[0] == head


@settings(max_examples=200)
@given(
    st.lists(
        st.sampled_from([b"1", b"2", b"02", b"a2", b"4\r\n4", b"4\r\n;4", b"\r\n" * 2, b"x"])
        | st.integers(1, 33).map(lambda many: (b"1\r\n5\r\n" * many)[: 5 * many]),
        min_size=1,
        max_size=6,
    ),
    st.floats(0, 1),
    st.sampled_from([b"%x", b"0%x", b"%X"]),
)
@example([b"a2", b"5\r\nhello\r\n" * 16 + b"xx"], 0.06, b"%x")
def test_chunks_that_hold_sizes_of_chunks_are_never_taken_for_their_framing(
    held: list[bytes], place: float, size: bytes
) -> None:
    """A size that looks like what is before it, where a read ends: more is to come of it."""
    body = b"".join([size % len(one) + b"\r\n%b\r\n" % one for one in held]) + b"0\r\n\r\n"
    lines = [at + 2 for at in range(len(body)) if body.startswith(b"\r\n", at)]
    first = int(place * (len(lines) - 1))
    for cuts in ({0, *lines[first::2], len(body)}, {0, *lines}):
        parts = [body[a:b] for a, b in pairwise(sorted(cuts))]
        for heads in (Heads(), KNOWN):
            came = feed([STREAM, *parts], heads=heads)
            assert came.body == b"".join(held) and came.complete and came.kept
            assert b"".join(_handed_on([STREAM, *parts], heads)) == came.body


def _handed_on(parts: list[bytes], heads: Heads) -> list[bytes]:
    """What somebody gets who takes whole chunks as they are."""
    connection = Connection(LIMITS, lambda: 0.0, lambda _: None, lambda _: None, heads)
    connection.connection_made(cast(asyncio.Transport, Wire()))
    leg, got = Exchange(Origin("h", 1), b"", b"", LIMITS, Bell()), list[bytes]()
    connection.send(leg)
    for part in parts:
        connection.data_received(part)
        got.append(leg.take())
        leg.relay = lambda chunks: got.append(frames(chunks)) is None
    return got


def test_parts_that_somebody_takes_never_reach_the_parser() -> None:
    connection = Connection(LIMITS, lambda: 0.0, lambda _: None, lambda _: None)
    connection.connection_made(cast(asyncio.Transport, Wire()))
    leg, got = Exchange(Origin("h", 1), b"", b"", LIMITS, Bell()), list[bytes]()
    connection.send(leg)
    connection.data_received(STREAM)
    leg.tap, leg.relay = None, lambda chunks: got.append(chunks) is None
    parts = [b"3\r\nabc\r\n", b"1\r\na\r\n2\r\nbc\r\n", b"4\r\n\r\n\r\n\r\n"]
    for part in parts:
        connection.data_received(part)
    assert got == parts and not leg.buffered_bytes
    connection.data_received(b"2\r\na")  # cut: from here on it waits, until all was taken
    connection.data_received(b"b\r\n")
    connection.data_received(b"1\r\nc\r\n")  # whole: it is seen where the next is due
    assert got == parts and leg.take() == b"abc"
    leg.relay = lambda chunks: got.append(chunks) is None
    connection.data_received(parts[0])
    assert got[3:] == parts[:1]


@pytest.mark.parametrize(
    ("data", "is_whole"),
    [
        (b"5\r\nhello\r\n", True), (b"5\r\nhello\r\n1\r\na\r\n", True), (b"2\r\n\r\n\r\n", True),
        (b"", False), (b"\r\n", False), (b"5\r\n", False), (b"0\r\n\r\n", False), (b"0\r\n", False),
        (b"5\r\nhello\r\n0\r\n\r\n", False), (b"0\r\n\r\n5\r\nhello\r\n", False),
        (b"5\r\nhello", False), (b"5\r\nhello\r", False), (b"5\r\nhello\n\n", False),
        (b"5\nhello\r\n", False), (b"6\r\nhello\r\n", False), (b"4\r\nhello\r\n", False),
        (b"05\r\nhello\r\n", False), (b"+5\r\nhello\r\n", False), (b"0x5\r\nhello\r\n", False),
        (b" 5\r\nhello\r\n", False), (b"5 \r\nhello\r\n", False), (b"5;a\r\nhello\r\n", False),
        (b"-2\r\n\r\n", False), (b"5\r\nhello\r\n5\r\nhel", False), (b"5\r\nhello\r\n5\r\n", False),
        (b"hello\r\n5\r\nhello\r\n", False), (b"-2\r\n", False), (b"-4", False),
    ],
)  # fmt: skip
def test_what_is_handed_on_unparsed_is_plain_chunks_and_nothing_else(
    data: bytes, is_whole: bool
) -> None:
    assert whole(data) == is_whole


HOSTILE = {
    "bare cr in a value": b"HTTP/1.1 200 OK\r\nx: a\rb\r\ncontent-length: 0\r\n\r\n",
    "bare lf in a value": b"HTTP/1.1 200 OK\r\nx: a\nset-cookie: b\r\ncontent-length: 0\r\n\r\n",
    "nul in a value": b"HTTP/1.1 200 OK\r\nx: a\0b\r\ncontent-length: 0\r\n\r\n",
    "folded": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\ncontent-length: 0\r\n\r\n",
    "blank before the colon": b"HTTP/1.1 200 OK\r\ncontent-length : 0\r\n\r\n",
    "no name": b"HTTP/1.1 200 OK\r\n: a\r\ncontent-length: 0\r\n\r\n",
    "negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "signed length": b"HTTP/1.1 200 OK\r\ncontent-length: +1\r\n\r\na",
    "hex length": b"HTTP/1.1 200 OK\r\ncontent-length: 0x1\r\n\r\na",
    "length twice in one": b"HTTP/1.1 200 OK\r\ncontent-length: 1, 1\r\n\r\na",
    "length beyond 64 bit": b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\na",
    "chunked twice": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "chunk beyond 64 bit": CHUNKED + b"fffffffffffffffff\r\na",
    "signed chunk": CHUNKED + b"-1\r\na\r\n0\r\n\r\n",
    "chunk longer than said": CHUNKED + b"1\r\nab\r\n0\r\n\r\n",
    "status 000": b"HTTP/1.1 000 No\r\ncontent-length: 0\r\n\r\n",
    "status 099": b"HTTP/1.1 099 No\r\ncontent-length: 0\r\n\r\n",
    "status 999": b"HTTP/1.1 999 No\r\ncontent-length: 0\r\n\r\n",
    "http 9.9": b"HTTP/9.9 200 OK\r\ncontent-length: 0\r\n\r\n",
    "http 0.9": b"<html>hello</html>",
    "icy": b"ICY 200 OK\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switch\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
}


@pytest.mark.parametrize("raw", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_hostile_answer_is_malformed_however_it_is_cut(raw: bytes, step: int) -> None:
    came = feed([raw[at : at + step] for at in range(0, len(raw), step)])
    assert came.error is Malformed, came
    assert not came.kept
    assert feed([CHUNKED], heads=KNOWN).status and KNOWN.opening(CHUNKED)[0]
    assert feed([raw[at : at + step] for at in range(0, len(raw), step)], heads=KNOWN) == came


def test_what_an_engine_floods_is_cut_off_at_a_bound() -> None:
    floods = {
        "head": [b"HTTP/1.1 200 OK\r\n"] + [b"x: " + b"a" * 4000 + b"\r\n"] * 1000,
        "one header": [b"HTTP/1.1 200 OK\r\nx: "] + [b"a" * 65536] * 100,
        "reason": [b"HTTP/1.1 200 "] + [b"a" * 65536] * 100,
        "1xx": [b"HTTP/1.1 100 Continue\r\n\r\n"] * 100,
        "chunk extension": [CHUNKED, b"1;"] + [b"a" * 65536] * 100,
        "trailers": [CHUNKED, b"0\r\n"] + [b"x: " + b"a" * 4000 + b"\r\n"] * 1000,
        "one trailer": [CHUNKED, b"0\r\nx: "] + [b"a" * 65536] * 100,
    }
    for name, parts in floods.items():
        came = feed(parts, eof=False)
        assert came.error is Malformed, name


def test_a_stream_leaves_its_length_behind_so_that_an_error_event_still_fits() -> None:
    told = [(b"content-type", b"text/event-stream"), (b"content-length", b"9"), (b"x", b"y")]
    assert passed_back(told, stream=True) == [(b"content-type", b"text/event-stream"), (b"x", b"y")]
    assert (b"content-length", b"9") in passed_back(told)


def test_what_an_engine_calls_hop_by_hop_and_our_own_names_stay_behind() -> None:
    told = [
        (b"connection", b"close, X-Secret"), (b"x-secret", b"1"), (b"x-kvplane-room", b"7"),
        (b"transfer-encoding", b"chunked"), (b"x-request-id", b"theirs"), (b"x-real", b"1"),
    ]  # fmt: skip
    assert passed_back(told) == [(b"x-real", b"1")]


class Breathing(Wire):
    """Counts how often it was asked to wait."""

    def __init__(self) -> None:
        self.pauses = self.resumes = 0

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        self.resumes += 1


async def test_an_answer_nobody_looks_at_is_read_at_once_where_it_is_short_and_else_seldom() -> (
    None
):
    settings = LegSettings(breath_s=0.001)
    connection = Connection(settings, lambda: 0.0, lambda _: None, lambda _: None)
    wire = Breathing()
    connection.connection_made(cast(asyncio.Transport, wire))
    leg = Exchange(Origin("h", 1), b"", b"", settings, Bell(), calm=True, slow=True)
    connection.send(leg)
    connection.data_received(CHUNKED)
    for _ in range(BRISK_READS - 1):
        connection.data_received(b"1\r\na\r\n")
    assert wire.pauses == 0
    for count in range(1, 4):
        connection.data_received(b"1\r\na\r\n")
        assert (wire.pauses, wire.resumes) == (count, count - 1)
        await until(lambda count=count: wire.resumes == count)  # type: ignore[misc]
    connection.data_received(b"1\r\na\r\n")
    leg.hurry()
    assert wire.resumes == 4 and not leg.over
    connection.data_received(b"1\r\na\r\n")
    assert wire.pauses == 4, "somebody waits for its end"
    connection.data_received(b"0\r\n\r\n")
    assert leg.complete and leg.take() == b"a" * (BRISK_READS + 4)

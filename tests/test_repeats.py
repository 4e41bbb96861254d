"""A head that says again what the one before it said is not read twice, and means the same."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.wait import until

from kvplane.connections import Connection
from kvplane.cycle import Cycle
from kvplane.doors import Server
from kvplane.repeats import MOST_BYTES, TRIES, Repeat, Repeating, repeat

PLAIN = b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-B: c\r\n\r\n%b"


def post(body: bytes, head: bytes = PLAIN) -> bytes:
    """One request."""
    return head % (len(body), body)


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Says what it was asked."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [[name.decode(), value.decode("latin-1")] for name, value in scope["headers"]]
    place = scope["method"], scope["path"], scope["query_string"].decode(), scope["http_version"]
    said = json.dumps([*place, headers, body.decode("latin-1")]).encode()
    head = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": said})


def straight(cycle: Cycle) -> Any:
    """Answers without waiting where all of it is there."""
    if cycle.more_body:
        return later(cycle)
    body = cycle.take()
    if body == b"break":
        raise LookupError("an app breaks")
    if body != b"nothing":
        assert cycle.answer(200, [(b"content-length", b"%d" % len(body))], body, more=False)
    return None


async def later(cycle: Cycle) -> None:
    body, more = b"", True
    while more:
        message = await cycle.receive()
        body, more = body + message["body"], message["more_body"]
    assert cycle.answer(200, [(b"content-length", b"%d" % len(body))], body, more=False)


def breaking(cycle: Cycle) -> None:
    """Never gets as far as to wait."""
    raise LookupError("an app breaks")


def early(cycle: Cycle) -> None:
    """Answers before the body came."""
    assert cycle.answer(200, [(b"content-length", b"5")], b"early", more=False)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server(
        app,
        "127.0.0.1",
        0,
        "test",
        direct={b"/straight": straight, b"/breaking": breaking, b"/early": early},
    )
    await server.start()
    yield server
    for client in Client.opened:
        client.writer.close()
        with suppress(OSError):
            await client.writer.wait_closed()
    Client.opened.clear()
    await server.stop()


class Client:
    """One connection; the fixture closes it."""

    opened: ClassVar[list[Client]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def of(cls, server: Server) -> Client:
        cls.opened.append(cls(*await asyncio.open_connection("127.0.0.1", server.port)))
        return cls.opened[-1]

    async def told(self) -> tuple[bytes, bytes]:
        """The next answer: head and body."""
        async with asyncio.timeout(10):
            head = await self.reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length:")[1].split(b"\r")[0])
            return head, await self.reader.readexactly(size)

    async def ask(self, *parts: bytes) -> Any:
        for part in parts:
            self.writer.write(part)
            await asyncio.sleep(0)
        return json.loads((await self.told())[1])


def line(server: Server) -> Repeating:
    """The server's side of the only connection."""
    (found,) = server._server.server_state.connections
    assert isinstance(found, Repeating)
    return found


class Parsed:
    """Counts heads that the parser read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heads, real = 0, Connection.on_headers_complete

        def counted(connection: Connection) -> None:
            self.heads += 1
            real(connection)

        monkeypatch.setattr(Connection, "on_headers_complete", counted)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Parsed:
    return Parsed(monkeypatch)


async def test_what_was_said_again_reaches_the_app_whole(server: Server, parsed: Parsed) -> None:
    client = await Client.of(server)
    for body in (b"one", b"three", b"x" * 300_000, b"2"):
        method, path, query, version, headers, said = await client.ask(post(body))
        assert (method, path, query, version) == ("POST", "/rank", "a=1", "1.1")
        assert headers == [["host", "a"], ["content-length", str(len(body))], ["x-b", "c"]]
        assert said.encode() == body
    assert parsed.heads == 1


@pytest.mark.parametrize("cut", range(len(post(b"hello"))))
async def test_wherever_it_is_cut(server: Server, cut: int) -> None:
    client, whole = await Client.of(server), post(b"hello")
    await client.ask(whole)
    assert (await client.ask(whole[:cut], whole[cut:]))[-1] == "hello"
    assert (await client.ask(whole))[-1] == "hello"


async def test_two_at_once_are_answered_in_turn(server: Server) -> None:
    client = await Client.of(server)
    await client.ask(post(b"0"))
    client.writer.write(b"".join(post(b"%d" % at) for at in range(40)))
    assert [json.loads((await client.told())[1])[-1] for _ in range(40)] == [*map(str, range(40))]
    client.writer.write(post(b"a") + post(b"b")[:20])  # the second comes while the first is asked
    assert json.loads((await client.told())[1])[-1] == "a"
    assert (await client.ask(post(b"b")[20:]))[-1] == "b"


ODD = [
    b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-B: d\r\n\r\n%b",
    b"POST /rank?a=2 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-B: c\r\n\r\n%b",
    b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-B: c\r\nX-D: e\r\n\r\n%b",
    b"PUT /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-B: c\r\n\r\n%b",
]


@pytest.mark.parametrize("odd", ODD)
async def test_whatever_differs_is_read(server: Server, parsed: Parsed, odd: bytes) -> None:
    client = await Client.of(server)
    first = await client.ask(post(b"ab"))
    other = await client.ask(post(b"ab", odd))
    assert other != first and other[-1] == "ab"
    assert await client.ask(post(b"ab")) == first
    assert parsed.heads == 3


REFUSED = [
    (b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: -2\r\nX-B: c\r\n\r\nab", 400),
    (b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2 \x00\r\nX-B: c\r\n\r\nab", 400),
    (b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2,2\r\nX-B: c\r\n\r\nab", 400),
    (b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 0x2\r\nX-B: c\r\n\r\nab", 400),
    (b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: \r\nX-B: c\r\n\r\nab", 400),
    (b"POST /rank?a=1 HTTP/1.1\r\nHost: a\r\nContent-Length: \xb2\r\nX-B: c\r\n\r\nab", 400),
]


@pytest.mark.parametrize(("sent", "status"), REFUSED)
async def test_a_length_that_is_none_is_refused_again(
    server: Server, sent: bytes, status: int
) -> None:
    client = await Client.of(server)
    await client.ask(post(b"ab"))
    client.writer.write(sent)
    async with asyncio.timeout(10):
        assert (await client.reader.read()).startswith(b"HTTP/1.1 %d" % status)


NEVER = [
    b"POST /a HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n%b",
    b"POST /a HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b",
    b"POST /a HTTP/1.0\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b",
    b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: %d \r\n\r\n%b",  # a blank behind it
    b"POST /a HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: upgrade, http2-settings\r\n"
    b"HTTP2-Settings: a\r\nContent-Length: %d\r\n\r\n%b",
    b"POST /a HTTP/1.1\r\nHost: a\r\nX-B: "
    + b"c" * MOST_BYTES
    + b"\r\nContent-Length: %d\r\n\r\n%b",
]


@pytest.mark.parametrize("head", NEVER, ids=range(len(NEVER)))
async def test_what_more_hangs_on_is_not_kept(server: Server, head: bytes) -> None:
    client = await Client.of(server)
    client.writer.write(post(b"ab", head))
    async with asyncio.timeout(10):
        assert b"200 OK" in await client.reader.readuntil(b"200 OK")
    for connection in server._server.server_state.connections:
        assert connection._known is None  # type: ignore[union-attr]


async def test_a_chunked_body_is_the_parsers(server: Server) -> None:
    client = await Client.of(server)
    chunked = (
        b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    )
    for _ in range(2):
        assert (await client.ask(chunked))[-1] == "ab"
    assert line(server)._known is None


async def test_heads_that_always_differ_are_soon_not_compared(server: Server) -> None:
    client, head = await Client.of(server), PLAIN.replace(b"X-B: c", b"X-Id: %d")
    for number in range(TRIES + 3):
        assert (await client.ask(head % (2, number, b"ab")))[-1] == "ab"
    assert line(server)._tries == 0


async def test_a_body_that_ends_early_is_no_request(server: Server) -> None:
    client = await Client.of(server)
    await client.ask(post(b"hello"))
    client.writer.write(post(b"hello")[:-1])
    await until(lambda: line(server)._owed == 1)
    client.writer.close()
    await until(lambda: not server._server.server_state.connections)


async def test_what_answers_at_once_does_and_what_breaks_says_so(
    server: Server, parsed: Parsed
) -> None:
    head = b"POST /straight HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
    client = await Client.of(server)
    for body in (b"one", b"two", b"three"):
        client.writer.write(post(body, head))
        assert (await client.told())[1] == body
    assert parsed.heads == 1 and not line(server).tasks
    client.writer.write(b"".join(post(b"%d" % at, head) for at in range(250)))  # deep in turns
    assert [(await client.told())[1] for _ in range(250)] == [b"%d" % at for at in range(250)]
    for body in (b"break", b"nothing"):
        again = await Client.of(server)
        again.writer.write(post(b"hello", head))
        await again.told()
        again.writer.write(post(body, head))
        async with asyncio.timeout(10):
            assert (await again.reader.read()).startswith(b"HTTP/1.1 500")


async def test_what_comes_behind_one_that_broke_is_not_begun(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, real = list[bytes](), Cycle.begin

    def begin(cycle: Cycle, answer: Any) -> Any:
        begun.append(cycle.url)
        return real(cycle, answer)

    monkeypatch.setattr(Cycle, "begin", begin)
    client = await Client.of(server)
    client.writer.write(
        post(b"a", STRAIGHT.replace(b"straight", b"breaking")) + post(b"b", STRAIGHT)
    )
    async with asyncio.timeout(10):
        assert (await client.reader.read()).startswith(b"HTTP/1.1 500")
    assert begun == [b"/breaking"]


async def test_a_body_that_looks_like_a_request_is_a_body(server: Server) -> None:
    """Also when its answer is out: else whoever writes bodies writes requests."""
    client, head = await Client.of(server), STRAIGHT.replace(b"straight", b"early")
    inside = post(b"ab", head)
    client.writer.write(post(inside, head)[: -len(inside)])
    assert (await client.told())[1] == b"early"
    client.writer.write(inside)  # alone, as a request would come
    await until(lambda: not line(server)._within)
    assert (await client.ask(post(b"three")))[-1] == "three"


CHUNKED = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
GET = b"GET /g HTTP/1.1\r\nHost: a\r\n\r\n"
LAST = b"GET /end HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
STRAIGHT = b"POST /straight HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"


def stream(rng: random.Random) -> list[bytes]:
    """Requests that are mostly alike, cut anywhere or between them."""
    asked = list[bytes]()
    for _ in range(rng.choice((2, 5, 9))):
        body = b"x" * rng.choice((0, 1, 3, 10, 200, 5000))
        heads = [PLAIN] * 8 + [STRAIGHT] * 4 + ODD
        asked.append(rng.choice([post(body, rng.choice(heads))] * 8 + [CHUNKED, GET, b"\r\n"]))
    asked.append(LAST)
    if rng.random() < 0.3:
        return asked
    whole = b"".join(asked)
    cuts = sorted(rng.randrange(len(whole)) for _ in range(rng.choice((0, 1, 2, 5))))
    return [whole[a:b] for a, b in pairwise([0, *cuts, len(whole)]) if a < b]


async def told_all(port: int, parts: list[bytes]) -> bytes:
    """All that a connection is told, but for the date."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(10):
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0)
            return re.sub(rb"date: [^\r]*\r\n", b"", await reader.read())
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("seed", range(60))
async def test_whoever_reads_every_head_says_the_same(server: Server, seed: int) -> None:
    parser = Server(app, "127.0.0.1", 0, "parser", direct={b"/straight": straight})
    parser._server.config.http._tries = 0  # type: ignore[union-attr]  # the class of its own
    await parser.start()
    try:
        parts = stream(random.Random(seed))
        told = [await told_all(port, parts) for port in (server.port, parser.port)]
        assert told[0] == told[1] and told[0].count(b"HTTP/1.1 200") >= 2
    finally:
        await parser.stop()


class NoLine:
    """What a cycle is never asked for here."""


NAMES = st.sampled_from(["a", "content-length", "Content-Length", "transfer-encoding", "x", "host"])
VALUES = st.sampled_from(["1", "22", "", "a", " 3", "4 ", "chunked", "content-length: 5"])


@settings(suppress_health_check=list(HealthCheck), max_examples=300)
@given(st.lists(st.tuples(NAMES, VALUES), max_size=5), st.integers(1, 10**6))
def test_only_the_length_may_be_another(pairs: list[tuple[str, str]], size: int) -> None:
    """Of whatever the parser took: what is cut out is the length's digits and nothing else."""
    text = "POST / HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in pairs)
    data = text.encode() + b"\r\n"
    headers = [(name.lower().encode(), value.strip().encode()) for name, value in pairs]
    found = repeat(data, Cycle(NoLine(), b"POST", b"/", "1.1", headers), None)  # type: ignore[arg-type]
    if found is None:
        return
    assert isinstance(found, Repeat)
    assert [name for name, _ in headers].count(b"content-length") == 1
    assert b"transfer-encoding" not in dict(headers)
    told = found.headers[found.at][1]
    assert found.before + told + found.after == data
    assert found.body(found.before + b"%d" % size + found.after + b"rest") == (
        b"%d" % size,
        len(data) - len(told) + len(str(size)),
    )

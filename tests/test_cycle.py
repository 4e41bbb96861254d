"""One request and its answer on our own server: framing, bodies, waiting and leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.wait import until

from kvplane.cycle import EXTENSION, Cycle
from kvplane.doors import Server

App = Callable[[dict[str, Any], Any, Any], Awaitable[None]]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def served(app: App) -> AsyncIterator[Callable[[], Awaitable[Streams]]]:
    """A server, and how to connect to it."""
    server, opened = Server(app, "127.0.0.1", 0, "test"), list[asyncio.StreamWriter]()
    await server.start()

    async def connect() -> Streams:
        streams = await asyncio.open_connection("127.0.0.1", server.port, limit=1 << 20)
        opened.append(streams[1])
        return streams

    try:
        async with asyncio.timeout(20):
            yield connect
    finally:
        for writer in opened:
            writer.close()
        await server.stop()


def saying(status: int, headers: list[tuple[bytes, bytes]], *parts: bytes) -> App:
    """An app that sends these, by ASGI's messages."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for at, part in enumerate(parts):
            more = at < len(parts) - 1
            await send({"type": "http.response.body", "body": part, "more_body": more})

    return app


def at_once(status: int, headers: list[tuple[bytes, bytes]], *parts: bytes) -> App:
    """The same, by the cycle itself."""

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle: Cycle = scope["extensions"][EXTENSION]
        assert cycle.answer(status, headers, parts[0], more=len(parts) > 1)
        for part in parts[1:-1]:
            assert cycle.put(part)
        if len(parts) > 1:
            await send({"type": "http.response.body", "body": parts[-1]})

    return app


async def asked(app: App, method: bytes = b"GET", version: bytes = b"1.1") -> bytes:
    """All that one request is told, until the connection ends."""
    async with served(app) as connect:
        reader, writer = await connect()
        head = b"%b / HTTP/%b\r\nhost: a\r\nconnection: close\r\n\r\n"
        writer.write(head % (method, version))
        return await reader.read()


@pytest.mark.parametrize("how", [saying, at_once])
@pytest.mark.parametrize(
    ("method", "status", "headers", "parts", "head", "body"),
    [
        (b"GET", 200, [(b"content-length", b"5")], [b"hello"], b"content-length: 5", b"hello"),
        (b"GET", 200, [(b"content-length", b"0")], [b""], b"content-length: 0", b""),
        (b"GET", 200, [], [b"ab", b"", b"c"], b"transfer-encoding: chunked",
         b"2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"),
        (b"GET", 200, [(b"transfer-encoding", b"chunked")], [b"x"], b"transfer-encoding: chunked",
         b"1\r\nx\r\n0\r\n\r\n"),
        (b"HEAD", 200, [(b"content-length", b"5")], [b"hello"], b"content-length: 5", b""),
        (b"HEAD", 200, [], [b"hello"], b"", b""),
        (b"GET", 204, [], [b""], b"204 No Content", b""),
        (b"GET", 304, [(b"etag", b"a")], [b""], b"etag: a", b""),
        (b"GET", 200, [(b"content-length", b"90000")], [b"z" * 90_000], b"200 OK", b"z" * 90_000),
    ],
    ids=["length", "empty", "chunked", "told chunked", "head", "head chunked", "204", "304", "big"],
)  # fmt: skip
async def test_an_answer_is_framed_as_http_wants_it(
    how: Callable[..., App],
    method: bytes,
    status: int,
    headers: list[tuple[bytes, bytes]],
    parts: list[bytes],
    head: bytes,
    body: bytes,
) -> None:
    if how is at_once and b"" in parts[1:]:
        parts = [part for part in parts if part]
    told = await asked(how(status, headers, *parts), method)
    where, _, rest = told.partition(b"\r\n\r\n")
    assert where.startswith(b"HTTP/1.1 %d " % status) and head in where and b"date: " in where
    assert where.count(b"connection: close") == 1
    assert rest == body
    assert (b"transfer-encoding" in where) == body.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("how", [saying, at_once])
@pytest.mark.parametrize(
    ("headers", "parts"),
    [
        ([(b"content-length", b"2")], [b"hello"]),
        ([(b"content-length", b"9")], [b"hello"]),
        ([(b"x-a", b"b\r\nx-c: d"), (b"content-length", b"5")], [b"hello"]),
        ([(b"x-a", b"b\nx-c: d"), (b"content-length", b"5")], [b"hello"]),
        ([(b"x-a\0", b"b"), (b"content-length", b"5")], [b"hello"]),
    ],
    ids=["too long", "too short", "split", "split by a line feed", "null"],
)
async def test_an_answer_that_would_confuse_the_client_is_cut(
    how: Callable[..., App], headers: list[tuple[bytes, bytes]], parts: list[bytes]
) -> None:
    told = await asked(how(200, headers, *parts))
    assert b"hello" not in told and b"x-c: d" not in told
    assert told.startswith((b"HTTP/1.1 500 ", b"HTTP/1.1 200 ")) or told == b""


async def test_a_body_is_asked_for_where_the_client_waits_for_that() -> None:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await saying(200, [(b"content-length", b"%d" % len(body))], body)(scope, receive, send)

    async with served(app) as connect:
        reader, writer = await connect()
        writer.write(
            b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-Continue\r\ncontent-length: 5\r\n\r\n"
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"hello")
        assert (await reader.readuntil(b"hello")).startswith(b"HTTP/1.1 200 ")


async def test_a_body_in_parts_is_joined_and_handed_over_once() -> None:
    taken: list[bytes] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle: Cycle = scope["extensions"][EXTENSION]
        await until(lambda: not cycle.more_body)
        taken.extend([cycle.take(), cycle.take()])
        assert cycle.answer(200, [(b"content-length", b"0")], b"", more=False)

    async with served(app) as connect:
        reader, writer = await connect()
        writer.write(
            b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n"
        )
        await writer.drain()
        writer.write(b"2\r\nde\r\n0\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    assert taken == [b"abcde", b""]


async def test_who_waits_for_a_body_hears_that_the_client_left() -> None:
    heard: list[str] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        while not heard or heard[-1] != "http.disconnect":
            heard.append((await receive())["type"])
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async with served(app) as connect:
        _, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\nabc")
        await until(lambda: heard)
        writer.close()
        await until(lambda: heard[-1] == "http.disconnect")
    assert heard == ["http.request", "http.disconnect"]


async def test_nothing_is_put_before_a_head_after_an_end_or_into_a_known_length() -> None:
    told: list[bool] = []

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle: Cycle = scope["extensions"][EXTENSION]
        told.append(cycle.put(b"x"))
        assert cycle.answer(200, [(b"content-length", b"2")], b"a", more=True)
        told.append(cycle.put(b"x"))
        await send({"type": "http.response.body", "body": b"b"})
        told.append(cycle.put(b"x"))
        with pytest.raises(RuntimeError):
            await send({"type": "http.response.body", "body": b"c"})

    assert (await asked(app)).endswith(b"\r\n\r\nab")
    assert told == [False, False, False]


async def test_one_connection_idle_too_long_is_closed_and_a_busy_one_is_not() -> None:
    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await saying(200, [(b"content-length", b"2")], b"ok")(scope, receive, send)

    server = Server(app, "127.0.0.1", 0, "test")
    server._server.config.timeout_keep_alive = 0.3  # type: ignore[assignment]
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 ")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    finally:
        await server.stop()


async def test_a_request_that_is_cut_by_our_end_is_told_to_come_again() -> None:
    entered = asyncio.Event()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    server = Server(app, "127.0.0.1", 0, "test")
    server._server.config.timeout_graceful_shutdown = 0.2  # type: ignore[assignment]
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    await entered.wait()
    await server.stop()
    async with asyncio.timeout(10):
        told = await reader.read()
    writer.close()
    assert told.startswith(b"HTTP/1.1 503 ") and told.endswith(b"Service Unavailable")


async def test_nothing_follows_the_end_of_a_stream() -> None:
    taken = list[bool]()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle: Cycle = scope["extensions"][EXTENSION]
        assert cycle.answer(200, [], b"a", more=True)
        taken.append(cycle.put(b"b"))
        await send({"type": "http.response.body", "body": b"c"})
        taken.extend([cycle.put(b"late"), cycle.relay(b"4\r\nlate\r\n")])

    told = await asked(app)
    assert told.endswith(b"1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n")
    assert taken == [True, False, False]

"""What a port does to clients that send too much, too slowly or nothing; one write an answer."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kit.wait import until
from prometheus_client import CollectorRegistry, generate_latest

from kvplane import connections
from kvplane.connections import MOST_AHEAD, Connection
from kvplane.doors import RefusedHeads, Server
from kvplane.refusing import MOST_BYTES, Refusing

HEAD = b"GET / HTTP/1.1\r\nhost: a\r\n"


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Reads the body, answers its length; `/stream` in many pieces."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        for _ in range(200):
            await send({"type": "http.response.body", "body": b"x" * 1000, "more_body": True})
    await send({"type": "http.response.body", "body": b"%d" % size})


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    monkeypatch.setattr(Connection, "head_s", 0.3)
    server = Server(app, "127.0.0.1", 0, "test")
    await server.start()
    yield server.port
    await server.stop()


async def answer(port: int, *parts: bytes, wait: bool = False) -> bytes:
    """Everything a connection is told until it is closed, or until its first answer ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            if wait:
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b"reset"
    finally:
        writer.close()


@pytest.mark.parametrize(
    "flood",
    [
        [HEAD] + [b"x-a: " + b"b" * 8000 + b"\r\n"] * 20,
        [b"GET /" + b"a" * (MOST_BYTES + 10)],
        [b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1;" + b"a" * 80_000],
    ],
    ids=["headers", "path", "chunk extension"],
)
async def test_a_head_without_end_is_refused_and_counted(port: int, flood: list[bytes]) -> None:
    before = Connection.refused
    told = await answer(port, *flood)
    assert told.split(b" ")[1] in (b"400", b"414", b"431"), told
    assert json.loads(told.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert Connection.refused == before + 1
    registry = CollectorRegistry()
    registry.register(RefusedHeads())
    assert f"kvplane_http_refused_heads_total {before + 1}.0" in generate_latest(registry).decode()


async def test_a_head_that_comes_too_slowly_is_refused(port: int) -> None:
    told = await answer(port, HEAD)
    assert b"400 Bad Request" in told and b"within 0.3 s" in told


async def test_a_connection_that_is_never_used_is_closed_without_a_word(port: int) -> None:
    before = Connection.refused
    assert await answer(port) == b""
    assert Connection.refused == before


async def test_a_large_body_and_several_requests_of_one_connection_are_fine(port: int) -> None:
    body = b"z" * 1_000_000
    head = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(3):
        writer.write(head + body)
        assert (await reader.readuntil(b"1000000\r\n0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_stream_arrives_whole_and_a_client_that_does_not_read_holds_it_up(
    port: int,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n")
    whole = await reader.readuntil(b"\r\n0\r\n\r\n")
    assert whole.count(b"x") == 200_000
    writer.close()


async def test_too_many_requests_sent_ahead_end_their_connection(port: int) -> None:
    before = Connection.refused
    told = await answer(port, (HEAD + b"\r\n") * (MOST_AHEAD + 50))
    assert told == b"reset" or b"at most 256 requests" in told, told[-200:]
    assert Connection.refused == before + 1


async def test_no_more_is_read_until_what_was_sent_ahead_is_answered() -> None:
    allowed, asked = asyncio.Semaphore(0), 0

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        nonlocal asked
        asked += 1
        await allowed.acquire()
        await app(scope, receive, send)

    server = Server(slow, "127.0.0.1", 0, "test")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write((HEAD + b"\r\n") * 200)
    await until(lambda: asked == 1)
    writer.write((HEAD + b"\r\n") * 200)
    async with asyncio.timeout(10):
        for _ in range(400):  # together more than are allowed
            allowed.release()
            assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    await server.stop()


LARGE = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3000000\r\n\r\n" + b"z" * 30_000


@pytest.mark.parametrize("reset", [False, True], ids=["ended", "reset"])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("more", [HEAD + b"\r\n", LARGE], ids=["small", "a part of a large one"])
async def test_a_client_that_sent_ahead_and_left_is_heard_of(
    monkeypatch: pytest.MonkeyPatch, more: bytes, apart: bool, reset: bool
) -> None:
    """Though nothing of it is read until the answer before has left."""
    monkeypatch.setattr(connections, "LOOK_S", 0.02)
    begun, heard = asyncio.Event(), asyncio.Event()

    async def waiting(scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert (await receive())["type"] == "http.request"
        begun.set()
        assert (await receive())["type"] == "http.disconnect"
        heard.set()

    server = Server(waiting, "127.0.0.1", 0, "test")
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD + b"\r\n" + (b"" if apart else more))
    await begun.wait()
    if apart:
        writer.write(more)
    (line,) = server._server.server_state.connections
    await until(lambda: bool(line.ahead))  # type: ignore[union-attr]
    assert not heard.is_set()
    if reset:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    else:
        writer.close()
    async with asyncio.timeout(5):
        await heard.wait()
    await server.stop()


async def test_head_and_body_leave_in_one_write(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"\r\n")
    await until(lambda: reader._buffer)  # type: ignore[attr-defined]
    assert bytes(reader._buffer).endswith(b"0\r\n\r\n")  # type: ignore[attr-defined]
    writer.close()


# -- heads that are too big; FR-AP-13


def head(size: int = 0, lines: int = 0, url: int = 0) -> bytes:
    """A request of one long header, many headers or a long URL; its body is left out."""
    found = b"GET /" + b"u" * url + b" HTTP/1.1\r\nhost: a\r\n"
    if size:
        found += b"cookie: " + b"c" * (size - len(found) - 12) + b"\r\n"
    found += b"".join(b"x-%d: 1\r\n" % number for number in range(lines))
    return found + b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (head(8_000), 200),
        (head(16_000), 200),
        (head(40_000), 200),
        (head(63_000), 200),
        (head(70_000), 431),
        (head(500_000), 431),
        (head(lines=300), 200),
        (head(lines=2000), 431),
        (head(url=20_000), 200),
        (head(url=70_000), 414),
    ],
    ids=["8k", "16k", "40k", "63k", "70k", "500k", "300", "2000", "url 20k", "url 70k"],
)
@pytest.mark.parametrize("step", [1 << 20, 1000], ids=["at once", "in pieces"])
async def test_a_big_head_passes_up_to_the_limit_and_is_told_what_is_too_much(
    port: int, sent: bytes, status: int, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    Refusing.told_at = 0.0
    told = await answer(port, *(sent[at : at + step] for at in range(0, len(sent), step)))
    assert told.startswith(b"HTTP/1.1 %d " % status), told[:80]
    if status == 200:
        return
    where, _, body = told.partition(b"\r\n\r\n")
    assert b"connection: close" in where and b"content-type: application/json" in where
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    lines = [one.getMessage() for one in caplog.records if one.name == "kvplane.refusing"]
    assert len(lines) == 1 and f"status={status}" in lines[0] and "client=127.0.0.1" in lines[0]


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "no Host headers came"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nHost: b\r\n\r\n", "2 Host headers came"),
        (
            b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\nhost: a\r\n\r\n",
            "2 H",
        ),
        (b"GARBAGE / HTTP/1.1\r\n\r\n", "Invalid method"),
        (HEAD + b"a b: c\r\n\r\n", "Invalid header token"),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", "Content-Length"),
        (HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", "Transfer-Encoding"),
    ],
)
async def test_a_head_that_cannot_be_right_is_told_what_is_wrong(
    port: int, sent: bytes, said: str
) -> None:
    told = await answer(port, sent)
    assert told.startswith(b"HTTP/1.1 400 ")
    error = json.loads(told.partition(b"\r\n\r\n")[2])["error"]
    assert said in error["message"] and error["code"] == "invalid_request"


async def test_older_http_needs_no_host_and_each_request_has_its_own(port: int) -> None:
    assert (await answer(port, b"GET / HTTP/1.0\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
    told = await answer(port, HEAD + b"\r\n" + HEAD + b"connection: close\r\n\r\n")
    assert told.count(b"HTTP/1.1 200 ") == 2


async def test_the_limit_is_what_was_configured() -> None:
    server = Server(app, "127.0.0.1", 0, "test", most_head_bytes=10_000)
    await server.start()
    try:
        assert (await answer(server.port, head(9_900))).startswith(b"HTTP/1.1 200 ")
        told = await answer(server.port, head(10_200))
        assert told.startswith(b"HTTP/1.1 431 ") and b"longer than 10000 bytes" in told
        assert (await answer(server.port, head(url=6_000))).startswith(b"HTTP/1.1 200 ")
        assert (await answer(server.port, head(url=11_000))).startswith(b"HTTP/1.1 414 ")
    finally:
        await server.stop()


async def test_a_body_that_comes_with_its_head_counts_for_nothing(port: int) -> None:
    body = b"z" * 300_000
    sent = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 300000\r\n\r\n"
    assert (await answer(port, sent + body)).startswith(b"HTTP/1.1 200 ")


async def test_a_flood_of_bad_heads_is_no_flood_of_log_lines(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    Refusing.told_at = 0.0
    before = Connection.refused
    for _ in range(20):
        await answer(port, b"\x00\x01 nonsense\r\n\r\n")
    assert Connection.refused == before + 20
    lines = [one for one in caplog.records if one.name == "kvplane.refusing"]
    assert 1 <= len(lines) <= 10


async def test_a_client_that_left_before_the_app_looked_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As one does that sends all and closes at once: the close is known before the loss is."""
    left: list[int] = []

    async def leaves(scope: dict[str, Any], receive: Any, send: Any) -> None:
        cycle = scope["extensions"]["kvplane.cycle"]
        cycle._line.transport.close()
        cycle.on_leave(lambda: left.append(1))

    server = Server(leaves, "127.0.0.1", 0, "test")
    await server.start()
    try:
        assert await answer(server.port, HEAD + b"\r\n") == b""
        await until(lambda: bool(left))
    finally:
        await server.stop()
    assert left == [1] and "an app" not in caplog.text


async def test_who_is_refused_while_sending_hears_it_and_is_let_go() -> None:
    """A socket that is closed over unread bytes is reset, and the reset takes the answer along."""

    async def full(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"connection", b"close"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})

    server = Server(full, "127.0.0.1", 0, "test")
    await server.start()
    try:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9000000\r\n\r\n")
            for _ in range(40):
                writer.write(b"z" * 100_000)
            async with asyncio.timeout(10):
                assert (await reader.read()).endswith(b"no")
            writer.close()
        await until(lambda: not server._server.server_state.connections)
    finally:
        await server.stop()


async def test_a_body_that_has_its_answer_is_not_answered_twice(port: int) -> None:
    """What follows an early answer is thrown away for a while, then the connection ends."""

    async def early(scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})

    server = Server(early, "127.0.0.1", 0, "test")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert (await reader.readuntil(b"no")).startswith(b"HTTP/1.1 401 ")
        writer.write(b"1\r\nx\r\n")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
    finally:
        await server.stop()


async def test_nonsense_after_an_answer_is_refused_and_within_one_it_only_ends(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + b"\r\n")
    await reader.readuntil(b"\r\n0\r\n\r\n")
    writer.write(b"\x00\x01\x02\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
    writer.close()

    started, go = asyncio.Event(), asyncio.Event()

    async def slow(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        started.set()
        await go.wait()

    server = Server(slow, "127.0.0.1", 0, "test")
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD + b"\r\n")
        await started.wait()
        writer.write(b"\x00\x01\x02\r\n\r\n")
        async with asyncio.timeout(10):
            assert (await reader.read()).endswith(b"4\r\npart\r\n")
        writer.close()
    finally:
        go.set()
        await server.stop()

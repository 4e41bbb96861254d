"""Answering in one step: the same bytes as by messages, and it stands back where it must."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import pytest
from kit.wait import until

from kvplane.doors import Server

DATE = re.compile(rb"date: [^\r]+\r\n")
PLAIN = [(b"content-type", b"text/plain")]
used: list[bool] = []  # what the two offers said


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers as the path says: /fast or /slow, then what."""
    while (await receive()).get("more_body"):
        pass
    _, way, what = scope["path"].split("/", 2)
    cycle = scope["extensions"]["kvplane.cycle"]
    answer, put = cycle.answer, cycle.put
    status, headers, parts = CASES[what]

    async def begin(data: bytes, more: bool) -> None:
        said = way == "fast" and answer(status, headers, data, more)
        used.append(said)
        if not said:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": data, "more_body": more})

    await begin(parts[0], len(parts) > 1)
    for part in parts[1:-1]:
        said = way == "fast" and put(part)
        used.append(said)
        if not said:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    if len(parts) > 1:
        await send({"type": "http.response.body", "body": parts[-1], "more_body": False})


LENGTH = [*PLAIN, (b"content-length", b"5")]
CASES: dict[str, tuple[int, list[tuple[bytes, bytes]], list[bytes]]] = {
    "whole": (200, LENGTH, [b"hello"]),
    "refused": (404, LENGTH, [b"hello"]),
    "whole, no length": (200, PLAIN, [b"hello"]),
    "empty": (200, [*PLAIN, (b"content-length", b"0")], [b""]),
    "empty, no length": (200, PLAIN, [b""]),
    "large": (200, [*PLAIN, (b"content-length", b"200000")], [b"x" * 200_000]),
    "stream": (200, PLAIN, [b"a", b"bc", b"d" * 70_000, b"e", b""]),
    "in two, with a length": (200, LENGTH, [b"he", b"llo"]),
    "latin": (200, [(b"x-name", b"\xe9t\xe9"), *LENGTH], [b"hello"]),
    "closing": (200, [(b"connection", b"close"), *LENGTH], [b"hello"]),
    "no body": (204, PLAIN, [b""]),
    "not modified": (304, [*PLAIN, (b"content-length", b"9")], [b""]),
}


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = Server(app, "127.0.0.1", 0, "test")
    await server.start()
    used.clear()
    yield server.port
    await server.stop()


async def told(port: int, *requests: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(requests))
    async with asyncio.timeout(20):
        found = await reader.read()
    writer.close()
    return DATE.sub(b"", found)


def request(way: str, what: str, method: str = "GET", last: bool = True) -> bytes:
    head = f"{method} /{way}/{quote(what)} HTTP/1.1\r\nhost: a\r\n".encode()
    return head + (b"connection: close\r\n" if last else b"") + b"\r\n"


def body_of(raw: bytes) -> tuple[set[bytes], bytes]:
    """Lines of the head in any order, and the rest."""
    head, _, rest = raw.partition(b"\r\n\r\n")
    return set(head.split(b"\r\n")), rest


@pytest.mark.parametrize("what", CASES)
async def test_the_bytes_are_those_of_messages(port: int, what: str) -> None:
    fast = await told(port, request("fast", what))
    said = list(used)
    slow = await told(port, request("slow", what))
    assert body_of(fast) == body_of(slow)
    assert fast.startswith(b"HTTP/1.1 %d " % CASES[what][0])
    assert said and all(said)


async def test_the_connection_is_kept_and_used_again(port: int) -> None:
    each = [request("fast", what, last=False) for what in ("whole", "stream", "whole, no length")]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    for one in each:
        writer.write(one)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"200 OK" in head and b"connection: close" not in head
        if b"content-length: 5" in head:
            assert await reader.readexactly(5) == b"hello"
        else:
            await reader.readuntil(b"\r\n0\r\n\r\n")
    assert all(used)
    writer.close()


async def test_requests_sent_ahead_are_answered_in_order(port: int) -> None:
    ahead = [request("fast", what, last=False) for what in ("stream", "whole")]
    found = await told(port, *ahead, request("fast", "whole, no length"))
    assert found.count(b"HTTP/1.1 200 OK") == 3
    first, second, third = found.split(b"HTTP/1.1 200 OK")[1:]
    assert b"d" * 70_000 in first and second.endswith(b"hello") and b"5\r\nhello" in third
    assert used and all(used), "each cycle is of its own request, whatever was sent ahead"


async def test_the_answer_to_a_head_request_has_no_body(port: int) -> None:
    found = await told(port, request("fast", "whole", "HEAD"))
    assert found.endswith(b"\r\n\r\n") and b"content-length: 5" in found
    assert used == [True]


@pytest.mark.parametrize(
    "bad",
    [(b"x", b"a\r\nset-cookie: b"), (b"x\r\ny", b"a"), (b"x", b"a\nb"), (b"x", b"a\rb"),
     (b"x", b"a\0b")],
)  # fmt: skip
async def test_a_header_that_could_split_the_answer_never_leaves(
    port: int, bad: tuple[bytes, bytes]
) -> None:
    CASES["bad"] = (200, [bad, *LENGTH], [b"hello"])
    found = await told(port, request("fast", "bad"))
    assert b"set-cookie: b" not in found and b"hello" not in found
    assert True not in used


async def test_a_length_that_is_not_the_bodys_never_leaves(port: int) -> None:
    CASES["short"] = (200, LENGTH, [b"hell"])
    found = await told(port, request("fast", "short"))
    assert True not in used or not found.endswith(b"hell"), found


async def test_a_part_is_not_taken_while_the_client_does_not_drain(port: int) -> None:
    CASES["flood"] = (200, PLAIN, [b"x" * 100_000 for _ in range(200)])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(request("fast", "flood"))
    await until(lambda: used and not all(used), what="the buffers to be full: nobody reads")
    async with asyncio.timeout(20):
        found = b""
        while data := await reader.read(2**20):
            found += data
    assert found.count(b"x" * 100_000) == 200
    writer.close()

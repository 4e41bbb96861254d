"""The benchmark's clients: what they count, and what they take for a wrong answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"


@pytest.fixture
def http_load(from_bench: Callable[[str], Any]) -> Any:
    return from_bench("http_load")


@asynccontextmanager
async def saying(*pieces: bytes) -> AsyncIterator[tuple[int, list[int]]]:
    """(port, requests seen) of a server that answers the n-th request with the n-th piece."""
    seen: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for at in range(10_000):
            if not await reader.readuntil(b"\r\n\r\n"):
                return
            seen.append(at)
            piece = pieces[min(at, len(pieces) - 1)]
            for byte in (piece[:20], piece[20:]):  # an answer may come in two
                writer.write(byte)
                await writer.drain()
        writer.close()

    async def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(quiet, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1]), seen
    finally:
        server.close()


async def test_every_answer_is_counted_once(http_load: Any) -> None:
    async with saying(GOOD) as (port, seen):
        load = http_load.Load(port, [http_load.request("GET", "/a")] * 3)
        await load.open()
        assert len(seen) == 3
        count, took = await load.burst(0.05)
        assert count == len(seen) - 3 and count >= 3 and took > 0
        load.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcd",
        b"HTTP/1.1 200 OK\r\nX-Other: 333\r\n\r\nabc",
    ],
)
@pytest.mark.parametrize("at", [0, 1])
async def test_a_wrong_answer_ends_the_round(
    http_load: Any, answer: bytes, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_load, "WAIT_S", 0.3)  # one is too short for what is expected
    async with saying(*[GOOD] * at, answer) as (port, _):
        load = http_load.Load(port, [http_load.request("GET", "/a")])
        try:
            with pytest.raises(http_load.WrongAnswer):
                await load.open()
                await load.burst(0.05)
        finally:
            load.close()


async def test_processor_time_is_told(http_load: Any) -> None:
    assert http_load.cpu_s(os.getpid()) > 0

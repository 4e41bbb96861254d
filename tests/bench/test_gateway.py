"""The gateway rows: real processes, right answers, and a figure for each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest


def test_every_row_is_measured_and_the_missing_peer_named(
    from_bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGL_ROUTER", raising=False)
    gateway = from_bench("gateway")
    *rows, absent = gateway.rows(1, {"1 kB": (1_000, 40), "300 kB": (300_000, 4)}, 8, 20)
    assert [row.name for row in rows] == [
        "gateway, CPU of a request, 1 kB",
        "  CPU of a request, 1 kB, more with the prefix policy",
        "gateway, CPU of a request, 300 kB",
        "  CPU of a request, 300 kB, more with the prefix policy",
        "gateway, CPU of a part of a stream",
        "gateway, added to p50, one at a time",
    ]
    assert all(min(row.values) > 0 for row in rows if row.name.startswith("gateway, CPU of a req"))
    assert "not measured: SGL_ROUTER" in absent.line()


@pytest.mark.parametrize("size", [100, 1_000, 32_000, 256_000])
@pytest.mark.parametrize("chunks", [0, 1, 64])
def test_a_request_is_as_long_as_it_says_and_asks_for_its_parts(
    from_bench: Callable[[str], Any], size: int, chunks: int
) -> None:
    head, _, body = from_bench("gateway_load").chat(size, chunks).partition(b"\r\n\r\n")
    told = json.loads(body)
    assert f"content-length: {len(body)}".encode() in head
    assert told["stream"] is (chunks > 0) and told["max_tokens"] == (chunks or 16)
    assert abs(len(body) - size) < 60 or size == 100


async def test_an_answer_that_is_none_ends_the_round(from_bench: Callable[[str], Any]) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    load = from_bench("gateway_load")
    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(from_bench("http_load").WrongAnswer, match="503"):
        await load.ask(port, load.chat(100), 3, 1)
    server.close()

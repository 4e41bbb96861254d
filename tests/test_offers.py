"""A client that offers another protocol is answered in the one it speaks, and loses no byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvplane.doors import Server

OFFERS = {
    "h2c": [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk"],
    "websocket": [b"Connection: keep-alive, Upgrade", b"Upgrade: websocket"],
    "not meant for us": [b"Upgrade: h2c"],
    "none": [],
}
LAST = b"GET /last HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


async def echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Path, body and what is left of the offer."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    offer = [name for name, _ in scope["headers"] if name in (b"upgrade", b"http2-settings")]
    said = b"|%s|%s|%d|" % (scope["path"].encode(), body, len(offer))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": said})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = Server(echo, "127.0.0.1", 0, "test")
    await server.start()
    yield server.port
    await server.stop()


async def told(port: int, *parts: bytes) -> bytes:
    """Everything of one connection, each part sent by itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for part in parts:
        writer.write(part)
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        found = await reader.read()
    writer.close()
    return found


def post(offer: list[bytes], chunked: bool) -> bytes:
    body = b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" if chunked else b"abcde"
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: 5"
    return b"\r\n".join([b"POST /first HTTP/1.1", b"Host: a", *offer, length, b"", body])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS.keys())
async def test_the_body_arrives_and_so_does_the_next_request(
    port: int, offer: list[bytes], chunked: bool
) -> None:
    found = await told(port, post(offer, chunked) + LAST)
    assert b"|/first|abcde|" in found and b"|/last||0|" in found
    assert found.count(b"HTTP/1.1 200 OK") == 2


async def test_it_does_wherever_it_is_cut(port: int) -> None:
    sent = post(OFFERS["h2c"], chunked=False)
    every = (told(port, sent[:at], sent[at:] + LAST) for at in range(1, len(sent)))
    for found in await asyncio.gather(*every):
        assert b"|/first|abcde|0|" in found and b"|/last||0|" in found


async def test_several_offers_on_one_connection_are_declined_one_by_one(port: int) -> None:
    found = await told(port, post(OFFERS["h2c"], False) * 3 + LAST)
    assert found.count(b"|/first|abcde|0|") == 3 and b"|/last||0|" in found


async def test_an_offer_hides_no_second_request_in_its_body(port: int) -> None:
    """Its bytes are a body, whatever they look like."""
    inner = b"GET /inner HTTP/1.1\r\nhost: a\r\n\r\n"
    head = [b"POST /first HTTP/1.1", b"host: a", *OFFERS["h2c"], b"content-length: %d" % len(inner)]
    found = await told(port, b"\r\n".join([*head, b"", inner]) + LAST)
    assert found.count(b"HTTP/1.1 200 OK") == 2
    assert b"|/first|" + inner + b"|0|" in found


async def test_a_tunnel_is_refused_in_words(port: int) -> None:
    found = await told(port, b"CONNECT engine:30000 HTTP/1.1\r\nhost: engine:30000\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 400 ") and b"this is no proxy" in found

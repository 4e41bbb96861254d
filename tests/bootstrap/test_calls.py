"""Calls: every one on a connection of its own, over TLS where it is asked for, the key hidden."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
import trustme
from kit.directory import rank, serving
from kit.peer import Call, answer, peer, replies
from kit.ports import has_ipv6

from kvplane.bootstrap import (
    BadInput,
    BootstrapClient,
    ClientSettings,
    NoDirectory,
    NotRegistered,
    Refused,
    Registration,
    fresh_session,
)

RANK = Registration.parse(rank(generation="g1"))
KEY = "correct-horse-battery"


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with fresh_session() as made:
        yield made


@pytest.mark.parametrize("fresh", [True, False])
async def test_every_call_has_a_connection_of_its_own(fresh: bool) -> None:
    """FR-BS-10: a kept connection may lead to a server that was replaced."""

    async def polite(call: Call) -> None:  # closes when asked to, as every HTTP server does
        while request := await call.request():
            await call.send(answer(more=b"connection: close\r\n"))
            if b"connection: close" in request.lower():
                return

    made = fresh_session() if fresh else aiohttp.ClientSession()
    async with made as session, peer(polite) as other:
        client = BootstrapClient(session)
        for _ in range(5):
            await client.health(other.url)
            await client.dp_ranks(other.url, [1])
        assert (other.connections, len(other.requests)) == (10, 10)


async def test_a_server_that_would_keep_the_connection_does_not_get_to(
    session: aiohttp.ClientSession,
) -> None:
    """FR-BS-10"""
    async with peer(replies(answer())) as other:
        for _ in range(3):
            await BootstrapClient(session).health(other.url)
        assert other.connections == 3


async def test_the_key_goes_with_writes_and_with_nothing_else(
    session: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-BS-05, the writer's side."""
    caplog.set_level(logging.DEBUG)
    async with peer(replies(answer(b'{"forgotten": 0}'))) as other:
        client = BootstrapClient(session, key=KEY)
        await client.register(other.url, RANK)
        await client.register_dp_rank(other.url, 7, 1)
        await client.forget_rooms(other.url, [7])
        await client.health(other.url)
        with pytest.raises(Exception, match="attn_tp_size"):
            await client.topology(other.url)
        signed = [f"bearer {KEY}".encode() in call.lower() for call in other.requests]
    assert signed == [True, True, True, False, False]
    assert KEY not in caplog.text + repr(client.__dict__["_settings"])


async def test_a_directory_that_wants_a_key_gets_it_or_says_what_is_missing(
    session: aiohttp.ClientSession,
) -> None:
    """FR-BS-05: with protection on, a stranger is refused and the table unchanged."""
    async with serving(write_key=KEY) as seat:
        with pytest.raises(Refused, match=r"refused \(401\).*Bearer") as caught:
            await BootstrapClient(session).register(seat.address, RANK, deadline_s=30)
        assert KEY not in str(caught.value)
        assert await BootstrapClient(session, key=KEY).register(seat.address, RANK) == "g1"


@pytest.mark.parametrize("key", ["a\r\nb", "schlüssel", "\0"])
def test_a_key_no_header_can_carry_is_refused_without_showing_it(key: str) -> None:
    with pytest.raises(BadInput, match="write key '\\(hidden\\)': must be printable ASCII"):
        BootstrapClient(None, key=key)  # type: ignore[arg-type]


async def test_ranks_that_are_missing_are_named(session: aiohttp.ClientSession) -> None:
    """FR-BS-01: the sentence of the register stage."""
    more = b"x-kvplane-missing: tp=2\r\n"
    async with peer(replies(answer(b"(3 workers registered).", 503, more))) as other:
        with pytest.raises(NotRegistered, match=r"\(3 workers registered\)\. Missing tp=2\."):
            await BootstrapClient(session).topology(other.url)


@pytest.mark.parametrize("form", ["[::1]:{}", "http://[::1]:{}", "localhost:{}", "127.0.0.1:{}"])
async def test_every_way_to_write_an_address_leads_there(
    session: aiohttp.ClientSession, form: str
) -> None:
    """FR-BS-04: literals of both families, a URL and a name."""
    if "::" in form and not has_ipv6():
        pytest.skip("[::1] cannot be listened on here")
    hosts: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hosts.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer(b"OK"))
        writer.close()

    listen = "::1" if "::" in form else "127.0.0.1"
    async with await asyncio.start_server(serve, listen, 0) as server:
        address = form.format(server.sockets[0].getsockname()[1])
        assert await BootstrapClient(session).health(address) is None
    assert address.removeprefix("http://").encode() in hosts[0]  # the Host header, in brackets


@asynccontextmanager
async def over_tls() -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """A server with a certificate for 127.0.0.1, and who trusts it."""
    authority = trustme.CA()
    here = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(here)
    trusting = ssl.create_default_context()
    authority.configure_trust(trusting)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"OK", more=b"x-kvplane-generation: g7\r\n"))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=here)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", trusting


async def test_a_directory_over_tls_is_asked_over_tls() -> None:
    settings = ClientSettings(tls=True)
    async with over_tls() as (address, trusting):
        async with fresh_session(trusting) as session:
            assert await BootstrapClient(session, settings).health(address) == "g7"
        async with fresh_session() as session:
            with pytest.raises(NoDirectory, match="certificate"):
                await BootstrapClient(session, settings).health(address)

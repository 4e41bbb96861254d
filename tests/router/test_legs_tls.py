"""Legs over TLS: an engine's certificate is looked at, ours is shown, and errors are named."""

from __future__ import annotations

import ssl

import pytest
import trustme
from kit.clock import FakeClock
from kit.peer import Call, answer, peer, replies
from kit.wait import until

from kvplane.router.legs import Legs
from kvplane.router.legs_errors import LegError, Phase, TimedOut, TlsFailed
from kvplane.router.legs_settings import LegSettings
from kvplane.router.legs_wire import Origin

BODY = bytes(range(256)) * 4000


@pytest.fixture(scope="module")
def ours() -> trustme.CA:
    return trustme.CA()


def server(
    ca: trustme.CA, name: str = "127.0.0.1", asks: trustme.CA | None = None
) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert(name).configure_cert(context)
    if asks is not None:
        asks.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client(trusts: trustme.CA, shows: trustme.CA | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    trusts.configure_trust(context)
    if shows is not None:
        shows.issue_cert("gateway").configure_cert(context)
    return context


async def fetch(legs: Legs, url: str) -> bytes:
    leg = legs.begin(Origin.parse(url), "/generate", [], BODY)
    try:
        await leg.head()
        return await leg.read(10**7)
    finally:
        leg.abort()


async def test_bodies_pass_and_the_connection_is_used_again(ours: trustme.CA) -> None:
    legs = Legs(tls=client(ours))
    async with peer(replies(answer(BODY)), server(ours)) as engine:
        for _ in range(2):
            assert await fetch(legs, engine.url) == BODY
        assert engine.connections == 1
        assert engine.requests[1].endswith(BODY)
        await legs.stop()
        await until(lambda: engine.open == 0)


@pytest.mark.parametrize("wrong", ["authority", "name"])
async def test_a_certificate_that_is_not_the_engines_is_refused_before_anything_is_sent(
    ours: trustme.CA, wrong: str
) -> None:
    other = trustme.CA()
    shown = server(other) if wrong == "authority" else server(ours, "elsewhere")
    legs = Legs(tls=client(ours))
    async with peer(replies(answer()), shown) as engine:
        with pytest.raises(TlsFailed) as caught:
            await fetch(legs, engine.url)
        assert caught.value.phase is Phase.CONNECT
        assert engine.requests == []
        assert legs.live == legs.sockets == 0
    await legs.stop()


async def test_a_client_certificate_is_shown_and_its_lack_is_an_error(ours: trustme.CA) -> None:
    async with peer(replies(answer(b"in")), server(ours, asks=ours)) as engine:
        known, unknown = Legs(tls=client(ours, ours)), Legs(tls=client(ours))
        assert await fetch(known, engine.url) == b"in"
        with pytest.raises(LegError):
            await fetch(unknown, engine.url)
        assert len(engine.requests) == 1
        assert unknown.live == 0
        await known.stop()
        await unknown.stop()


async def test_an_engine_that_speaks_no_tls_is_told_apart(ours: trustme.CA) -> None:
    async def plain(call: Call) -> None:
        await call.reader.read(1)
        await call.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    legs = Legs(tls=client(ours))
    async with peer(plain) as engine:
        with pytest.raises(TlsFailed) as caught:
            await fetch(legs, f"https://127.0.0.1:{engine.port}")
        assert caught.value.phase is Phase.CONNECT
        assert legs.live == legs.sockets == 0
    await legs.stop()


async def test_a_handshake_that_never_ends_meets_the_deadline_of_the_connect(
    ours: trustme.CA,
) -> None:
    async def silent(call: Call) -> None:
        await call.closed()

    clock = FakeClock()
    legs = Legs(LegSettings(connect_s=3), clock, client(ours))
    async with peer(silent) as engine:
        leg = legs.begin(Origin.parse(f"https://127.0.0.1:{engine.port}"), "/generate")
        await until(lambda: engine.connections == 1)
        clock.advance(3.1)
        legs.sweep()
        assert type(leg.error) is TimedOut and leg.error.phase is Phase.CONNECT
        await until(lambda: engine.seen_closed == 1, what="the socket to be closed")
    await legs.stop()

"""Legs: what one request to one engine does when the engine behaves, and when it does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import socket
from collections.abc import AsyncIterator

import pytest
from kit.clock import FakeClock
from kit.peer import Call, answer, peer, replies
from kit.ports import free_port
from kit.wait import until

from kvplane.router.legs import Legs
from kvplane.router.legs_errors import (
    Aborted,
    Cut,
    LegError,
    Malformed,
    Phase,
    PoolFull,
    Refused,
    Stale,
    TimedOut,
    TooLarge,
)
from kvplane.router.legs_exchange import Bell
from kvplane.router.legs_settings import LegSettings
from kvplane.router.legs_wire import Origin

MOST = 10_000_000


@pytest.fixture
async def legs() -> AsyncIterator[Legs]:
    pool = Legs(LegSettings())
    await pool.start()
    yield pool
    await pool.stop()
    await until(lambda: pool.live == 0 and pool.sockets == 0, what="nothing of the pool is left")


async def fetch(legs: Legs, url: str, body: bytes = b"{}") -> bytes:
    leg = legs.begin(Origin.parse(url), "/generate", [], body)
    try:
        await leg.head()
        return await leg.read(MOST)
    finally:
        leg.abort()


async def failure(legs: Legs, url: str) -> LegError:
    with pytest.raises(LegError) as caught:
        await fetch(legs, url)
    return caught.value


async def test_an_answer_arrives_whole_and_its_connection_is_used_again(legs: Legs) -> None:
    async with peer(replies(answer(b"first"), answer(b"second"))) as engine:
        assert await fetch(legs, engine.url, b'{"a":1}') == b"first"
        assert await fetch(legs, engine.url, b'{"a":2}') == b"second"
        assert engine.connections == 1
        assert engine.requests[0].startswith(b"POST /generate HTTP/1.1\r\nhost: 127.0.0.1:")
        assert engine.requests[1].endswith(b'\r\n\r\n{"a":2}')


async def test_status_headers_and_chunked_body_are_seen(legs: Legs) -> None:
    raw = (
        b"HTTP/1.1 429 Busy\r\nRetry-After: 7\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nx-trailer: 1\r\n\r\n"
    )
    async with peer(replies(raw)) as engine:
        for _ in range(2):
            leg = legs.begin(Origin.parse(engine.url), "/generate")
            assert await leg.head() == 429
            assert leg.header(b"retry-after") == b"7"
            assert leg.header(b"x-trailer") == b""
            assert await leg.read(MOST) == b"abcde"
        assert engine.connections == 1


@pytest.mark.parametrize("size", [0, 1, 65_000, 70_000, 3_000_000])
async def test_bodies_of_any_size_go_out_and_come_back(legs: Legs, size: int) -> None:
    body = random.Random(size).randbytes(size)
    async with peer(replies(answer(body))) as engine:
        assert await fetch(legs, engine.url, body) == body
        assert engine.requests[0].endswith(body)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
GOOD = {
    "length": answer(b"hello"),
    "chunks": CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n",
    "100 first": b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"hello"),
    "103 twice": b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 2 + answer(b"hello"),
    "until close": b"HTTP/1.1 200 OK\r\n\r\nhello",
    "http 1.0": b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
    "close": b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("raw", GOOD.values(), ids=GOOD.keys())
async def test_a_valid_answer_split_at_any_byte_gives_the_same_result(
    legs: Legs, raw: bytes
) -> None:
    cuts = iter(range(1, len(raw)))

    async def script(call: Call) -> None:
        cut = next(cuts)
        await call.request()
        await call.send(raw[:cut])
        await asyncio.sleep(0)
        await call.send(raw[cut:])

    async with peer(script) as engine:
        for _ in range(1, len(raw)):
            assert await fetch(legs, engine.url) == b"hello"
            legs.forget(Origin.parse(engine.url))


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_without_a_body_ends_with_its_head(legs: Legs, status: int) -> None:
    async with peer(replies(b"HTTP/1.1 %d Nothing\r\n\r\n" % status)) as engine:
        assert await fetch(legs, engine.url) == b""
        assert await fetch(legs, engine.url) == b""
        assert engine.connections == 1


BAD = {
    "garbage": (b"hello there\r\n\r\n", Malformed, Phase.HEAD),
    "0xff": (b"\xff" * 100, Malformed, Phase.HEAD),
    "both lengths": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n0\r\n\r\n",
        Malformed,
        Phase.HEAD,
    ),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        Malformed,
        Phase.HEAD,
    ),
    "other coding": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nabc",
        Malformed,
        Phase.HEAD,
    ),
    "bad chunk size": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nabc",
        Malformed,
        Phase.BODY,
    ),
    "switch": (b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n", Malformed, Phase.HEAD),
    "endless 1xx": (b"HTTP/1.1 100 Continue\r\n\r\n" * 40, Malformed, Phase.HEAD),
    "long header": (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 80_000, Malformed, Phase.HEAD),
    "129 headers": (
        b"HTTP/1.1 200 OK\r\n" + b"x: 1\r\n" * 128 + b"content-length: 0\r\n\r\n",
        Malformed,
        Phase.HEAD,
    ),
    "endless trailers": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: 1\r\n" * 200,
        Malformed,
        Phase.BODY,
    ),
    "nothing": (b"", Cut, Phase.SENT),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-", Cut, Phase.HEAD),
    "short body": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc", Cut, Phase.BODY),
    "no last chunk": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        Cut,
        Phase.BODY,
    ),
    "only 100": (b"HTTP/1.1 100 Continue\r\n\r\n", Cut, Phase.HEAD),
}


@pytest.mark.parametrize(("raw", "kind", "phase"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("grain", ["whole", "bytes"])
async def test_a_broken_answer_is_a_named_error_with_its_phase(
    legs: Legs, raw: bytes, kind: type[LegError], phase: Phase, grain: str
) -> None:
    step = max(len(raw) if grain == "whole" else len(raw) // 300, 1)

    async def script(call: Call) -> None:
        await call.request()
        for at in range(0, len(raw), step):
            await call.send(raw[at : at + step])

    async with peer(script) as engine:
        error = await failure(legs, engine.url)
        assert type(error) is kind, error
        assert error.phase is phase
        assert legs.sockets == 0 or await until(lambda: legs.sockets == 0)


async def test_a_head_of_exactly_the_limit_passes_and_one_byte_more_does_not(legs: Legs) -> None:
    for spare, kind in ((0, None), (1, Malformed)):
        fixed = len(b"content-length") + len(b"0") + 4 + len(b"x") + 4
        raw = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx: %s\r\n\r\n" % (
            b"a" * (64 * 1024 - fixed + spare)
        )
        async with peer(replies(raw)) as engine:
            if kind is None:
                assert await fetch(legs, engine.url) == b""
            else:
                assert type(await failure(legs, engine.url)) is kind


async def test_a_reset_is_told_from_a_close(legs: Legs) -> None:
    async def script(call: Call) -> None:
        await call.request()
        call.reset()

    async with peer(script) as engine:
        error = await failure(legs, engine.url)
        assert type(error) is Cut
        assert error.phase is Phase.SENT
        assert "reset" in str(error)


async def test_a_reset_does_not_end_a_body_that_runs_until_the_close(legs: Legs) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await call.reader.read(1)  # the client says when it has these bytes
        call.reset()

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        assert await leg.chunk() == b"half"
        assert leg.line is not None
        leg.line._transport.write(b"x")  # type: ignore[attr-defined]
        with pytest.raises(Cut):
            await leg.chunk()


async def test_nobody_listening_is_refused_at_once_and_nothing_was_sent(legs: Legs) -> None:
    error = await failure(legs, f"http://127.0.0.1:{free_port()}")
    assert type(error) is Refused
    assert error.phase is Phase.CONNECT
    assert error.received_bytes == 0


async def test_a_gateway_without_files_left_blames_no_engine(legs: Legs) -> None:
    async with peer(replies(answer(b"good"))) as engine:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.open(os.devnull, os.O_RDONLY)]
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 50, hard))
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            error = await failure(legs, engine.url)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for one in taken:
                os.close(one)
        assert type(error) is PoolFull and "Too many open files" in str(error)
        assert await fetch(legs, engine.url) == b"good"


async def test_a_second_answer_glued_to_the_first_never_reaches_the_next_request(
    legs: Legs,
) -> None:
    async with peer(replies(answer(b"mine") + answer(b"foreign"), answer(b"own"))) as engine:
        assert await fetch(legs, engine.url) == b"mine"
        assert await fetch(legs, engine.url) == b"mine"  # a new connection: its first answer
        assert engine.connections == 2


async def test_bytes_on_an_idle_connection_close_it(legs: Legs) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(answer(b"good"))
        await call.send(answer(b"unasked"))
        await call.closed()

    async with peer(script) as engine:
        assert await fetch(legs, engine.url) == b"good"
        await until(lambda: legs.sockets == 0)
        assert await fetch(legs, engine.url) == b"good"


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        (b"", True),
        (b"connection: close\r\n", False),
        (b"keep-alive: timeout=5\r\n", True),
        (b"keep-alive: timeout=1\r\n", False),
        (b"keep-alive: timeout=9, max=0\r\n", False),
    ],
)
async def test_what_the_engine_says_about_keeping_is_obeyed(
    legs: Legs, more: bytes, kept: bool
) -> None:
    async with peer(replies(answer(more=more))) as engine:
        await fetch(legs, engine.url)
        await fetch(legs, engine.url)
        assert engine.connections == (1 if kept else 2)


async def test_an_answer_before_the_request_was_read_ends_the_connection(legs: Legs) -> None:
    async def script(call: Call) -> None:
        await call.reader.readuntil(b"\r\n\r\n")
        await call.send(answer(b"no", status=413))
        await call.closed()

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate", [], b"x" * 30_000_000)
        assert await leg.head() == 413
        assert await leg.read(MOST) == b"no"
        await until(lambda: legs.sockets == 0)


async def test_an_idle_connection_is_left_before_the_engine_closes_it() -> None:
    """Engine closes after 300 ms idle; requests at 100-310 ms idle: none may fail."""
    clock, chance = FakeClock(), random.Random(3)

    async def script(call: Call) -> None:
        answered = clock.now()
        while await call.request():
            if clock.now() - answered > 0.3:
                return  # it was closed while the request was on its way
            await call.send(answer())
            answered = clock.now()

    legs = Legs(LegSettings(expire_s=0.15), clock=clock)
    await legs.start()
    async with peer(script) as engine:
        for _ in range(40):
            await asyncio.gather(*(fetch(legs, engine.url) for _ in range(4)))
            clock.advance(chance.uniform(0.1, 0.31))
        assert len(engine.requests) == 160 > engine.connections > 4, "some are used again"
    await legs.stop()


async def test_a_connection_that_dies_on_reuse_is_stale_and_is_not_sent_again() -> None:
    clock = FakeClock()
    legs = Legs(clock=clock)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(answer())
        await call.request()

    async with peer(script) as engine:
        await fetch(legs, engine.url)
        error = await failure(legs, engine.url)
        assert type(error) is Stale
        assert error.reused
        assert error.phase is Phase.SENT
        assert len(engine.requests) == 2
        await legs.stop()


async def test_the_newest_idle_connection_is_taken_and_old_ones_are_closed() -> None:
    clock = FakeClock()
    legs = Legs(clock=clock)
    async with peer(replies(answer())) as engine:
        await asyncio.gather(*(fetch(legs, engine.url) for _ in range(3)))
        assert legs.sockets == 3
        clock.advance(3.9)
        await fetch(legs, engine.url)
        clock.advance(0.2)  # two are 4.1 s old, the one just used is 0.2 s old
        legs.sweep()
        await until(lambda: legs.sockets == 1)
        await fetch(legs, engine.url)
        assert engine.connections == 3
        clock.advance(4.0)
        await fetch(legs, engine.url)  # exact to the clock, no sweep needed
        assert engine.connections == 4
    await legs.stop()


async def _silent(call: Call) -> None:
    await call.request()
    await call.closed()


async def test_no_head_is_a_timeout_and_the_engine_sees_the_close() -> None:
    clock = FakeClock()
    legs = Legs(LegSettings(head_s=5), clock)
    async with peer(_silent) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await until(lambda: engine.requests)
        clock.advance(4.9)
        legs.sweep()
        assert not leg.over
        clock.advance(0.2)
        legs.sweep()
        with pytest.raises(TimedOut, match="no head within 5 s") as caught:
            await leg.head()
        assert caught.value.phase is Phase.SENT
        await until(lambda: engine.seen_closed == 1)
    await legs.stop()


async def test_a_plain_answer_may_take_as_long_as_the_whole_leg() -> None:
    """Its head comes with its last token: minutes after the request, and nothing is wrong."""
    clock = FakeClock()
    legs = Legs(LegSettings(head_s=5, total_s=20), clock)
    async with peer(_silent) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate", patient=True)
        await until(lambda: engine.requests)
        clock.advance(19.9)
        legs.sweep()
        assert not leg.over
        clock.advance(0.2)
        legs.sweep()
        with pytest.raises(TimedOut, match="not finished within 20 s"):
            await leg.head()
    await legs.stop()


async def test_an_engine_that_does_not_read_a_large_request_meets_the_deadline() -> None:
    clock, gate = FakeClock(), asyncio.Event()
    legs = Legs(LegSettings(head_s=5), clock)

    async def script(call: Call) -> None:
        await gate.wait()

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate", [], b"x" * 30_000_000)
        await until(lambda: leg.phase is Phase.SENT)
        clock.advance(5.1)
        legs.sweep()
        assert type(leg.error) is TimedOut
        await until(lambda: legs.sockets == 0)
        gate.set()
    await legs.stop()


async def test_a_silent_body_is_a_timeout_but_not_while_we_are_the_slow_side() -> None:
    clock = FakeClock()
    legs = Legs(LegSettings(idle_s=5, pause_bytes=3), clock)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        await call.closed()

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await leg.head()
        await until(lambda: leg.paused)
        clock.advance(60)
        legs.sweep()
        assert await leg.chunk() == b"abc"
        clock.advance(4.9)
        legs.sweep()
        assert not leg.over
        clock.advance(0.2)
        legs.sweep()
        with pytest.raises(TimedOut, match="silent for 5 s"):
            await leg.chunk()
        assert legs.live == 0
    await legs.stop()


async def test_what_waits_to_be_taken_does_not_hide_that_the_engine_is_silent() -> None:
    """A plain answer is held back until it is whole: what came of it may not stop its clock."""
    clock = FakeClock()
    legs = Legs(LegSettings(idle_s=5), clock)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
        await call.closed()

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await until(lambda: leg.buffered_bytes == 3)
        clock.advance(5.1)
        legs.sweep()
        assert type(leg.error) is TimedOut
        await until(lambda: engine.seen_closed == 1)
    await legs.stop()


async def test_a_trickled_head_and_a_trickled_body_meet_their_deadlines() -> None:
    clock = FakeClock()
    legs = Legs(LegSettings(head_s=5, total_s=20), clock)

    async def head(call: Call) -> None:
        await call.request()
        while not call.writer.is_closing():
            await call.send(b"HTTP/1.1 200 OK\r\n" if not call.peer.seen_closed else b"")
            await call.closed()

    async with peer(head) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await until(lambda: leg.received_bytes > 0)
        clock.advance(5.1)
        legs.sweep()
        with pytest.raises(TimedOut, match="no head"):
            await leg.head()

    async def body(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 900\r\n\r\n")
        await call.closed()

    async with peer(body) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await leg.head()
        clock.advance(20.1)
        legs.sweep()
        with pytest.raises(TimedOut, match="not finished within 20 s"):
            await leg.chunk()
    await legs.stop()


async def test_a_connect_that_hangs_meets_its_deadline_and_leaks_nothing() -> None:
    """The accept queue is full: the handshake never ends."""
    clock = FakeClock()
    legs = Legs(LegSettings(connect_s=3), clock)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        leg = legs.begin(Origin("127.0.0.1", port), "/generate")
        for _ in range(10):
            await asyncio.sleep(0)
        clock.advance(3.1)
        legs.sweep()
        with pytest.raises(TimedOut) as caught:
            await leg.head()
        assert caught.value.phase is Phase.CONNECT
        assert legs.live == legs.sockets == 0
        for filler in fillers:
            filler.close()
    await legs.stop()


@pytest.mark.parametrize("step", range(8))
async def test_a_cancel_at_any_wait_closes_the_engines_connection(legs: Legs, step: int) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\nabc")
        await call.closed()

    async with peer(script) as engine:
        task = asyncio.create_task(fetch(legs, engine.url))
        for _ in range(step):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert legs.live == 0
        await until(lambda: engine.open == 0 and legs.sockets == 0, timeout_s=1)


async def test_abort_is_idempotent_and_a_finished_leg_keeps_its_connection(legs: Legs) -> None:
    async with peer(replies(answer(b"x"))) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await leg.head()
        await until(lambda: leg.complete)
        leg.abort()
        leg.abort()
        assert leg.error is None
        assert await fetch(legs, engine.url) == b"x"
        assert engine.connections == 1
        unanswered = legs.begin(Origin.parse(engine.url), "/generate")
        unanswered.abort()
        unanswered.abort()
        assert type(unanswered.error) is Aborted


async def test_an_unread_answer_stops_the_engine_and_is_still_closed_when_given_up(
    legs: Legs,
) -> None:
    sent = 0

    async def script(call: Call) -> None:
        nonlocal sent
        await call.request()
        await call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n")
        closed = asyncio.create_task(call.closed())
        for _ in range(1500):
            await call.send(b"x" * 65536)
            sent += 65536
            if closed.done():
                return
        await closed

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await leg.head()
        await until(lambda: leg.paused)
        before = -1
        while before != sent:  # until kernel buffers are full
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 20_000_000
        assert leg.buffered_bytes < 1024 * 1024

        def taken() -> bool:  # once may be too little for the kernels to ask for more
            leg.take()
            return sent > before

        await until(taken)
        leg.abort()
        await until(lambda: engine.open == 0, timeout_s=2)


async def test_a_paused_answer_is_read_to_its_end_byte_exact(legs: Legs) -> None:
    body = random.Random(7).randbytes(5_000_000)
    async with peer(replies(answer(body))) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        await leg.head()
        await until(lambda: leg.paused)
        assert await leg.read(MOST) == body
        assert await fetch(legs, engine.url) == body
        assert engine.connections == 1


async def test_an_answer_longer_than_the_limit_is_refused_and_closed(legs: Legs) -> None:
    async with peer(replies(answer(b"x" * 5000))) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        with pytest.raises(TooLarge):
            await leg.read(100)


async def test_legs_beyond_the_cap_wait_and_beyond_the_waiters_fail() -> None:
    legs = Legs(LegSettings(connections=2, waiters=2))
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        while await call.request():
            await gate.wait()
            await call.send(answer())

    async with peer(script) as engine:
        origin = Origin.parse(engine.url)
        four = [legs.begin(origin, "/generate") for _ in range(4)]
        fifth = legs.begin(origin, "/generate")
        assert type(fifth.error) is PoolFull
        four[2].abort()  # a waiter that leaves makes room for another
        sixth = legs.begin(origin, "/generate")
        gate.set()
        for leg in (four[0], four[1], four[3], sixth):
            assert await leg.head() == 200
        assert engine.connections == 2
        assert len(engine.requests) == 4
    await legs.stop()


async def test_waiters_move_on_when_a_connection_dies() -> None:
    legs = Legs(LegSettings(connections=1))

    async def script(call: Call) -> None:
        await call.request()
        if len(call.peer.requests) > 1:
            await call.send(answer(b"late"))

    async with peer(script) as engine:
        first = legs.begin(Origin.parse(engine.url), "/generate")
        second = legs.begin(Origin.parse(engine.url), "/generate")
        with pytest.raises(Cut):
            await first.head()
        assert await second.read(MOST) == b"late"
    await legs.stop()


async def test_a_wait_for_a_full_engine_ends_as_our_fault_and_takes_nothing_off_a_connect() -> None:
    clock = FakeClock()
    legs = Legs(LegSettings(connections=1, connect_s=3, wait_s=10), clock)
    async with peer(_silent) as engine:
        origin = Origin.parse(engine.url)
        first, second, third = (legs.begin(origin, "/generate") for _ in range(3))
        await until(lambda: engine.requests)
        clock.advance(9.9)
        legs.sweep()
        assert not second.over, "it waits for one, no connect hangs"
        first.abort()
        await until(lambda: len(engine.requests) == 2)
        assert second.phase is Phase.SENT
        clock.advance(0.2)
        legs.sweep()
        assert type(third.error) is PoolFull
        assert not second.over
    await legs.stop()


async def test_forgetting_an_engine_closes_what_idles_and_lets_the_rest_end(legs: Legs) -> None:
    gate = asyncio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await call.send(answer())
        await call.request()
        await gate.wait()
        await call.send(answer(b"end"))
        await call.closed()

    async with peer(script) as engine:
        origin = Origin.parse(engine.url)
        await asyncio.gather(fetch(legs, engine.url), fetch(legs, engine.url))
        leg = legs.begin(origin, "/generate")
        await until(lambda: len(engine.requests) == 3)
        legs.forget(origin)
        await until(lambda: legs.sockets == 1)
        gate.set()
        assert await leg.read(MOST) == b"end"
        await until(lambda: legs.sockets == 0)


@pytest.mark.parametrize(
    ("target", "headers"),
    [
        ("/a b", []),
        ("/a\r\nx: y", []),
        ("generate", []),
        ("/ä", []),
        ("/x", [(b"a\r\nb", b"c")]),
        ("/x", [(b"a", b"c\r\nd: e")]),
        ("/x", [(b"a", b"\x00")]),
        ("/x", [(b"", b"c")]),
    ],
)
async def test_what_could_split_a_request_is_refused(
    legs: Legs, target: str, headers: list[tuple[bytes, bytes]]
) -> None:
    with pytest.raises(ValueError, match=r"path|header"):
        legs.begin(Origin("127.0.0.1", 1), target, headers)
    assert legs.live == 0


async def test_answers_never_cross_under_random_cancels(legs: Legs) -> None:
    async def script(call: Call) -> None:
        while request := await call.request():
            await asyncio.sleep(random.random() / 500)
            await call.send(answer(request.rpartition(b"\r\n\r\n")[2]))

    chance = random.Random(3)
    async with peer(script) as engine:

        async def client(number: int) -> None:
            for round_ in range(40):
                body = b"%d-%d" % (number, round_)
                try:
                    async with asyncio.timeout(chance.uniform(0.0005, 0.02)):
                        assert await fetch(legs, engine.url, body) == body
                except TimeoutError:
                    pass
                if round_ % 8 == 0:  # what the cancelled ones left behind serves the next well
                    assert await fetch(legs, engine.url, body + b"!") == body + b"!"

        await asyncio.gather(*(client(number) for number in range(15)))
        assert legs.live == 0


@pytest.mark.parametrize(
    ("url", "origin", "host"),
    [
        ("http://10.0.0.7:30000", Origin("10.0.0.7", 30000), "10.0.0.7:30000"),
        ("http://[::1]:30000/", Origin("::1", 30000), "[::1]:30000"),
        ("https://engine", Origin("engine", 443, tls=True), "engine:443"),
        ("http://proxy/e1/", Origin("proxy", 80, prefix="/e1"), "proxy:80"),
    ],
)
def test_urls_become_origins(url: str, origin: Origin, host: str) -> None:
    assert Origin.parse(url) == origin
    assert str(Origin.parse(url)) == host


@pytest.mark.parametrize(
    "url", ["", "10.0.0.7:1", "ftp://x", "http://", "http://a:99999", "http://a/?q"]
)
def test_urls_that_are_none_are_named(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        Origin.parse(url)


async def test_ipv6_literals_work(legs: Legs) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(b"six" if b"host: [::1]:" in head else b"bad host"))
        writer.close()

    try:
        server = await asyncio.start_server(serve, "::1", 0)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await fetch(legs, f"http://[::1]:{port}") == b"six"


class CountingBell(Bell):
    rings = 0

    def ring(self) -> None:
        self.rings += 1
        super().ring()


@pytest.mark.parametrize("status", [200, 500])
async def test_a_calm_leg_wakes_nobody_before_it_is_over_refused_or_full(
    legs: Legs, status: int
) -> None:
    parts, bell = [b"data: %d\n\n" % number for number in range(60)], CountingBell()

    async def script(call: Call) -> None:
        await call.request()
        head = b"HTTP/1.1 %d Any\r\ntransfer-encoding: chunked\r\n\r\n"
        await call.send(head % status)
        for part in parts:
            await call.send(b"%x\r\n%s\r\n" % (len(part), part))
            await asyncio.sleep(0.001)
        await call.send(b"0\r\n\r\n")
        await call.closed()

    async with peer(script) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate", bell=bell)
        leg.calm = leg.slow = True
        await until(lambda: leg.over)
        assert leg.error is None
        assert bell.rings == (1 if status == 200 else 2)
        assert leg.take() == b"".join(parts)


async def test_a_calm_leg_that_holds_too_much_rings_and_is_read_on_when_drained(legs: Legs) -> None:
    body = random.Random(3).randbytes(1_500_000)
    async with peer(replies(answer(body))) as engine:
        leg = legs.begin(Origin.parse(engine.url), "/generate")
        leg.calm = leg.slow = True
        assert await leg.read(MOST) == body

"""Kept connections: how long they idle, and what an engine's own habit teaches."""

from __future__ import annotations

import asyncio
import gc

import pytest
from kit.clock import FakeClock
from kit.peer import Call, Peer, Script, answer, peer, replies
from kit.wait import until

from kvplane.router.legs import Legs
from kvplane.router.legs_engine import LESSON_LEAST_S, LESSON_SHARE, SOON_APART_S, SOON_TIMES
from kvplane.router.legs_errors import LegError, Stale
from kvplane.router.legs_exchange import Exchange
from kvplane.router.legs_settings import LegSettings
from kvplane.router.legs_wire import Origin


async def fetch(legs: Legs, engine: Peer) -> None:
    leg = legs.begin(Origin.parse(engine.url), "/generate", [], b"{}")
    try:
        await leg.head()
        assert await leg.read(1000) == b"{}"
    finally:
        leg.abort()


def closing(gate: asyncio.Event) -> Script:
    """Answers, and closes each connection when the gate is open and it idles."""

    async def script(call: Call) -> None:
        while True:
            request = asyncio.ensure_future(call.request())
            opened = asyncio.ensure_future(gate.wait())
            await asyncio.wait((request, opened), return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()
            if not request.done():
                request.cancel()
                return
            if not request.result():
                return
            await call.send(answer())

    return script


async def test_an_engine_seen_to_close_idle_connections_is_left_sooner_from_then_on() -> None:
    clock, gate = FakeClock(), asyncio.Event()
    legs = Legs(LegSettings(lesson_s=60), clock)
    async with peer(closing(gate)) as engine:
        await fetch(legs, engine)
        clock.advance(1.0)
        gate.set()
        await until(lambda: legs.sockets == 0)
        gate.clear()
        await fetch(legs, engine)
        clock.advance(1.0 * LESSON_SHARE - 0.05)
        await fetch(legs, engine)
        assert engine.connections == 2, "used again while the engine keeps it"
        clock.advance(1.0 * LESSON_SHARE + 0.05)
        await fetch(legs, engine)
        assert engine.connections == 3, "left before the engine would close it"
        clock.advance(61)
        legs.sweep()
        await fetch(legs, engine)
        clock.advance(2.0)
        await fetch(legs, engine)
        assert engine.connections == 4, "the lesson is forgotten after its time"
    await legs.stop()


async def test_an_engine_that_ends_teaches_nothing() -> None:
    clock, gate = FakeClock(), asyncio.Event()
    legs = Legs(clock=clock)
    async with peer(closing(gate)) as engine:
        await fetch(legs, engine)
        clock.advance(LESSON_LEAST_S / 2)
        gate.set()
        await until(lambda: legs.sockets == 0)
        gate.clear()
        await fetch(legs, engine)
        clock.advance(3.9)
        await fetch(legs, engine)
        assert engine.connections == 2
    await legs.stop()


async def test_an_engine_that_closes_after_each_answer_and_does_not_say_so_is_soon_known() -> None:
    """Each kept connection would cost a request one of its attempts."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(answer())

    clock = FakeClock()
    legs = Legs(LegSettings(lesson_s=60), clock)
    async with peer(script) as engine:
        for number in range(1, 2 * SOON_TIMES + 1):
            await fetch(legs, engine)
            if number <= SOON_TIMES:
                await until(lambda: legs.sockets == 0)
            clock.advance(
                2 * SOON_APART_S
            )  # later on at once: none is used that it may have closed
        many = [asyncio.create_task(fetch(legs, engine)) for _ in range(20)]
        await asyncio.gather(*many)
        clock.advance(61)
        legs.sweep()
        await fetch(legs, engine)
        assert legs.idling == 1, "the lesson is forgotten after its time"
    await legs.stop()


async def test_one_that_died_on_reuse_teaches_too() -> None:
    clock = FakeClock()
    legs = Legs(clock=clock)

    async def script(call: Call) -> None:
        await call.request()
        await call.send(answer())
        await call.request()

    async with peer(script) as engine:
        await fetch(legs, engine)
        clock.advance(2.0)
        with pytest.raises(Stale):
            await fetch(legs, engine)
        await fetch(legs, engine)
        clock.advance(2.0 * LESSON_SHARE + 0.01)
        await fetch(legs, engine)
        assert engine.connections == 3
    await legs.stop()


async def test_engines_that_are_no_longer_named_are_forgotten_with_their_connections() -> None:
    legs = Legs()
    async with peer(replies(answer())) as one, peer(replies(answer())) as other:
        await fetch(legs, one)
        await fetch(legs, other)
        assert legs.idling == 2
        legs.keep_only({Origin.parse(other.url)})
        await until(lambda: legs.sockets == 1 and one.open == 0)
        await fetch(legs, other)
        assert other.connections == 1
    await legs.stop()


async def test_a_connection_that_died_unseen_fails_once_as_stale_and_nobody_sends_again() -> None:
    """A firewall that dropped its state, an engine that was killed: a write meets a reset."""

    async def script(call: Call) -> None:
        await call.request()
        await call.send(answer())
        await call.request()
        call.reset()

    legs = Legs()
    async with peer(script) as engine:
        await fetch(legs, engine)
        leg = legs.begin(Origin.parse(engine.url), "/generate", [], b"{}")
        await until(lambda: leg.over)
        assert type(leg.error) is Stale
        assert leg.error.reused and leg.error.received_bytes == 0
        assert len(engine.requests) == 2
    await legs.stop()


async def test_where_one_died_unseen_the_others_are_not_tried_in_turn() -> None:
    """A request has a few attempts, and more connections than that may idle."""
    answered = asyncio.Event()

    async def script(call: Call) -> None:
        await call.request()
        await answered.wait()
        await call.send(answer())
        await call.request()
        call.reset()

    legs = Legs()
    async with peer(script) as engine:
        many = [asyncio.create_task(fetch(legs, engine)) for _ in range(8)]
        await until(lambda: len(engine.requests) == 8)
        answered.set()
        await asyncio.gather(*many)
        assert legs.idling == 8
        with pytest.raises(Stale):
            await fetch(legs, engine)
        await fetch(legs, engine)
        assert engine.connections == 9
        await until(lambda: legs.sockets == 1)
    await legs.stop()


@pytest.mark.parametrize("turns", range(6))
async def test_a_leg_given_up_at_any_moment_of_its_connect_gives_its_place_back(turns: int) -> None:
    async with peer(replies(answer())) as engine:
        legs = Legs(LegSettings(connections=2))
        origin = Origin.parse(engine.url)
        for _ in range(5):  # more than there are places
            leg, next_in_line = legs.begin(origin, "/x"), legs.begin(origin, "/x")
            last = legs.begin(origin, "/x")
            for _ in range(turns):
                await asyncio.sleep(0)
            for one in (leg, next_in_line, last):
                one.abort()
        assert legs.live == 0
        async with asyncio.timeout(10.0):
            await fetch(legs, engine)
        await legs.stop()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 2", answer(b"x" * 9)[:-4], b"no answer\r\n\r\n"])
async def test_a_leg_that_told_its_error_is_gone_without_a_look_for_garbage(said: bytes) -> None:
    async def script(call: Call) -> None:
        await call.request()
        await call.send(said)

    async with peer(script) as engine:
        legs = Legs()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(LegError):
                    await fetch(legs, engine)
            await until(lambda: legs.sockets == 0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert not [one for one in gc.garbage if isinstance(one, Exchange)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        await legs.stop()

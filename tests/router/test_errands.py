"""Errands: small requests nobody waits for; each tells its outcome once and leaves nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator

import pytest
from kit.peer import Call, Peer, Script, answer, peer, replies
from kit.ports import free_port
from kit.wait import until

from kvplane.router import errands
from kvplane.router.errands import Errands
from kvplane.router.legs import Legs
from kvplane.router.legs_exchange import Exchange


@contextlib.asynccontextmanager
async def office(script: Script) -> AsyncIterator[tuple[Errands, Legs, Peer]]:
    legs = Legs()
    await legs.start()
    async with peer(script) as there:
        yield Errands(legs), legs, there
    await legs.stop()


async def hang(call: Call) -> None:
    await call.request()
    await call.closed()


async def test_its_answer_is_told_once_and_whole() -> None:
    told: list[tuple[int, bytes]] = []
    body = b"x" * 300_000  # longer than a leg holds back
    async with office(replies(answer(body))) as (errand, legs, there):
        assert errand.run(there.url, "/x", (), b"asked", then=lambda *found: told.append(found))
        await until(lambda: told)
        assert told == [(200, body)]
        assert there.requests[0].endswith(b"asked")
        assert (errand.out, legs.live) == (0, 0)


async def test_an_engine_that_does_not_answer_is_left_at_the_deadline() -> None:
    told: list[int] = []
    async with office(hang) as (errand, legs, there):
        errand.run(there.url, "/x", deadline_s=0.05, then=lambda status, _: told.append(status))
        await until(lambda: told == [0])
        await until(lambda: there.seen_closed == 1)
        assert (errand.out, legs.live) == (0, 0)


async def test_an_engine_that_is_down_is_told_as_one_that_does_not_answer() -> None:
    told: list[int] = []
    async with office(hang) as (errand, _, _):
        errand.run(
            f"http://127.0.0.1:{free_port()}", "/x", then=lambda status, _: told.append(status)
        )
        await until(lambda: told == [0])
        assert errand.out == 0


async def test_one_that_met_a_connection_which_died_while_kept_goes_once_more() -> None:
    async def once(call: Call) -> None:
        """The second request of a connection is never answered."""
        await call.request()
        await call.send(answer(b"{}"))
        await call.request()

    told: list[int] = []
    async with office(once) as (errand, _, there):
        for number in range(3):
            errand.run(there.url, "/x", then=lambda status, _: told.append(status))
            await until(lambda n=number: len(told) == n + 1)  # type: ignore[misc]
        assert told == [200, 200, 200]
        assert len(there.requests) == 5
        assert errand.out == 0


async def test_an_answer_that_is_too_long_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "MOST_BYTES", 1000)
    told: list[int] = []
    async with office(replies(answer(b"x" * 500_000))) as (errand, legs, there):
        errand.run(there.url, "/x", then=lambda status, _: told.append(status))
        await until(lambda: told == [0])
        assert legs.live == 0


async def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errands, "MOST_ERRANDS", 2)
    async with office(hang) as (errand, _, there):
        assert [errand.run(there.url, "/x") for _ in range(3)] == [True, True, False]


async def test_what_is_out_ends_with_the_legs() -> None:
    told: list[int] = []
    async with office(hang) as (errand, legs, there):
        errand.run(there.url, "/x", then=lambda status, _: told.append(status))
        await until(lambda: there.requests)
        await legs.stop()
        assert (told, errand.out) == ([0], 0)


@pytest.mark.parametrize("script", [replies(answer()), replies(answer(status=500)), hang])
async def test_what_is_over_is_gone_without_a_look_for_garbage(script: Script) -> None:
    told: list[int] = []
    async with office(script) as (errand, _, there):
        gc.collect()
        gc.disable()
        try:
            for number in range(3):
                errand.run(
                    there.url, "/x", deadline_s=0.3, then=lambda status, _: told.append(status)
                )
                await until(lambda many=number + 1: len(told) == many)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            assert not [one for one in gc.garbage if isinstance(one, (errands._Errand, Exchange))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

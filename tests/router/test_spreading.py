"""Spreading: who gets what, through a real port and with an index that learns as engines store."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer
from kit.wait import until

from kvplane.index import chain
from kvplane.router.settings import DriftSettings, FleetSettings, RetrySettings, RouterSettings
from kvplane.vocabulary import Epoch, Knowledge, Known, Namespace, Pod, Stored, Tier, Worker

NAMES = [f"u{number}" for number in range(1, 9)]
GOOD = answer(b'{"usage":{"prompt_tokens":9}}')
QUIET = DriftSettings(silent_s=3600.0)  # what these engines store comes by no stream
ONCE = RouterSettings(retry=RetrySettings(retries=0), drift=QUIET)


class Engines:
    """They hold what they were asked, and tell it at once; they answer when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked: Counter[str] = Counter()
        self.house: Gatehouse | None = None

    def named(self, name: str) -> Script:
        async def script(call: Call) -> None:
            while request := await call.request():
                self.asked[name] += 1
                self._store(name, json.loads(request.partition(b"\r\n\r\n")[2])["input_ids"])
                await self.gate.wait()
                await call.send(GOOD)

        return script

    def _store(self, name: str, tokens: list[int]) -> None:
        assert self.house is not None
        hashes = chain(tokens, Namespace("tiny", 16)).blocks
        self.house.view.apply(Stored(Worker(Pod(name)), Epoch(1), Tier.GPU, None, hashes, 16))


@asynccontextmanager
async def eight(names: list[str] = NAMES) -> AsyncIterator[tuple[Gatehouse, Engines]]:
    """Unified workers that are known exactly and hold nothing yet."""
    engines = Engines()
    facts = {name: {"events": ("tcp://x:1",), "engine": "kvplane"} for name in names}
    scripts = {name: engines.named(name) for name in names}
    async with (
        gatehouse(scripts, ONCE, facts=facts) as house,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as house.session,
    ):
        engines.house = house
        for name in names:
            house.view.apply(Known(Worker(Pod(name)), Epoch(1), Knowledge.EXACT, "", 0.0))
        yield house, engines
        engines.gate.set()
        await until(lambda: house.idle)


def drawn(seed: int, count: int) -> list[int]:
    return [random.Random(seed * 1_000_003 + at).randrange(256) for at in range(count)]


async def ask(house: Gatehouse, tokens: list[int]) -> str:
    """Who served it."""
    status, said, headers = await house.post("/generate", {"input_ids": tokens})
    assert (status, headers["x-kvplane-knowledge"]) == (200, "exact"), said
    return headers["x-kvplane-decode"]


async def test_a_prompt_that_all_begin_with_does_not_pile_up_on_one_worker() -> None:
    """FR-RT-15: 1000 tokens for everybody, 200 of one's own, 400 at once."""
    shared = drawn(0, 1000)
    async with eight() as (house, engines):
        asked = [ask(house, shared + drawn(number, 200)) for number in range(1, 401)]
        work = asyncio.gather(*asked)
        await until(lambda: engines.asked.total() == 400)
        assert max(engines.asked.values()) < 1.5 * 400 / 8, engines.asked
        assert set(engines.asked) == set(NAMES), "all of them are warm now"
        engines.gate.set()
        await work


async def test_turns_of_one_chat_stay_where_its_beginning_is_held() -> None:
    """FR-RT-15: forty chats side by side, each turn some hundred tokens longer."""
    async with eight() as (house, engines):
        engines.gate.set()
        moved = 0

        async def chat(number: int) -> None:
            nonlocal moved
            served = ""
            for turn in range(1, 7):
                now = await ask(house, drawn(number, 400 * turn))
                moved += bool(served) and now != served
                served = now

        await asyncio.gather(*(chat(number) for number in range(1, 41)))
        assert moved < 0.1 * 40 * 5, moved
        assert max(engines.asked.values()) < 2 * 240 / 8, engines.asked


async def test_prompts_nobody_knows_go_where_nothing_waits() -> None:
    """FR-RT-24: one with a small cache and much to do, one that holds much and is idle."""
    async with eight(["u1", "u2"]) as (house, engines):
        idle = Worker(Pod("u2"))
        hashes = chain(drawn(99, 16_000), Namespace("tiny", 16)).blocks
        house.view.apply(Stored(idle, Epoch(1), Tier.GPU, None, hashes, 16))
        with house.fleet.book(Worker(Pod("u1")), 50 * 1000):
            asked = asyncio.gather(*(ask(house, drawn(number, 64)) for number in range(1, 21)))
            await until(lambda: engines.asked.total() == 20)
            assert engines.asked == {"u2": 20}
            engines.gate.set()
            await asked


async def test_what_is_under_way_is_not_cut_when_a_worker_stops_being_healthy() -> None:
    """FR-RT-10."""
    async with eight(["u1", "u2"]) as (house, engines):
        first = asyncio.create_task(ask(house, drawn(1, 32)))
        await until(lambda: engines.asked.total() == 1)
        (there,) = engines.asked
        settings: FleetSettings = house.gateway.settings.fleet
        now = house.gateway.clock.now()
        for number in range(settings.failures + 1):
            house.fleet.mark_health(Pod(there), False, now + 60.0 * number, "silent")
        assert [one.name for one in house.fleet.targets() if not one.healthy] == [there]
        engines.gate.set()
        assert await first == there
        others = {await ask(house, drawn(number, 32)) for number in range(2, 6)}
        assert others == {"u1", "u2"} - {there}

"""Spreading: who gets what, through a real port and with an index that learns as engines store."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer, replies
from kit.wait import until

from kvplane.index import chain
from kvplane.router.legs_settings import LegSettings
from kvplane.router.settings import DriftSettings, FleetSettings, RetrySettings, RouterSettings
from kvplane.vocabulary import Epoch, Knowledge, Known, Namespace, Pod, Stored, Tier, Worker

UNIFIED = [f"u{number}" for number in range(1, 9)]
PREFILLS = [f"p{number}" for number in range(1, 9)]
eight_of_a_kind = pytest.mark.parametrize("names", [PREFILLS, UNIFIED], ids=["prefills", "unified"])
GOOD = answer(b'{"usage":{"prompt_tokens":9}}')
QUIET = DriftSettings(silent_s=3600.0)  # what these engines store comes by no stream
PATIENT = LegSettings(connect_s=60.0)  # hundreds at once on a busy machine
ONCE = RouterSettings(retry=RetrySettings(retries=0), drift=QUIET)


class Engines:
    """They hold what they were asked, and tell it at once; they answer when the gate is open."""

    def __init__(self) -> None:
        self.gate, self.takes_s = asyncio.Event(), 0.0  # at most
        self.chance = random.Random(7)
        self.asked: Counter[str] = Counter()
        self.house: Gatehouse | None = None

    def named(self, name: str) -> Script:
        async def script(call: Call) -> None:
            while request := await call.request():
                if not request.startswith(b"POST /generate "):  # what else engines are asked
                    await call.send(answer(b"", 404))
                    continue
                self.asked[name] += 1
                self._store(name, json.loads(request.partition(b"\r\n\r\n")[2])["input_ids"])
                await self.gate.wait()
                await asyncio.sleep(self.takes_s * self.chance.random())
                await call.send(GOOD)

        return script

    def _store(self, name: str, tokens: list[int]) -> None:
        assert self.house is not None
        hashes = chain(tokens, Namespace("tiny", 16)).blocks
        self.house.view.apply(Stored(Worker(Pod(name)), Epoch(1), Tier.GPU, None, hashes, 16))


@asynccontextmanager
async def plane(names: list[str]) -> AsyncIterator[tuple[Gatehouse, Engines]]:
    """Workers that are known exactly and hold nothing yet; beside prefills a decode."""
    engines = Engines()
    facts: dict[str, dict[str, Any]] = {
        name: {"events": ("tcp://x:1",), "engine": "kvplane"} for name in names
    }
    scripts = {name: engines.named(name) for name in names}
    if names[0].startswith("p"):
        scripts["d1"], facts["d1"] = replies(GOOD), {"engine": "kvplane"}
    async with (
        gatehouse(scripts, ONCE, PATIENT, facts) as house,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as house.session,
    ):
        engines.house = house
        for name in names:
            house.view.apply(Known(Worker(Pod(name)), Epoch(1), Knowledge.EXACT, "", 0.0))
        yield house, engines
        engines.gate.set()
        await until(lambda: house.idle)


def drawn(seed: int, count: int) -> list[int]:
    """The same begin with the same, however many."""
    return random.Random(seed).choices(range(256), k=count)


async def ask(house: Gatehouse, tokens: list[int]) -> str:
    """Who served it."""
    status, said, headers = await house.post("/generate", {"input_ids": tokens})
    assert (status, headers["x-kvplane-knowledge"]) == (200, "exact"), said
    return headers["x-kvplane-prefill"]


@eight_of_a_kind
async def test_a_prompt_that_all_begin_with_does_not_pile_up_on_one_worker(
    names: list[str],
) -> None:
    """FR-RT-15: 1000 tokens for everybody, 200 of one's own, 400 at once."""
    shared = drawn(0, 1000)
    async with plane(names) as (house, engines):
        asked: list[asyncio.Task[str]] = []
        for many in (1, 40, 400):  # what those before have stored is known to the next
            while len(asked) < many:
                tokens = shared + drawn(len(asked) + 1, 200)
                asked.append(asyncio.create_task(ask(house, tokens)))
            await until(lambda many=many: engines.asked.total() == many, timeout_s=90)
        assert max(engines.asked.values()) < 1.5 * 400 / 8, engines.asked
        assert set(engines.asked) == set(names), "all of them are warm now"
        engines.gate.set()
        await asyncio.gather(*asked)


@eight_of_a_kind
async def test_turns_of_one_chat_stay_where_its_beginning_is_held(names: list[str]) -> None:
    """FR-RT-15: long chats side by side, whose turns take now longer, now shorter."""
    async with plane(names) as (house, engines):
        engines.gate.set()
        first = [await ask(house, drawn(number, 2000)) for number in range(24)]
        engines.asked.clear()
        engines.takes_s = 0.3
        moved = 0

        async def chat(number: int, served: str) -> None:
            nonlocal moved
            for turn in range(1, 7):
                now = await ask(house, drawn(number, 2000 + 200 * turn))
                moved += now != served
                served = now

        await asyncio.gather(*map(chat, range(24), first))
        assert moved < 0.1 * 24 * 6, moved
        assert max(engines.asked.values()) < 2 * 24 * 6 / 8, engines.asked


async def test_prompts_nobody_knows_go_where_nothing_waits() -> None:
    """FR-RT-24: one with a small cache and much to do, one that holds much and is idle."""
    async with plane(["u1", "u2"]) as (house, engines):
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
    async with plane(["u1", "u2"]) as (house, engines):
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


async def test_what_a_unified_worker_holds_is_no_load() -> None:
    """FR-RT-15: else every turn of a chat would look like its whole length."""
    async with plane(["u1"]) as (house, engines):
        engines.gate.set()
        await ask(house, drawn(1, 2000))
        engines.gate.clear()
        again = asyncio.create_task(ask(house, drawn(1, 2000)))
        await until(lambda: engines.asked.total() == 2)
        (target,) = house.fleet.targets()
        assert 0 < target.inflight_tokens < 300, "the last block, and an answer"
        engines.gate.set()
        await again

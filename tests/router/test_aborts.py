"""Aborts: a client may leave at any moment; both engines hear of it and nothing stays counted."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter

import pytest
from kit.asking import asked
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer
from kit.wait import until

from kvplane.router import aftermath
from kvplane.router.dispatch import Client
from kvplane.router.journey import Journey
from kvplane.router.settings import BreakerSettings, RetrySettings, RouterSettings

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b"9\r\ndata: 1\n\n\r\n"
QUICK = RouterSettings(
    retry=RetrySettings(first_wait_s=0.005, most_wait_s=0.02, budget_most=10_000),
    breaker=BreakerSettings(faults=10_000),
)


async def hang(call: Call) -> None:
    await call.asked()
    await call.closed()


async def answers(call: Call) -> None:
    while await call.asked():
        await call.send(answer(b"{}"))


async def talks(call: Call) -> None:
    await call.asked()
    await call.send(SSE + TOKEN)
    await call.closed()


async def heads(call: Call) -> None:
    await call.asked()
    await call.send(SSE)
    await call.closed()


PHASES: dict[str, tuple[Script, Script]] = {
    "before any head": (hang, hang),
    "during prefill, decode has its head": (hang, heads),
    "after prefill, before the first token": (answers, hang),
    "during prefill, decode streams": (hang, talks),
    "after the first token": (answers, talks),
}


@pytest.mark.parametrize(
    ("prefill", "decode", "leaves"),
    [(answers, answers, False), (hang, hang, True), (hang, answers, True)],
    ids=["answered", "left", "left behind by its prefill"],
)
async def test_what_is_over_is_gone_without_a_look_for_garbage(
    prefill: Script, decode: Script, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body may be 16 MB, and looks for garbage are rare where few objects are made."""
    monkeypatch.setattr(aftermath, "PREFILL_S", 0.5)
    gc.collect()
    gc.disable()
    try:
        async with gatehouse({"p1": prefill, "d1": decode}) as house:
            kept: list[weakref.ref[Journey]] = []
            began = Journey.travel

            async def travel(journey: Journey, client: Client) -> None:
                kept.append(weakref.ref(journey))
                await began(journey, client)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Journey, "travel", travel)
                for turn in range(1, 4):
                    if leaves:
                        one = await asked(house.url, {"text": "x" * 1000})
                        await until(lambda n=turn: len(kept) == n)  # type: ignore[misc]
                        one.leave()
                    else:
                        assert (await house.post("/generate", {"text": "x" * 1000}))[0] == 200
            assert len(kept) == 3
            await until(lambda: not any(ref() for ref in kept))
    finally:
        gc.enable()


@pytest.mark.parametrize(("prefill", "decode"), PHASES.values(), ids=PHASES.keys())
async def test_both_engines_hear_that_a_client_left_in_any_phase(
    prefill: Script, decode: Script
) -> None:
    """FR-RT-02."""
    async with gatehouse({"p1": prefill, "d1": decode}) as house:
        p1, d1 = house.engines["p1"], house.engines["d1"]
        tasks = len(asyncio.all_tasks())
        for turn in range(1, 21):
            one = await asked(house.url, {"text": "x", "stream": True})
            await until(lambda n=turn: len(d1.requests) == n)  # type: ignore[misc]
            if decode is talks:
                await one.head()
                assert await one.part() == b"data: 1\n\n"
            if decode is heads:
                await until(lambda: any(leg.status for leg in house.legs._live))
            if prefill is answers:
                await until(lambda: house.legs.live == 1)
            one.leave()
            await until(lambda: house.legs.live == 0)
            await until(lambda: d1.open == 0 and (prefill is answers or p1.open == 0))
        await until(lambda: house.idle)
        await until(lambda: len(asyncio.all_tasks()) <= tasks + p1.open + d1.open)


def restless(chance: random.Random) -> Script:
    """Answers, streams, refuses, breaks off and resets, each a little later than before."""

    async def script(call: Call) -> None:
        while request := await call.asked():
            await asyncio.sleep(chance.random() / 200)
            dice = chance.random()
            if dice < 0.05:
                call.reset()
                return
            if dice < 0.1:
                await call.send(answer(b"{}", 500))
            elif b'"stream": true' not in request:
                await call.send(answer(b"{}"))
            else:
                await call.send(SSE)
                for _ in range(3):
                    await call.send(TOKEN)
                    await asyncio.sleep(chance.random() / 500)
                if dice < 0.15:
                    return
                await call.send(b"0\r\n\r\n")

    return script


async def clients(house: Gatehouse, chance: random.Random, each: int) -> Counter[str]:
    """One client after the other, each leaving at some moment, or staying to the end."""
    seen: Counter[str] = Counter()
    for _ in range(each):
        body = {"text": "x", "stream": chance.random() < 0.5}
        one = await asked(house.url, body)
        try:
            async with asyncio.timeout(chance.choice([0, 0.002, 0.005, 0.01, 0.05, 10])):
                status = await one.head()
                await one.body()
            seen[str(status)] += 1
        except TimeoutError:
            seen["left"] += 1
        except asyncio.IncompleteReadError:
            seen["cut"] += 1
        one.leave()
    return seen


async def test_a_thousand_requests_given_up_at_any_moment_leave_every_count_at_zero() -> None:
    """FR-RT-13, FR-RT-02: errors, retries and waiting for a connection mixed in."""
    chance = random.Random(5)
    scripts = {name: restless(chance) for name in ("p1", "p2", "d1", "d2")}
    async with gatehouse(scripts, QUICK) as house:
        lowest = 0
        for target in house.fleet.targets():
            assert target.inflight_requests == 0

        async def watch() -> None:
            nonlocal lowest
            while True:
                loads = [t.inflight_tokens for t in house.fleet.targets()]
                lowest = min(lowest, *loads, *(t.inflight_requests for t in house.fleet.targets()))
                await asyncio.sleep(0)

        watcher = asyncio.create_task(watch())
        found = await asyncio.gather(*(clients(house, chance, 100) for _ in range(10)))
        watcher.cancel()
        seen = sum(found, Counter[str]())
        assert seen["left"] > 200 and seen["200"] > 100, seen
        await until(lambda: house.idle, what="all given back")
        assert lowest == 0, "a count was negative"
        assert house.count("legs_open") == 0
        assert sum(leg.buffered_bytes for leg in house.legs._live) == 0
        await until(lambda: house.count("aftermath_open") == 0)

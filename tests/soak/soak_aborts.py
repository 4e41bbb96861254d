"""Soak of the way out: clients that leave at any moment; then everything is counted.

`make soak` runs it; pytest by itself does not collect it. KVPLANE_SOAK_ABORTS sets how many leave,
KVPLANE_SOAK_SEED its luck. The first half fills what may fill (the ledger's ring, caches, pools);
the second half shows that nothing grows with the number of aborts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import psutil
from kit.asking import asked
from kit.plane import EngineSeat, Plane, plane
from kit.settled import unsettled
from kit.wait import until

ABORTS = int(os.environ.get("KVPLANE_SOAK_ABORTS", "10000"))
SEED = int(os.environ.get("KVPLANE_SOAK_SEED", "1"))
CLIENTS = 16
STAYS = 0.1  # of the requests are read to their end
PATIENCE_S = 60.0  # nobody waits longer for an answer
QUIET_S = 90.0  # a room's own deadline is 60 s
GROWTH = 1.05  # of the gateway's memory over the second half; allocators breathe
ENGINE_GROWTH = 1.25  # engines know each room for 240 s (bootstrap/rooms.py), longer than a half
GATEWAY = ["--health-check-interval-secs", "1"]
SEATS = (
    EngineSeat("p0", "prefill", ["--blocks", "256"]), EngineSeat("p1", "prefill", ["--tp", "2"]),
    EngineSeat("d0", "decode", ["--blocks", "256"]), EngineSeat("d1", "decode"),
)  # fmt: skip


def body(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body of any kind; few prompts, so that caches are full soon."""
    stream, kind = chance.random() < 0.5, chance.randrange(4)
    ids = [chance.randrange(32, 127) for _ in range(chance.choice([3, 20, 120]))]
    text = "".join(map(chr, ids)) if chance.random() < 0.2 else "the same as always " * 4
    if kind == 0:
        sampling = {"max_new_tokens": chance.choice([1, 16, 64]), "ignore_eos": True}
        return "/generate", {"input_ids": ids, "sampling_params": sampling, "stream": stream}
    if kind == 1:
        return "/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 24,
                                   "stream": stream}  # fmt: skip
    if kind == 2:
        return "/v1/completions", {"model": "tiny", "prompt": [text, "b"], "max_tokens": 8, "n": 2}
    messages = [{"role": "user", "content": text}]
    return "/v1/chat/completions", {"model": "tiny", "messages": messages, "max_tokens": 24,
                                    "stream": stream}  # fmt: skip


async def leave(url: str, chance: random.Random, seen: Counter[str]) -> bool:
    """One request, given up at some moment, or in its stream after some parts, or not at all. True
    where it was given up before its end."""
    path, told = body(chance)
    stays, parts = chance.random() < STAYS, chance.choice([0, 0, 1, 2, 5])
    if stays or not told.get("stream"):
        parts = 0
    moment = PATIENCE_S if stays or parts else chance.expovariate(1 / 0.05)
    one = await asked(url, told, path)
    try:
        async with asyncio.timeout(moment):
            status = await one.head()
            left, ended = 0 if "content-length" in one.headers else parts, False
            while left and not ended:
                left, ended = left - 1, not await one.part()
            if parts and not ended and "content-length" not in one.headers:
                seen["stream left"] += 1
                return True
            if not ended:
                await one.body()
        seen[str(status)] += 1
        return False
    except TimeoutError:
        seen["stream left" if one.status else "left before the head"] += 1
        return True
    except (asyncio.IncompleteReadError, ConnectionError):
        seen["cut"] += 1
        return False
    finally:
        one.leave()


async def half(running: Plane, chance: random.Random, aborts: int) -> Counter[str]:
    """So many aborts by a few clients at once."""
    seen: Counter[str] = Counter()
    left = aborts

    async def client() -> None:
        nonlocal left
        while left > 0:
            gave_up = await leave(running.url, chance, seen)
            left -= gave_up

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return seen


def held(running: Plane) -> dict[str, tuple[float, int, int]]:
    """Of each process: resident MB, open descriptors, threads."""
    found = {}
    for name, child in running.children.items():
        assert child.pid is not None
        one = psutil.Process(child.pid)
        found[name] = (one.memory_info().rss / 2**20, one.num_fds(), one.num_threads())
    return found


async def tasks(running: Plane) -> int:
    """Of the gateway's loop."""
    async with running.session.get(f"{running.url}/metrics") as answer:
        for line in (await answer.text()).splitlines():
            if line.startswith("kvplane_router_tasks "):
                return int(float(line.split()[1]))
    raise AssertionError("the gateway shows no kvplane_router_tasks")


async def rest(running: Plane) -> None:
    """Until all is given back, and what idles was closed."""
    stuck: list[Any] = []

    async def settled() -> bool:
        stuck[:] = await unsettled(running)
        return not stuck

    with contextlib.suppress(AssertionError):
        await until(settled, QUIET_S)
    assert not stuck, stuck
    await asyncio.sleep(6)  # idle connections live 4 s


async def test_after_ten_thousand_aborts_every_count_is_back_and_memory_is_flat() -> None:
    chance = random.Random(SEED)
    async with plane(SEATS, GATEWAY) as running:
        await half(running, chance, 50)  # whatever is made at first use
        await rest(running)
        idle, fresh = await tasks(running), held(running)
        begun = time.monotonic()
        first = await half(running, chance, ABORTS // 2)
        await rest(running)
        before = held(running)
        second = await half(running, chance, ABORTS - ABORTS // 2)
        await rest(running)
        after, now = held(running), await tasks(running)
        seen = first + second
        grown = {name: f"{before[name][0]:.0f}>{after[name][0]:.0f}" for name in after}
        sys.stdout.write(
            f"\nsoak aborts={ABORTS} seed={SEED} seconds={time.monotonic() - begun:.0f} "
            f"outcomes={dict(seen)} rss_mb={grown} "
            f"gateway_tasks={idle}>{now} descriptors="
            f"{ {name: f'{fresh[name][1]}>{after[name][1]}' for name in after} }\n"
        )
        assert seen["left before the head"] > ABORTS // 10 and seen["stream left"] > ABORTS // 10
        assert now <= idle, "tasks are left"
        for name in after:
            most = GROWTH if name == "gateway" else ENGINE_GROWTH
            assert after[name][0] <= before[name][0] * most + 2, f"{name} grew: {grown[name]} MB"
            assert after[name][1] <= fresh[name][1] + 4, f"{name} holds descriptors"
            assert after[name][2] <= before[name][2] + 1, f"{name} holds threads"
        path, told = "/generate", {"text": "x", "sampling_params": {"max_new_tokens": 4}}
        status, _, _ = await running.ask(path, told)
        assert status == 200

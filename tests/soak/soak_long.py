"""Soak of a long life: very many short requests, and nothing that grows with their number.

`make soak` runs it; pytest by itself does not collect it. KVPLANE_SOAK_REQUESTS sets how many,
KVPLANE_SOAK_SEED its luck. Without sockets, so that a million take minutes; those are counted by
soak_aborts.py. FR-OP-06.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from collections import Counter

import psutil
import pytest
from kit.gatehouse import worker
from kit.instant import ask, body, instant
from kit.wait import until

from kvplane.router.settings import RouterSettings
from kvplane.vocabulary import Pod, Role

REQUESTS = int(os.environ.get("KVPLANE_SOAK_REQUESTS", "1000000"))
SEED = int(os.environ.get("KVPLANE_SOAK_SEED", "1"))
LEAVES = 0.05  # of the clients, before their answer
REPLACED = 100  # workers, over the run
GROWTH = 1.10  # of resident memory after the first tenth
TOGETHER = 8
SETTINGS = RouterSettings(tokenizer="builtin", rooms_kept=2000)


@pytest.mark.timeout(3600)
async def test_memory_and_tasks_after_a_long_life_are_those_of_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance, seen, process = random.Random(SEED), Counter[int](), psutil.Process()
    async with instant(monkeypatch, SETTINGS) as (api, house):
        house.ledger._most = 2000
        tasks, lives = len(asyncio.all_tasks()), 0

        async def client(requests: int) -> None:
            for _ in range(requests):
                held = {"hold": True} if chance.random() < LEAVES else {}
                sent = body(chance.randrange(32, 2**20), chance.randrange(20, 90), **held)
                seen[await ask(api, sent)] += 1

        def replace() -> None:
            nonlocal lives
            name, role = chance.choice((("p1", Role.PREFILL), ("d1", Role.DECODE)))
            house.fleet.down(Pod(name))
            house.gateway.forget(Pod(name))
            house.fleet.up(worker(name, house.engines[name].url, role))
            lives += 1

        async def part(requests: int, replaced: int) -> int:
            for _ in range(replaced):
                await asyncio.gather(
                    *(client(requests // replaced // TOGETHER) for _ in range(TOGETHER))
                )
                replace()
            await until(lambda: house.idle)
            gc.collect()
            return process.memory_info().rss

        first = await part(REQUESTS // 10, REPLACED // 10)
        last = await part(REQUESTS - REQUESTS // 10, REPLACED - REPLACED // 10)
        ledger = house.ledger
        sys.stdout.write(
            f"\nsoak requests={sum(seen.values())} answers={dict(seen)} lives={lives} "
            f"rss_mb={first >> 20}->{last >> 20} rooms={len(ledger._by_room)}\n"
        )
        assert last < GROWTH * first
        assert set(seen) <= {0, 200} and seen[200] > 10 * seen[0]
        assert len(asyncio.all_tasks()) <= tasks
        assert len(ledger._by_room) <= 2000 and len(ledger._by_request) <= 2000
        assert len(house.gateway.breakers.states(house.gateway.clock.now())) <= 2

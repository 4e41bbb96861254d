"""Soak of a long life: very many short requests, readers that come back, and nothing that grows.

`make soak` runs it; pytest by itself does not collect it. KVPLANE_SOAK_REQUESTS sets how many,
KVPLANE_SOAK_RECONNECTS how often readers of event streams come back, KVPLANE_SOAK_SEED its luck.
Requests are without sockets, so that a million take minutes; theirs are counted by soak_aborts.py.
Readers are at a gateway process, by real connections. FR-OP-06.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass

import psutil
import pytest
from kit.asking import listened
from kit.gatehouse import worker
from kit.instant import ask, body, instant
from kit.plane import EngineSeat, Plane, plane
from kit.wait import until

from kvplane.router.settings import RouterSettings
from kvplane.vocabulary import Pod, Role

REQUESTS = int(os.environ.get("KVPLANE_SOAK_REQUESTS", "1000000"))
RECONNECTS = int(os.environ.get("KVPLANE_SOAK_RECONNECTS", "2000"))
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


# Readers of event streams ------------------------------------------------------------------------

PLACES = 16  # for readers of changes; one that is never given back is missed soon
READERS = 8  # at once
STREAMS = ("/dashboard/live", "/index/changes")


class Reader:
    """One that follows a stream, is cut off, and comes back where it was."""

    def __init__(self, running: Plane, path: str, chance: random.Random) -> None:
        self._running, self._path, self._chance = running, path, chance
        self._cursor = ""

    async def visit(self) -> int:
        """Come, read a little, and leave without a word. The status."""
        again = f"last-event-id: {self._cursor}\r\n" if self._cursor else ""
        one = await listened(self._running.url, self._path, again)
        try:
            async with asyncio.timeout(30):
                status = await one.head()
                for _ in range(self._chance.choice([0, 1, 1, 2]) if status == 200 else 0):
                    for line in (await one.part()).splitlines():
                        if line.startswith(b"id: "):
                            self._cursor = line[4:].decode()
                    if self._path == STREAMS[1]:
                        break  # the next part comes with the next change
            return status
        finally:
            one.leave()


async def come_back(running: Plane, chance: random.Random, visits: int) -> Counter[int]:
    """So many visits by a few readers at once, while the index changes."""
    seen, left = Counter[int](), visits

    async def follow(path: str) -> None:
        nonlocal left
        reader = Reader(running, path, chance)
        while left > 0:
            left -= 1
            seen[await reader.visit()] += 1

    async def speak() -> None:
        while left > 0:
            prompt = [chance.randrange(32, 127) for _ in range(64)]
            told = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}
            assert (await running.ask("/generate", told))[0] == 200

    await asyncio.gather(speak(), *(follow(STREAMS[at % 2]) for at in range(READERS)))
    return seen


@dataclass(frozen=True)
class Rest:
    """What the gateway holds when it is quiet."""

    tasks: int
    descriptors: int
    resident: int  # bytes


async def resting(running: Plane, most_tasks: float = float("inf")) -> Rest:
    """When every reader was let go and no more tasks are left than there were."""
    pid = running.children["gateway"].pid
    assert pid is not None
    process, tasks = psutil.Process(pid), 0.0

    async def quiet() -> bool:
        nonlocal tasks
        async with running.session.get(f"{running.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        page = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        tasks = float(page["kvplane_router_tasks"])
        return float(page["kvplane_events_changes_readers"]) == 0 and tasks <= most_tasks

    await until(quiet, 60, what=f"no reader, and at most {most_tasks:g} tasks, to be left")
    return Rest(int(tasks), process.num_fds(), process.memory_info().rss)


@pytest.mark.timeout(3600)
async def test_readers_of_event_streams_that_come_back_leave_nothing_behind() -> None:
    chance = random.Random(SEED)
    seats = [EngineSeat("p", "prefill"), EngineSeat("d", "decode")]
    async with plane(seats, ["--changes-readers", str(PLACES)]) as running:
        idle = await resting(running)
        seen = await come_back(running, chance, RECONNECTS // 10)
        first = await resting(running, idle.tasks)
        seen += await come_back(running, chance, RECONNECTS - RECONNECTS // 10)
        last = await resting(running, idle.tasks)
        sys.stdout.write(
            f"\nsoak reconnects={seen.total()} answers={dict(seen)} "
            f"tasks={idle.tasks}->{first.tasks}->{last.tasks} "
            f"descriptors={first.descriptors}->{last.descriptors} "
            f"rss_mb={first.resident >> 20}->{last.resident >> 20}\n"
        )
        assert set(seen) == {200}
        assert last.descriptors <= first.descriptors + 4
        assert last.resident < GROWTH * first.resident

"""The recorded runs again, while ingest, follower or Redis is killed at borders of their batches.

A border lies between two batches. There one of the three is killed, begun again, and the requests
that follow are compared exactly, up to the next border and beyond it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import pytest
from kit.backends import PROMPT
from kit.durable import Durable, durable
from kit.links import Links, links
from kit.recording import Run, recording
from kit.streams import QUICK

from kvplane.index import RedisStore

VICTIMS = ("ingest", "follower", "redis")
EMPTIED = "redis with all it held"  # seldom: that it is empty is noticed after a second only
WHEN = ("before", "under way", "after")  # of the batch at the border, when the victim dies
RUNS = recording()[1]
SEED, BORDERS = 4, 50
ALERT = replace(QUICK, store_check_s=0.1)  # looks soon whether the store lost something


@dataclass(frozen=True)
class Death:
    """Who dies, and when, at one border."""

    victim: str
    when: str


Deaths = dict[int, Death]  # by the number of the batch before the border


@pytest.fixture(scope="module")
def redis() -> Iterator[Durable]:
    with durable() as made:
        yield made


def seeded() -> dict[str, Deaths]:
    """50 borders of all runs, each with its victim; the victims in turn."""
    chance = random.Random(SEED)
    every = [(run.name, number) for run in RUNS for number in sorted(run.frames)]
    chosen = chance.sample(every, min(BORDERS, len(every)))
    found: dict[str, Deaths] = {run.name: {} for run in RUNS}
    for at, (name, number) in enumerate(chosen):
        found[name][number] = Death(VICTIMS[at % 3], chance.choice(WHEN))
    return found


async def die(made: Links, redis: Durable, victim: str) -> None:
    if victim == "ingest":
        await made.kill_ingest()
    elif victim == "follower":
        await made.kill_reader()
    else:
        redis.kill()


async def revive(made: Links, redis: Durable, victim: str) -> None:
    if victim == "ingest":
        await made.begin_ingest()
    elif victim == "follower":
        await made.begin_reader()
    else:
        redis.start(empty=victim == EMPTIED)


async def walk(run: Run, redis: Durable, prefix: str, deaths: Deaths) -> int:
    """A run with deaths at its borders: the number of requests, all as the engine says."""
    compared, wrong = 0, []
    store = partial(RedisStore, redis.url, prefix, None, PROMPT)
    async with links(store, run.topic, settings=ALERT) as made:
        await made.seen()
        await made.publisher.listened()
        for number in sorted({one.after for one in run.requests} | set(run.frames)):
            await border(made, redis, run, number, deaths.get(number))
            for asked in run.between(number, number):
                found = asked.found(made.view, made.worker, run.block_size)
                compared += 1
                if found != asked.cached:
                    wrong.append((asked.n, asked.desc, found, asked.cached, deaths.get(number)))
    assert not wrong
    return compared


async def border(made: Links, redis: Durable, run: Run, number: int, death: Death | None) -> None:
    """Send the batch of this number; who dies is back when it returns, and all is seen."""
    if death and death.when == "before":
        await die(made, redis, death.victim)
    if number > made.sent:
        await made.send(run.frames[number])
    if death and death.when == "after":
        await made.seen()
    if death and death.when != "before":
        await die(made, redis, death.victim)
    if death:
        await revive(made, redis, death.victim)
    await made.seen()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
async def test_depths_are_exact_though_somebody_dies_at_seeded_borders(
    run: Run, redis: Durable, redis_prefix: str
) -> None:
    deaths = seeded()[run.name]
    compared = await walk(run, redis, redis_prefix, deaths)
    print(f"{run.name}: {compared} compared over {len(deaths)} deaths")
    assert compared == run.counts()[0]


@pytest.mark.parametrize(("victim", "every"), [(one, 1) for one in VICTIMS] + [(EMPTIED, 9)])
async def test_depths_are_exact_though_somebody_dies_at_every_border_of_a_run(
    victim: str, every: int, redis: Durable, redis_prefix: str
) -> None:
    run = max(RUNS, key=lambda one: len(one.frames))
    deaths = {number: Death(victim, WHEN[number % 3]) for number in list(run.frames)[::every]}
    compared = await walk(run, redis, redis_prefix, deaths)
    print(f"{run.name}: {compared} compared over {len(deaths)} deaths of {victim}")
    assert compared == run.counts()[0]

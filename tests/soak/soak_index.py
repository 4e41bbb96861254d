"""Soak of the index: deaths, stops, restarts and partitions under load; it must equal the engines.

`make soak` runs it; pytest by itself does not collect it. KVPLANE_SOAK_S sets its seconds,
KVPLANE_SOAK_SEED its luck. Every 2 s something breaks. Now and then all is mended, nobody asks for
2 s, and what both routers say is compared with what lies in the engines.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import aiohttp
from kit.blows import Blow, drawn, strike
from kit.siege import Siege, siege
from kit.wait import until

SECONDS = float(os.environ.get("KVPLANE_SOAK_S", "600"))
SEED = int(os.environ.get("KVPLANE_SOAK_SEED", "1"))
EVERY_S = 2.0  # between two blows
ROUND_S = 10.0  # of blows, then all is mended
QUIET_S = 2.0  # without anything, then the index is compared
SETTLE_S = 30.0  # until it must be exact, whatever happened
CLIENTS = 4


@dataclass
class Figures:
    """What happened; printed at the end."""

    blows: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    quiet: int = 0
    compared: int = 0  # blocks that lay in engines, at every router
    false: list[str] = field(default_factory=list)  # held as the index says, and not held
    missing: list[str] = field(default_factory=list)  # held, unknown, and called exact
    silent: list[str] = field(default_factory=list)  # not exact, and no reason
    inexact: Counter[str] = field(default_factory=Counter)  # at a quiet moment, by state
    glances: int = 0  # comparisons while others are in trouble
    wrong: list[str] = field(default_factory=list)  # there, called exact, and not so
    spans: list[tuple[float, float, str]] = field(default_factory=list)  # of blows: from, to, label
    looks: list[tuple[float, bool]] = field(default_factory=list)  # when, all exact at all routers

    def recovered(self) -> dict[str, str]:
        """Seconds from the end of a blow until all is exact; of those that nothing followed."""
        took: dict[str, list[float]] = defaultdict(list)
        for _, end, label in self.spans:
            exact = next((at for at, well in self.looks if well and at >= end), None)
            if exact is None or any(a <= exact and b > end for a, b, _ in self.spans):
                continue
            took[label].append(exact - end)
        return {
            label: f"{statistics.median(found):.1f}/{max(found):.1f}"
            for label, found in sorted(took.items())
        }

    def line(self) -> str:
        return (
            f"\nsoak index seed={SEED} seconds={SECONDS:g} faults={sum(self.blows.values())} "
            f"{dict(sorted(self.blows.items()))} requests={dict(self.outcomes)} "
            f"quiet={self.quiet} compared={self.compared} false_holders={len(self.false)} "
            f"missing_while_exact={len(self.missing)} inexact={dict(self.inexact)} "
            f"glances={self.glances} wrong_while_exact={len(self.wrong)} "
            f"exact_after_s(p50/max)={self.recovered()}\n"
        )


@dataclass
class Soak:
    """The siege and its weather."""

    siege: Siege
    chance: random.Random
    figures: Figures = field(default_factory=Figures)
    asking: asyncio.Event = field(default_factory=asyncio.Event)  # clients pause while not set
    under_way: int = 0
    busy: set[str] = field(default_factory=set)  # in trouble now
    touched: set[str] = field(default_factory=set)  # in trouble at any time of a glance

    async def client(self) -> None:
        """Ask a router or an engine, for ever."""
        while True:
            await self.asking.wait()
            self.under_way += 1
            try:
                async with asyncio.timeout(10):
                    self.figures.outcomes[await self.ask()] += 1
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.figures.outcomes[type(error).__name__] += 1
            finally:
                self.under_way -= 1
            await asyncio.sleep(self.chance.uniform(0.02, 0.2))

    async def ask(self) -> str:
        """A prompt that shares its beginning with others; seldom a flush of one engine."""
        chance, engines = self.chance, [seat.url for seat in self.siege.engines.values()]
        if chance.random() < 0.005:
            async with self.siege.session.post(f"{chance.choice(engines)}/flush_cache") as answer:
                return f"flush {answer.status}"
        where = chance.choice([*self.siege.urls.values(), chance.choice(engines)])
        stem = chance.randrange(8)
        ids = [
            32 + (stem * 31 + at * (stem % 7 + 1)) % 90 for at in range(chance.choice((40, 200)))
        ]
        ids += [32 + chance.randrange(90) for _ in range(chance.choice((1, 30, 150)))]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        async with self.siege.session.post(f"{where}/generate", json=body) as answer:
            await answer.read()
            return str(answer.status)

    async def look(self) -> None:
        """Note all the time whether all is exact, for ever."""
        while True:
            exact = await self.siege.exact()
            self.figures.looks.append((time.monotonic(), exact))
            await asyncio.sleep(0.1)

    async def storm(self, seconds: float) -> None:
        """A blow every 2 s; all are over when it returns."""

        async def one(blow: Blow) -> None:
            begun = time.monotonic()
            await strike(self.siege, blow, self.chance)
            self.figures.spans.append((begun, time.monotonic(), blow.label))
            self.busy.discard(blow.victim)

        end = time.monotonic() + seconds
        tasks = [asyncio.create_task(self.glance(seconds / 2))]
        while time.monotonic() < end:
            if blow := drawn(self.siege, self.chance, self.busy):
                self.busy.add(blow.victim)
                self.touched.add(blow.victim)
                self.figures.blows[blow.label] += 1
                tasks.append(asyncio.create_task(one(blow)))
            await asyncio.sleep(EVERY_S)
        await asyncio.gather(*tasks)

    async def glance(self, after_s: float) -> None:
        """In the middle of it, without load: who has a whole way and is called exact, is so."""
        await asyncio.sleep(after_s)
        self.asking.clear()
        try:
            await asyncio.sleep(0.5)
            if self.under_way:
                return  # somebody does not answer
            self.touched = set(self.busy)
            await asyncio.sleep(QUIET_S)
            routers = [one for one in self.siege.urls if self.whole(one)]
            engines = [one for one in self.siege.engines if self.heard(one)]
            if routers and engines:
                await self.compare_some(routers, engines)
        finally:
            self.asking.set()

    def whole(self, name: str) -> bool:
        """This process and its way to Redis had no trouble."""
        return not {name, f"{name} redis", "redis"} & self.touched

    def heard(self, engine: str) -> bool:
        """An engine, and an ingest with its way to it, had no trouble."""
        ingests = (one for one in self.siege.children if one.startswith("ingest"))
        ways = (self.whole(one) and f"{one} {engine}" not in self.touched for one in ingests)
        return engine not in self.touched and any(ways)

    async def compare_some(self, routers: list[str], engines: list[str]) -> None:
        """These routers with these engines, as far as they call them exact."""
        try:
            truth = await self.siege.truth(engines)
            told = {router: await self.siege.told(router) for router in routers}
        except (aiohttp.ClientError, AssertionError, TimeoutError, OSError):
            return  # trouble came just now
        if self.touched & {*routers, *engines, "redis", *(f"{one} redis" for one in routers)}:
            return
        self.figures.glances += 1
        for router, workers in told.items():
            for worker, real in truth.items():
                one = workers[worker]
                if one.state == "exact" and one.blocks != real:
                    false, missing = len(one.blocks - real), len(real - one.blocks)
                    what = f"{router} {worker}: {false} false, {missing} missing"
                    self.figures.wrong.append(f"{what} while {sorted(self.touched)}")

    async def calm(self) -> None:
        """All is mended: 2 s of nothing, then compare; then it must become exact."""
        self.asking.clear()
        await until(lambda: not self.under_way, 15, "requests under way to end")
        await asyncio.sleep(QUIET_S)
        self.figures.quiet += 1
        await self.compare()
        await self.settle()
        self.asking.set()

    async def compare(self) -> None:
        """Both routers with every engine, whatever they call exact."""
        figures, truth = self.figures, await self.siege.truth()
        for router in self.siege.urls:
            for worker, told in (await self.siege.told(router)).items():
                real = truth[worker]
                where = f"quiet {figures.quiet} {router} {worker} {told.state}: {told.reason}"
                figures.compared += len(real)
                figures.false += [f"{where} {block}" for block in told.blocks - real]
                if told.state == "exact":
                    figures.missing += [f"{where} {block}" for block in real - told.blocks]
                    continue
                figures.inexact[told.state] += 1
                if not told.reason:
                    figures.silent.append(where)

    async def settle(self) -> None:
        """All becomes exact and equal, or it is said what is left."""
        left: list[str] = []

        async def settled() -> bool:
            left[:] = await self.left()
            return not left

        try:
            await until(settled, SETTLE_S)
        except AssertionError as error:
            raise AssertionError(f"LEFT after at most {SETTLE_S:g} s: {left}") from error

    async def left(self) -> list[str]:
        """Every worker that a router does not call exact, or not as its engine is."""
        truth, found = await self.siege.truth(), []
        for router in self.siege.urls:
            for worker, one in (await self.siege.told(router)).items():
                false, missing = len(one.blocks - truth[worker]), len(truth[worker] - one.blocks)
                if one.state != "exact" or false or missing:
                    what = f"{one.state}: {one.reason}; {false} false, {missing} missing"
                    found.append(f"{router} {worker} {what}")
        return found


async def test_after_every_quiet_moment_the_index_is_what_the_engines_hold() -> None:
    async with siege() as up:
        soak = Soak(up, random.Random(SEED))
        soak.asking.set()
        tasks = [asyncio.create_task(soak.client()) for _ in range(CLIENTS)]
        tasks.append(asyncio.create_task(soak.look()))
        try:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                await soak.storm(ROUND_S)
                await soak.calm()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            sys.stdout.write(soak.figures.line())
        found = soak.figures
        assert not found.false, found.false[:5]
        assert not found.missing, found.missing[:5]
        assert not found.silent, found.silent[:5]
        assert not found.wrong, found.wrong[:5]
        assert found.outcomes["200"] > 0 and found.quiet > 0 and found.compared > 0
        await at_the_end(soak)


async def at_the_end(soak: Soak) -> None:
    """Nobody asks any more: all is exact, and equal."""
    await soak.settle()
    assert await soak.siege.exact()

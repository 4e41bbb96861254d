"""Blows: one fault for one process or line of a siege; over when its call returns."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from kit.siege import Siege
from kvplane.children import Child

KINDS = ("kill", "stop", "restart", "partition")
LONG_S = 12.0  # seldom: beyond what an ingest may be silent for before it counts as dead


@dataclass(frozen=True)
class Blow:
    """What is done to whom."""

    kind: str
    victim: str  # a process's name, "redis", or the names at both ends of a line

    @property
    def label(self) -> str:
        """By kinds: engine-2 and engine-3 are alike."""
        if self.kind == "partition":
            return "partition " + "-".join(each.split("-")[0] for each in self.victim.split())
        return f"{self.kind} {self.victim.split('-')[0]}"


def drawn(siege: Siege, chance: random.Random, busy: set[str]) -> Blow | None:
    """A random blow for somebody who is not in trouble already; kinds of victims are equal."""
    kind = chance.choice(KINDS)
    if kind == "partition":
        by_ends: dict[str, list[str]] = {}
        for line in siege.cables:
            by_ends.setdefault("-".join(e.split("-")[0] for e in line.split()), []).append(line)
        victim = chance.choice(by_ends[chance.choice(sorted(by_ends))])
    else:
        groups: dict[str, list[str]] = {"redis": ["redis"]}
        for name in siege.children:
            groups.setdefault(name.split("-")[0], []).append(name)
        victim = chance.choice(groups[chance.choice(sorted(groups))])
    return None if victim in busy else Blow(kind, victim)


async def strike(siege: Siege, blow: Blow, chance: random.Random) -> None:
    """Done and over: everybody is up, every line is whole, who was started answers."""
    most_s = LONG_S if chance.random() < 0.15 else 4.0
    long_s, away_s = chance.uniform(0.2, most_s), chance.uniform(0.0, 2.0)
    if blow.kind == "partition":
        for cable in siege.cables[blow.victim]:
            cable.freeze() if chance.random() < 0.5 else cable.cut()
        await asyncio.sleep(long_s)
        for cable in siege.cables[blow.victim]:
            cable.mend()
    elif blow.victim == "redis":
        await _redis(siege, blow.kind, long_s, away_s)
    elif blow.kind == "stop":
        await _frozen(lambda number: _signal(siege.children[blow.victim], number), long_s)
    else:
        child = siege.children[blow.victim]
        if blow.kind == "kill":
            child.kill()
        await child.stop()
        await asyncio.sleep(away_s)
        await child.start()


async def _redis(siege: Siege, kind: str, long_s: float, away_s: float) -> None:
    if kind == "stop":
        await _frozen(siege.redis.send, long_s)
        return
    number = signal.SIGKILL if kind == "kill" else signal.SIGTERM
    await asyncio.to_thread(siege.redis.end, number)
    await asyncio.sleep(away_s)
    await asyncio.to_thread(siege.redis.start)


async def _frozen(send: Callable[[int], object], long_s: float) -> None:
    send(signal.SIGSTOP)
    try:
        await asyncio.sleep(long_s)
    finally:
        send(signal.SIGCONT)


def _signal(child: Child, number: int) -> None:
    assert child.pid is not None
    os.kill(child.pid, number)

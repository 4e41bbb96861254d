"""Drifting: a closed loop over a view that the test writes, in time that the test moves."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from msgspec import structs

from kit.clock import FakeClock
from kit.wait import until
from kvplane.index import View, chain
from kvplane.router.closed_loop import ClosedLoop
from kvplane.router.fleet import Fleet
from kvplane.router.foretold import Depth, Foretold
from kvplane.router.settings import DriftSettings
from kvplane.router.suspicions import Cause
from kvplane.vocabulary import (
    Epoch,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Role,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

P1 = Worker(Pod("p1"))
SPACE = Namespace("tiny", 16)


def prompt(number: int) -> list[int]:
    return [number * 1000 + at for at in range(100)]


class Desk:
    """A loop over a view that the test writes."""

    def __init__(self) -> None:
        self.view, self.fleet, self.clock = View(), Fleet(), FakeClock()
        self.counts: Counter[str] = Counter()
        self.down_s, self.blind = 0.0, ""
        self.in_touch_at = math.inf
        self.fleet.up(WorkerUp(P1.pod, "http://p1:1", Role.PREFILL, model="tiny"))
        self.believe(Knowledge.EXACT)
        self.view.note(P1, Epoch(1), 0, 0.0)
        self.loop = ClosedLoop(
            self.view,
            self.fleet,
            self.clock,
            DriftSettings(),
            self._count,
            lambda: self.down_s,
            lambda: self.blind,
            lambda: self.in_touch_at,
        )

    def _count(self, worker: Worker, outcome: str) -> None:
        self.counts[outcome] += 1

    def believe(self, state: Knowledge, epoch: int = 1) -> None:
        self.view.apply(Known(P1, Epoch(epoch), state, "as told", 0.0, "a"))

    def store(self, number: int, sequence: int | None = None, space: Namespace = SPACE) -> None:
        hashes = chain(prompt(number), space).blocks
        self.view.apply(Stored(P1, Epoch(1), Tier.GPU, None, hashes, 16))
        if sequence is not None:
            self.view.note(P1, Epoch(1), sequence, 0.0)

    def routed(self, number: int, exact: bool = True, salt: str = "") -> Foretold:
        facts = self.view.facts(P1)
        assert facts is not None
        space = replace(SPACE, salt=salt)
        bare = Foretold(P1, facts.epoch, facts.last, exact, space, (prompt(number),), {})
        depth = Depth(predicted=bare.now(self.view).get(P1, 0))
        return structs.replace(bare, depths={P1: depth})

    def served(self, number: int, actual: int | None, exact: bool = True, salt: str = "") -> None:
        self.loop.answered(self.routed(number, exact, salt), actual)

    async def passes(self, seconds: float) -> None:
        """Time goes on, and the loop has looked at all of it."""
        for _ in range(round(seconds / 0.25)):
            await until(self.clock.sleeping)
            self.clock.advance(0.25)
            await until(self.clock.sleeping)

    async def jumps(self, seconds: float) -> None:
        """The same with a single look, at the end of it."""
        await until(self.clock.sleeping)
        self.clock.advance(seconds)
        await until(self.clock.sleeping)

    @property
    def cause(self) -> Cause | None:
        found = self.loop.verdict(P1)
        return found.cause if found else None

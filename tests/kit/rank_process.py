"""A prefill or decode rank of its own process, for tests that kill and stop one.

python -m kit.rank_process prefill PORT GENERATION     python -m kit.rank_process decode PREFILL
stdin: `room NUMBER`, stdout: one line of JSON per event; memory is PAGES pages of PAGE_BYTES.
The backend is tcp, or what KVPLANE_TEST_BACKEND says.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvplane.bootstrap import Topology
from kvplane.runtime import SystemClock
from kvplane.transfer import (
    BACKENDS,
    Backend,
    Layout,
    Metadata,
    Offers,
    Puller,
    Region,
    TransferMetrics,
    TransferSettings,
    must_exit_hard,
)
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape

BACKEND = "KVPLANE_TEST_BACKEND"
PAGES, PAGE_BYTES = 160, 1024 * 1024  # a room takes some 100 ms: time to be stopped in the middle
LAYOUT = Layout("tiny", 16, "float16", 1, 1, 16, PAGE_BYTES)
SETTINGS = TransferSettings(
    bootstrapping_s=5.0, connect_s=1.0, stall_s=1.0, verdict_s=2.0, hello_s=1.0, fence_s=2.0
)


@dataclass
class Endpoint:
    """Where the one rank listens."""

    host: str
    port: int
    generation: Generation | None = None


@dataclass
class OneRank:
    """A resolver that knows one prefill of one rank."""

    endpoint_: Endpoint
    topology_: Topology = field(default_factory=lambda: Topology(1, 1, 1, 1))
    generation: Generation | None = None

    async def topology(self, address: str) -> Any:
        return _Told(self.topology_, self.generation)

    async def endpoint(self, *place: Any, **expected: Any) -> Endpoint:
        return self.endpoint_

    async def dp_ranks(self, address: str, rooms: Any, wait_s: float = 0) -> dict[Room, int]:
        return {}

    def forget(self, address: str) -> None:
        """Nothing is kept."""


@dataclass
class _Told:
    topology: Topology
    generation: Generation | None


def memory(seed: int) -> np.ndarray:
    """Every page its own bytes."""
    base = np.random.default_rng(seed).integers(0, 256, PAGE_BYTES, np.uint8)
    return base ^ np.arange(PAGES, dtype=np.uint8)[:, None]


async def backend_of(array: np.ndarray, metrics: TransferMetrics, name: str = "tcp") -> Backend:
    """Started on loopback."""
    backend = BACKENDS[name](SETTINGS, metrics)
    await backend.start("127.0.0.1", [Region.of(array)])
    return backend


def offers_of(backend: Backend, metrics: TransferMetrics, generation: str) -> Offers:
    """A prefill rank."""
    return Offers(
        backend, LAYOUT, Generation(generation), lambda record: None, SystemClock(), SETTINGS,
        metrics,
    )  # fmt: skip


def puller_of(backend: Backend, metrics: TransferMetrics, resolver: Any) -> Puller:
    """A decode rank."""
    return Puller(
        backend, LAYOUT, resolver, Generation("d1"), lambda record: None, SystemClock(), SETTINGS,
        metrics, Shape(),
    )  # fmt: skip


async def deliver(offers: Offers, room: int, deadline_s: float = 8.0) -> None:
    """All pages, in order."""
    said = Metadata(Room(room), tokens=64, first_token=7)
    await offers.deliver(Room(room), range(PAGES), said, deadline_s)


async def pull(puller: Puller, room: int, released: Any, deadline_s: float = 8.0) -> Metadata:
    """All pages, in order."""
    triple = BootstrapTriple("127.0.0.1", 8998, Room(room))
    return await puller.pull(triple, range(PAGES), 64, deadline_s=deadline_s, released=released)


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


async def main(role: str, *words: str) -> None:
    metrics = TransferMetrics()
    array = memory(1 if role == "prefill" else 2)
    backend = await backend_of(array, metrics, os.environ.get(BACKEND, "tcp"))
    if role == "prefill":
        offers = offers_of(backend, metrics, words[1])
        port = await offers.start("127.0.0.1", int(words[0]))
        say(port=port)
        await _serve(lambda room: deliver(offers, room))
    else:
        host, port_text = words[0].rsplit(":", 1)
        puller = puller_of(backend, metrics, OneRank(Endpoint(host, int(port_text))))
        say(port=0)
        await _serve(lambda room: _pulled(puller, room))


async def _pulled(puller: Puller, room: int) -> None:
    released = asyncio.Event()
    try:
        await pull(puller, room, lambda pages: released.set())
    except BaseException:
        await released.wait()
        raise


async def _serve(work: Any) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "end 0")

    threading.Thread(target=read, daemon=True).start()
    tasks = set()
    while True:
        word, number = (await lines.get()).split()
        if word == "end":
            return
        tasks.add(asyncio.create_task(_told(int(number), work)))


async def _told(room: int, work: Any) -> None:
    try:
        await work(room)
        say(room=room, ok=True)
    except Exception as error:
        say(room=room, ok=False, kind=getattr(error, "kind", "other"), why=str(error))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    if must_exit_hard():
        os._exit(0)

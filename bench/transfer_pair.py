"""Transfer pair: a prefill and a decode process that move rooms of random pages, one backend.

Edge of bench/, run as `python -m bench.transfer_pair BACKEND`: this process is the decode and
measures, it starts the prefill. What is timed is the product's own path, from bind to verdict.
Both end by os._exit: NIXL's library crashes in a normal exit. Open it to change what one room is.

    decode  --stdin--> {"case": 1, "room": 7, "pages": [...]}   prefill: deliver
    prefill --stdout-> [port, port, ...]                        one Offers per case
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import uvloop

from kvplane.bootstrap import Topology
from kvplane.runtime import SystemClock
from kvplane.transfer import (
    BACKENDS,
    Layout,
    Metadata,
    Offers,
    Puller,
    Region,
    TransferMetrics,
    TransferSettings,
)
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape

HOST = "127.0.0.1"
DEADLINE_S = 30.0
AT_ONCE = 2  # rooms under way
SETTINGS = TransferSettings()


@dataclass(frozen=True)
class Case:
    """One size of page, with or without page sums."""

    page_bytes: int
    pages: int  # of one room
    sums: bool

    @property
    def name(self) -> str:
        """As a row says it."""
        size = f"{self.page_bytes >> 10} KiB" if self.page_bytes < 1 << 20 else "1 MiB"
        return f"{size} pages, {'sums' if self.sums else 'no sums'}"


CASES = [
    Case(size, pages, sums)
    for size, pages in ((64 << 10, 256), (1 << 20, 32))
    for sums in (True, False)
]
SIZES = sorted({(case.page_bytes, 2 * AT_ONCE * case.pages) for case in CASES})


def page_of(number: int, page_bytes: int) -> Any:
    """What the prefill's page of that number holds."""
    words = np.arange(page_bytes // 4, dtype=np.uint32)
    return words * np.uint32(2 * number + 1) + np.uint32(number)


@asynccontextmanager
async def memories(backend: str, filled: bool) -> AsyncIterator[dict[int, tuple[Any, Any]]]:
    """Page size -> (pool, backend); one backend each."""
    metrics, made = TransferMetrics(), {}
    try:
        for page_bytes, pages in SIZES:
            pool = np.zeros((pages, page_bytes // 4), np.uint32)
            if filled:
                pool[:] = [page_of(number, page_bytes) for number in range(pages)]
            one = BACKENDS[backend](SETTINGS, metrics)
            made[page_bytes] = (pool, one)
            await one.start(HOST, [Region.of(pool)])
        yield made
    finally:
        for _, one in made.values():
            await one.stop()


def layout(case: Case) -> Layout:
    """The same on both sides; nobody looks inside."""
    return Layout("bench", 16, "uint32", 1, 1, case.page_bytes // 64, case.page_bytes)


async def prefill(backend: str) -> None:
    """Deliver what is read, until there is nothing more to read."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with memories(backend, filled=True) as made:
        sides = []
        for case in CASES:
            settings = replace(SETTINGS, checksums=case.sums)
            sides.append(
                Offers(
                    made[case.page_bytes][1], layout(case), Generation("p"), _nobody,
                    SystemClock(), settings, TransferMetrics(),
                )
            )  # fmt: skip
        print(json.dumps([await side.start(HOST) for side in sides]), flush=True)
        rooms: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            told = json.loads(line)
            said = Metadata(Room(told["room"]), tokens=16, first_token=1, cached_tokens=0)
            sent = sides[told["case"]].deliver(said.room, told["pages"], said, DEADLINE_S)
            rooms.add(task := asyncio.create_task(sent))
            task.add_done_callback(rooms.discard)
        for side in sides:
            await side.close()


class Decode:
    """Pulls rooms, case by case."""

    def __init__(self, made: dict[int, tuple[Any, Any]], ports: Sequence[int], tell: Any) -> None:
        self._made, self._tell, self._chance = made, tell, random.Random(4)
        self._rooms = 0
        self._pullers = [
            Puller(
                made[case.page_bytes][1], layout(case), _Fixed(port), Generation("d"), _nobody,
                SystemClock(), replace(SETTINGS, checksums=case.sums), TransferMetrics(), Shape(),
            )
            for case, port in zip(CASES, ports, strict=True)
        ]  # fmt: skip

    async def close(self) -> None:
        """Wait for the last fences."""
        for puller in self._pullers:
            await puller.close()

    async def room(self, at: int, part: int) -> tuple[list[int], list[int]]:
        """Move one; `part` of the pool is ours alone. (pages there, pages here)"""
        case = CASES[at]
        self._rooms += 1
        room = self._rooms
        everywhere = dict(SIZES)[case.page_bytes]
        share = everywhere // AT_ONCE
        there = self._chance.sample(range(everywhere), case.pages)
        here = self._chance.sample(range(part * share, (part + 1) * share), case.pages)
        self._tell.write(json.dumps({"case": at, "room": room, "pages": there}).encode() + b"\n")
        triple = BootstrapTriple(HOST, 1, Room(room))
        pull = self._pullers[at].pull(triple, here, 16, deadline_s=DEADLINE_S, released=_nobody)
        await pull
        return there, here

    async def check(self, at: int) -> None:
        """One room, byte by byte."""
        there, here = await self.room(at, 0)
        pool = self._made[CASES[at].page_bytes][0]
        for source, page in zip(there, here, strict=True):
            wanted = page_of(source, CASES[at].page_bytes)
            assert np.array_equal(pool[page], wanted), f"{CASES[at].name}: page {page}"

    async def rate(self, at: int, seconds: float) -> float:
        """Pages per second, AT_ONCE rooms under way."""
        began = time.perf_counter()

        async def many(part: int) -> int:
            rooms = 0
            while not rooms or time.perf_counter() - began < seconds:
                await self.room(at, part)
                rooms += 1
            return rooms

        done = await asyncio.gather(*(many(part) for part in range(AT_ONCE)))
        return sum(done) * CASES[at].pages / (time.perf_counter() - began)


async def decode(backend: str, seconds: float, rounds: int) -> dict[str, list[float]]:
    """Case -> pages per second, round by round; the cases take turns."""
    words = [sys.executable, "-m", "bench.transfer_pair", backend, "prefill"]
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert other.stdin is not None and other.stdout is not None
    try:
        async with memories(backend, filled=False) as made:
            ports = json.loads(await asyncio.wait_for(other.stdout.readline(), DEADLINE_S))
            side = Decode(made, ports, other.stdin)
            try:
                for at in range(len(CASES)):
                    await side.check(at)
                found: dict[str, list[float]] = {case.name: [] for case in CASES}
                for _ in range(rounds):
                    for at, case in enumerate(CASES):
                        found[case.name].append(await side.rate(at, seconds))
            finally:
                await side.close()
        return found
    finally:
        other.stdin.close()
        try:
            await asyncio.wait_for(other.wait(), 10.0)
        except TimeoutError:
            other.kill()


class _Fixed:
    """The resolver: there is one rank, and it listens here."""

    def __init__(self, port: int) -> None:
        self._endpoint = SimpleNamespace(host=HOST, port=port, generation=None)

    async def topology(self, address: str) -> Any:
        return SimpleNamespace(topology=Topology(1, 1, 1, 1), generation=None)

    async def endpoint(self, *where: Any, expected: Any = None) -> Any:
        return self._endpoint

    async def dp_ranks(
        self, address: str, rooms: Sequence[Room], wait_s: float = 0
    ) -> dict[Room, int]:
        return {}

    def forget(self, address: str) -> None:
        pass


def _nobody(what: object) -> None:
    """Whoever wants to know is not here."""


def main(words: Sequence[str]) -> None:
    """BACKEND SECONDS ROUNDS, or BACKEND prefill."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if words[1] == "prefill":
            runner.run(prefill(words[0]))
        else:
            print(json.dumps(runner.run(decode(words[0], float(words[1]), int(words[2])))))
    sys.stdout.flush()


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1:])
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)

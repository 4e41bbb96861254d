"""Siege: engines, ingests, routers and a Redis with AOF, each a process, every line a cable.

What the soak of the index breaks and then compares: names, lines, processes; no judgement.

    engines <--events, replay-- ingests --> Redis <-- routers        each arrow goes through a cable
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from kit.cable import Cable
from kit.durable import Durable, durable
from kit.indexed import ingest
from kit.plane import EngineSeat, together
from kit.ports import free_ports
from kit.wait import until
from kvplane.children import Child
from kvplane.index import chain, to_hex
from kvplane.vocabulary import Namespace

WATCHED = ["--health-check-interval-secs", "1"]
INGESTS, ROUTERS = ("ingest-0", "ingest-1"), ("router-0", "router-1")
SEATS = (
    EngineSeat("engine-0", "both", ["--blocks", "96"]),
    EngineSeat("engine-1", "both", ["--blocks", "48", "--event-form", "sglang"]),
    EngineSeat("engine-2", "both", ["--blocks", "256"]),
    EngineSeat("engine-3", "both", ["--blocks", "64", "--dp", "2"]),
)
NAMES = tuple(seat.name for seat in SEATS)
RANKS = {"engine-3": 2}  # of the others 1


@dataclass(frozen=True)
class Told:
    """What one router says of one worker."""

    state: str
    reason: str
    blocks: frozenset[str]


@dataclass
class Siege:
    """All of it, running."""

    engines: Mapping[str, EngineSeat]
    children: dict[str, Child]
    urls: dict[str, str]  # of the routers
    redis: Durable
    cables: dict[str, list[Cable]]  # by the two names at their ends, like "ingest-0 redis"
    session: aiohttp.ClientSession

    def workers(self) -> dict[str, tuple[str, int]]:
        """Name in the index -> engine, dp rank."""
        found = {}
        for name, seat in self.engines.items():
            for rank in range(RANKS.get(name, 1)):
                found[seat.pod if rank == 0 else f"{seat.pod}@{rank}"] = name, rank
        return found

    async def truth(self, engines: Collection[str] = NAMES) -> dict[str, frozenset[str]]:
        """Worker -> blocks that lie there, by our public names."""
        ranks: dict[str, list[frozenset[str]]] = {}
        for name in engines:
            told = await self.get(f"{self.engines[name].url}/truth")
            ranks[name] = [_names(one["blocks"], told["block_size"]) for one in told["ranks"]]
        workers = self.workers().items()
        return {worker: ranks[name][rank] for worker, (name, rank) in workers if name in ranks}

    async def told(self, router: str) -> dict[str, Told]:
        """Worker -> what this router says of it."""
        url = self.urls[router]
        listed = {one["worker"]: one for one in (await self.get(f"{url}/index/workers"))["workers"]}
        found = {}
        for worker in self.workers():
            one = listed.get(worker, {"knowledge": "missing", "reason": ""})
            blocks = await self._believed(url, worker)
            found[worker] = Told(one["knowledge"], one["reason"], blocks)
        return found

    async def _believed(self, url: str, worker: str) -> frozenset[str]:
        async with self.session.get(f"{url}/index/snapshot", params={"worker": worker}) as answer:
            if answer.status != 200:
                return frozenset()
            _, *lines = (await answer.text()).splitlines()
        return frozenset(block for line in lines for block in json.loads(line)["blocks"])

    async def get(self, url: str) -> Any:
        async with self.session.get(url) as answer:
            assert answer.status == 200, f"{url}: {await answer.text()}"
            return await answer.json()

    async def exact(self) -> bool:
        """Whether every router that answers calls every worker exact."""
        for url in self.urls.values():
            try:
                async with asyncio.timeout(0.5):
                    told = (await self.get(f"{url}/index/workers"))["workers"]
            except (aiohttp.ClientError, AssertionError, TimeoutError):
                return False
            exact = [one["worker"] for one in told if one["knowledge"] == "exact"]
            if set(exact) != set(self.workers()):
                return False
        return True


def _names(blocks: list[dict[str, Any]], size: int) -> frozenset[str]:
    """Our public names of an engine's blocks, each of the tokens from the root on."""
    by_hash = {block["hash"]: block for block in blocks}
    found = set()
    for block in blocks:
        ids: list[int] = []
        above: Any = block
        while above is not None:
            ids[:0] = above["tokens"]
            above = by_hash.get(above["parent"])
        space = Namespace("tiny", size, salt=block["salt"] or "")
        found.add(to_hex(chain(ids, space).blocks[-1]))
    return frozenset(found)


def _words(
    cables: Mapping[str, list[Cable]], name: str, seats: tuple[EngineSeat, ...]
) -> list[str]:
    """How a process is told of the engines: an ingest by its own lines."""
    words = []
    for seat in seats:
        words += seat.gateway_flags()
        if lines := cables.get(f"{name} {seat.name}"):
            half = len(lines) // 2  # first the events of every rank, then their replays
            for at, line in enumerate(lines):
                flag = "--events" if at < half else "--replay"
                words += [flag, f"tcp://127.0.0.1:{line.listen}"]
    return words


async def _wire(stack: contextlib.AsyncExitStack, redis: Durable) -> dict[str, list[Cable]]:
    cables: dict[str, list[Cable]] = {}
    for name in (*INGESTS, *ROUTERS):
        cables[f"{name} redis"] = [await stack.enter_async_context(Cable(redis.port))]
    for name in INGESTS:
        for seat in SEATS:
            ranks = range(RANKS.get(seat.name, 1))
            lines = [Cable(first + rank) for first in seat.ports[1:3] for rank in ranks]
            cables[f"{name} {seat.name}"] = [await stack.enter_async_context(o) for o in lines]
    return cables


@contextlib.asynccontextmanager
async def siege() -> AsyncIterator[Siege]:
    """Everything up and exact; all gone at the end."""
    async with contextlib.AsyncExitStack() as stack:
        redis = stack.enter_context(durable())
        cables = await _wire(stack, redis)
        children = {seat.name: seat.child() for seat in SEATS}
        urls = {}
        for name in (*INGESTS, *ROUTERS):
            url = f"redis://127.0.0.1:{cables[f'{name} redis'][0].listen}/0"
            words = ["--redis", url, *WATCHED, *_words(cables, name, SEATS)]
            if name in INGESTS:
                children[name] = ingest(name, words)
            else:
                (port,) = free_ports(1)
                urls[name] = f"http://127.0.0.1:{port}"
                gateway = ["router", "--port", str(port), "--tokenizer", "builtin", *words]
                children[name] = Child(name, gateway, f"{urls[name]}/liveness")
        await stack.enter_async_context(together(children.values()))
        timeout = aiohttp.ClientTimeout(total=30)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        engines = {seat.name: seat for seat in SEATS}
        made = Siege(engines, children, urls, redis, cables, session)
        await until(made.exact, 60, "every worker known exactly")
        yield made

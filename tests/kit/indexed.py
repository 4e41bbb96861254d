"""A plane in either form for stories about the index: one process, or Redis, ingest and router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kit.plane import EngineSeat, Plane, together
from kit.ports import free_ports
from kit.wait import until
from kvplane.children import Child
from kvplane.index import chain, to_hex
from kvplane.vocabulary import Namespace

WATCHED = ["--health-check-interval-secs", "0.5"]


@dataclass
class Cable:
    """A TCP line to a port that can be cut: both ends see it closed, and nobody answers."""

    port: int
    listen: int = field(default_factory=lambda: free_ports(1)[0])
    whole: bool = True

    async def __aenter__(self) -> Cable:
        self._ends: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.listen)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self.whole = False
        for end in self._ends:
            end.transport.abort()

    def mend(self) -> None:
        self.whole = True

    async def _serve(self, near: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._ends.add(out)
        try:
            if self.whole:
                far, there = await asyncio.open_connection("127.0.0.1", self.port)
                self._ends.add(there)
                await asyncio.gather(_pump(near, there), _pump(far, out))
        except OSError:
            pass
        finally:
            out.transport.abort()
            self._tasks.discard(task)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    sink.transport.abort()


@contextlib.asynccontextmanager
async def indexed(
    seats: Sequence[EngineSeat],
    redis: str | None = None,
    prefix: str = "kvplane",
    ingests: Sequence[str] = ("ingest",),
    lines: dict[str, tuple[Cable, Cable]] | None = None,
    wait: bool = True,
) -> AsyncIterator[Plane]:
    """Engines and a gateway; with `redis` also ingest processes. `lines`: cables an engine's
    events and replay go through. All workers are known exactly at the start."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    named = [word for seat in seats for word in _named(seat, (lines or {}).get(seat.name))]
    gateway = ["--port", str(port), "--tokenizer", "builtin", *WATCHED, *named]
    children = {seat.name: seat.child() for seat in seats}
    if redis is None:
        children["gateway"] = Child("gateway", ["all", *gateway], f"{url}/liveness")
    else:
        store = ["--redis", redis, "--redis-prefix", prefix]
        for name in ingests:
            children[name] = ingest(name, [*store, *WATCHED, *named])
        words = ["router", *store, *gateway]
        children["gateway"] = Child("gateway", words, f"{url}/liveness")
    timeout = aiohttp.ClientTimeout(total=30)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(together(children.values()))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        running = Plane(url, {seat.name: seat for seat in seats}, children, session)
        if wait:
            await settled(running)
        yield running


def ingest(name: str, words: Sequence[str]) -> Child:
    (port,) = free_ports(1)
    aside = ["--prometheus-port", str(port)]
    return Child(name, ["ingest", *words, *aside], f"http://127.0.0.1:{port}/metrics")


def _named(seat: EngineSeat, line: tuple[Cable, Cable] | None) -> list[str]:
    if line is None:
        return seat.gateway_flags()
    events, replay = (f"tcp://127.0.0.1:{cable.listen}" for cable in line)
    return [*seat.gateway_flags(), "--events", events, "--replay", replay]


async def fill(running: Plane, name: str, *prompts: int, tokens: int = 100) -> None:
    """Send numbered prompts straight to one engine."""
    for number in prompts:
        ids = [32 + (number * 31 + at * (number % 7 + 1)) % 90 for at in range(tokens)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
        status, found, _ = await running.ask("/generate", body, at=running.engines[name].url)
        assert status == 200, found


async def truth(running: Plane, name: str) -> set[str]:
    """Blocks that lie in an engine, by our public names."""
    told = await running.get("/truth", at=running.engines[name].url)
    space = Namespace("tiny", told["block_size"])
    blocks: set[str] = set()
    for rank in told["ranks"]:
        by_hash = {block["hash"]: block for block in rank["blocks"]}
        for block in rank["blocks"]:
            ids: list[int] = []
            above: Any = block
            while above is not None:
                ids[:0] = above["tokens"]
                above = by_hash.get(above["parent"])
            blocks.add(to_hex(chain(ids, space).blocks[-1]))
    return blocks


async def believed(running: Plane, name: str) -> set[str]:
    """Blocks that the index says an engine holds."""
    asked = {"worker": running.engines[name].pod}
    async with running.session.get(f"{running.url}/index/snapshot", params=asked) as answer:
        if answer.status != 200:
            return set()
        _, *lines = (await answer.text()).splitlines()
        return {block for line in lines for block in json.loads(line)["blocks"]}


async def knowledge(running: Plane, name: str) -> tuple[str, str]:
    """(state, reason) of an engine in the index."""
    async with running.session.get(
        f"{running.url}/index/workers/{running.engines[name].pod}"
    ) as answer:
        found = await answer.json()
        return found.get("knowledge", "missing"), found.get("reason", "")


async def differences(running: Plane) -> list[str]:
    """What is not as it is in the engines; nothing where the index is exact and says so."""
    said = []
    for name in running.engines:
        state, reason = await knowledge(running, name)
        if state != "exact":
            said.append(f"{name} is {state}: {reason}")
        real, told = await truth(running, name), await believed(running, name)
        if real != told:
            said.append(f"{name}: {len(told - real)} too many, {len(real - told)} missing")
        counted = (await running.get(f"/index/workers/{running.engines[name].pod}"))["blocks"]
        if counted["gpu"] != len(real):
            said.append(f"{name}: counts {counted}, holds {len(real)}")
    return said


async def settled(running: Plane, timeout_s: float = 15.0) -> None:
    """Wait until the index equals the engines and says that it is exact."""
    last: list[str] = []

    async def same() -> bool:
        nonlocal last
        try:
            last = await differences(running)
        except (aiohttp.ClientError, AssertionError) as error:
            last = [repr(error)]
        return not last

    try:
        await until(same, timeout_s)
    except AssertionError:
        raise AssertionError(f"not settled within {timeout_s} s: {last}") from None

"""A plane in either form for stories about the index: one process, or Redis, ingest and router."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp

from kit.cable import Cable
from kit.plane import EngineSeat, Plane, together
from kit.ports import free_ports
from kit.wait import until
from kvplane.children import Child
from kvplane.index import chain, to_hex
from kvplane.vocabulary import Namespace

WATCHED = ["--health-check-interval-secs", "0.5"]


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

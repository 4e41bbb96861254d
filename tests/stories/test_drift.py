"""What the index foretells is held against what engines find: a broken precondition is named, the
traffic goes on meanwhile, and the alarm ends by itself once it is repaired."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import zmq
import zmq.asyncio
from kit.indexed import Cable, fill, indexed, settled
from kit.plane import EngineSeat, Plane
from kit.ports import free_port
from kit.wait import until

pytestmark = pytest.mark.slow


async def ask(running: Plane, number: int) -> dict[str, str]:
    """One numbered prompt of 100 tokens through the gateway, always served; its headers."""
    ids = [32 + (number * 31 + at * (number % 7 + 1)) % 90 for at in range(100)]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    status, found, headers = await running.ask("/generate", body)
    assert status == 200, found
    return headers


async def finding(running: Plane, name: str) -> dict[str, Any]:
    """What GET /diagnosis says of one engine; nothing where all is well."""
    about = f"worker {running.engines[name].pod}"
    found = (await running.get("/diagnosis"))["findings"]
    return next((one for one in found if one["about"] == about), {})


async def gauge(running: Plane, name: str, cause: str) -> float:
    """The drift gauge of one engine."""
    async with running.session.get(f"{running.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    start = f'kvplane_router_drift{{cause="{cause}",worker="{running.engines[name].pod}"}}'
    (line,) = [one for one in lines if one.startswith(start)]
    return float(line.split()[-1])


async def test_an_endpoint_that_is_another_workers_is_named() -> None:
    one, two = EngineSeat("one", "both"), EngineSeat("two", "both")
    async with contextlib.AsyncExitStack() as stack:
        wrong = [await stack.enter_async_context(Cable(port)) for port in two.ports[1:3]]
        lines = {"one": (wrong[0], wrong[1])}
        running = await stack.enter_async_context(indexed([one, two], lines=lines))
        await fill(running, "two", *range(20))
        for number in range(20):
            await ask(running, number)
        found = await until(lambda: finding(running, "one"), 10, "an alarm")
        assert found["sentence"].startswith("wrong worker identity: index says"), found
        assert found["culprit"] == f"event endpoint of {one.pod}" and two.pod in found["next_step"]
        assert not await finding(running, "two")
        assert await gauge(running, "one", "wrong worker identity") == 1
        headers = [await ask(running, number) for number in (100, 107)]
        (told,) = [one for one in headers if one["x-kvplane-prefill"] == running.engines["one"].pod]
        assert told["x-kvplane-knowledge"] == "partial"
        assert told["x-kvplane-reason"].startswith("wrong worker identity")
        for cable, port in zip(wrong, one.ports[1:3], strict=True):
            cable.cut()
            cable.port = port
            cable.mend()
        await settled(running)
        for number in range(20):
            await ask(running, number)
        await until(lambda: _well(running, "one"), 10, "the alarm to end")
        assert await gauge(running, "one", "wrong worker identity") == 0


async def _well(running: Plane, name: str) -> bool:
    return not await finding(running, name)


@dataclass
class Relay:
    """A publisher's stream told on at another port, or swallowed while the line stays up."""

    port: int
    listen: int
    swallowing: bool = False

    async def __aenter__(self) -> Relay:
        self._context = zmq.asyncio.Context()
        self._from, self._to = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._from.setsockopt(zmq.SUBSCRIBE, b"")
        self._from.connect(f"tcp://127.0.0.1:{self.port}")
        self._to.bind(f"tcp://127.0.0.1:{self.listen}")
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _run(self) -> None:
        while True:
            parts = await self._from.recv_multipart()
            if not self.swallowing:
                await self._to.send_multipart(parts)


@dataclass
class Relayed(EngineSeat):
    """An engine that is heard at another port."""

    listen: int = 0

    def gateway_flags(self) -> list[str]:
        return [*super().gateway_flags(), "--events", f"tcp://127.0.0.1:{self.listen}"]


@contextlib.asynccontextmanager
async def relayed(swallowing: bool) -> AsyncIterator[tuple[Plane, Relay]]:
    """Engines "one", heard through a relay, and "two"; both serve."""
    one, two = Relayed("one", "both", listen=free_port()), EngineSeat("two", "both")
    async with (
        Relay(one.ports[1], one.listen, swallowing) as relay,
        indexed([one, two], wait=False) as running,
    ):

        async def serve() -> bool:
            workers = (await running.get("/workers"))["workers"]
            return sum(worker["is_healthy"] for worker in workers) == 2

        await until(serve, 20, "both to serve")
        yield running, relay


@pytest.mark.parametrize("ever_heard", [False, True])
async def test_a_silent_stream_is_named_and_no_depth_of_it_is_relied_on(ever_heard: bool) -> None:
    async with relayed(swallowing=not ever_heard) as (running, relay):
        one = running.engines["one"].pod
        numbers = iter(range(1000, 2000))
        if ever_heard:
            await until(lambda: exact(running, next(numbers), one), 20, "one to be known exactly")
            relay.swallowing = True
        for number in range(200, 300):
            await ask(running, number)
        found = await until(lambda: said_silent(running), 20, "an alarm")
        assert found["culprit"] == f"event stream of {one}"
        assert await gauge(running, "one", "stream silent") == 1
        assert await gauge(running, "two", "stream silent") == 0
        headers = [await ask(running, number) for number in range(200, 220)]
        told = [found for found in headers if found["x-kvplane-prefill"] == one]
        for found in told:
            assert found["x-kvplane-knowledge"] == "dark", found
            assert found["x-kvplane-reason"].startswith("stream silent"), found
            assert found["x-kvplane-depth"] == "0/6"
        assert len(told) < len(headers)  # what two is known to hold is served there
        relay.swallowing = False

        async def heard() -> bool:
            await ask(running, next(numbers))
            return await gauge(running, "one", "stream silent") == 0

        await until(heard, 20, "the alarm to end")


async def said_silent(running: Plane) -> dict[str, Any]:
    found = await finding(running, "one")
    return found if found.get("sentence", "").startswith("stream silent") else {}


async def exact(running: Plane, number: int, pod: str) -> bool:
    """Asks; true when this worker served and is believed."""
    headers = await ask(running, number)
    return headers["x-kvplane-prefill"] == pod and headers["x-kvplane-knowledge"] == "exact"

"""A whole plane of processes for stories: engines and a gateway, each a `kvplane` command."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kit.ports import free_ports
from kit.wait import until
from kvplane.children import Child


@dataclass
class EngineSeat:
    """One engine process: where it listens and how it was started."""

    name: str
    role: str
    flags: Sequence[str] = ()
    ports: list[int] = field(default_factory=lambda: free_ports(4, run=8))  # dp ranks count up

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def pod(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def child(self) -> Child:
        port, events, replay, bootstrap = self.ports
        words = ["engine", "--role", self.role, "--port", str(port)]
        words += ["--events-port", str(events), "--replay-port", str(replay)]
        words += ["--bootstrap-port", str(bootstrap), *self.flags]
        return Child(self.name, words, f"{self.url}/health")

    def gateway_flags(self) -> list[str]:
        if self.role == "prefill":
            return ["--prefill", self.url, str(self.ports[3])]
        return ["--decode" if self.role == "decode" else "--worker-urls", self.url]


@dataclass
class Plane:
    """A gateway over engines, all running; `ask` sends one request through it."""

    url: str
    engines: dict[str, EngineSeat]
    children: dict[str, Child]
    session: aiohttp.ClientSession

    async def ask(
        self, path: str, body: dict[str, Any], at: str | None = None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, JSON, headers with lower-case names) of one POST, to `at` or the gateway."""
        async with self.session.post(f"{at or self.url}{path}", json=body) as answer:
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, await answer.json(), headers

    async def get(self, path: str, at: str | None = None) -> Any:
        async with self.session.get(f"{at or self.url}{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def fault(self, engine: str, **fault: Any) -> None:
        status, found, _ = await self.ask("/fault", fault, at=self.engines[engine].url)
        assert status == 200, found


@contextlib.asynccontextmanager
async def together(children: Collection[Child]) -> AsyncIterator[None]:
    """Processes that start side by side and end side by side."""
    try:
        await asyncio.gather(*(child.start() for child in children))
        yield
    finally:
        await asyncio.gather(*(child.stop() for child in children))


@contextlib.asynccontextmanager
async def plane(
    engines: Sequence[EngineSeat],
    gateway_flags: Sequence[str] = (),
    ready: bool = True,
    workers: int | None = None,
) -> AsyncIterator[Plane]:
    """Start engines side by side, then the gateway over them; all gone at the end.

    `workers`: how many there are together; None = every engine is one.
    """
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    children = {seat.name: seat.child() for seat in engines}
    words = ["all", "--port", str(port), "--tokenizer", "builtin", *gateway_flags]
    for seat in engines:
        words += seat.gateway_flags()
    children["gateway"] = Child("gateway", words, f"{url}/liveness")
    timeout = aiohttp.ClientTimeout(total=60)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(together(children.values()))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        running = Plane(url, {seat.name: seat for seat in engines}, children, session)
        if ready:
            count = len(engines) if workers is None else workers
            await until(
                lambda: _known(running, count), timeout_s=30, what="all workers known exactly"
            )
        yield running


async def _known(running: Plane, workers: int) -> bool:
    found = await running.get("/index/workers")
    exact = [one for one in found["workers"] if one["knowledge"] == "exact"]
    async with running.session.get(f"{running.url}/readiness") as answer:
        return answer.status == 200 and len(exact) == workers

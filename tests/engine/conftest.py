"""Engines in this process, each on a real port, with a real bootstrap server beside a prefill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from kit.ports import free_port
from kit.wait import until

from kvplane.bootstrap import Directory, RoomTable, bootstrap_app
from kvplane.doors import Server
from kvplane.engine import Engine, EngineSettings
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Generation, Role


@dataclass
class Running:
    """One engine and a client for it."""

    engine: Engine
    http: aiohttp.ClientSession

    async def post(self, path: str, **body: Any) -> tuple[int, Any]:
        """Status and JSON (or text)."""
        async with self.http.post(path, json=body) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def tokens(self, **body: Any) -> list[int]:
        """output_ids of /generate."""
        status, answer = await self.post("/generate", **body)
        assert status == 200, answer
        return list(answer["output_ids"])

    async def ready(self) -> Running:
        """When a prefill's ranks are registered."""
        await until(lambda: self.engine.not_ready() is None)
        return self


Start = Callable[..., Awaitable[Running]]


async def directory(stack: AsyncExitStack) -> int:
    """The port of a real bootstrap server."""
    clock = SystemClock()
    app = bootstrap_app(Directory(Generation("d1")), RoomTable(), clock)
    server = Server(app, "127.0.0.1", 0, "bootstrap")
    await server.start()
    stack.push_async_callback(server.stop)
    return server.port


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """start(role, **settings) -> Running; everything is stopped at the end of the test."""
    async with AsyncExitStack() as stack:

        async def one(role: Role = Role.BOTH, **settings: Any) -> Running:
            if role is Role.PREFILL and "bootstrap_port" not in settings:
                settings["bootstrap_port"] = await directory(stack)
            told = {"port": free_port(), "events_port": 0, "replay_port": 0, "blocks": 128}
            engine = Engine(EngineSettings(role=role, **(told | settings)), SystemClock())
            await engine.start()
            stack.push_async_callback(engine.stop)
            server = Server(engine.app, "127.0.0.1", engine.settings.port, role.value)
            await server.start()
            stack.push_async_callback(server.stop)
            url = f"http://127.0.0.1:{engine.settings.port}"
            timeout = aiohttp.ClientTimeout(total=30)
            session = aiohttp.ClientSession(url, timeout=timeout)
            stack.push_async_callback(session.close)
            return await Running(engine, session).ready()

        yield one

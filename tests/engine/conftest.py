"""Engines in this process, each on a real port, with a real bootstrap server beside a prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from kit.wait import until
from starlette.types import ASGIApp, Receive, Scope, Send

from kvplane.bootstrap import Directory, DirectorySettings, RoomTable, bootstrap_app
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


class Door:
    """An app that comes later."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class House:
    """What is up; `close` takes all of a floor down at once, since each takes its time."""

    def __init__(self) -> None:
        self._floors: tuple[list[Callable[[], Awaitable[None]]], ...] = ([], [], [])

    async def directory(self, write_key: str = "") -> int:
        """The port of a real bootstrap server."""
        settings = DirectorySettings(write_key=write_key)
        app = bootstrap_app(Directory(Generation("d1")), RoomTable(), SystemClock(), settings)
        server = Server(app, "127.0.0.1", 0, "bootstrap")
        await server.start()
        self._floors[1].append(server.stop)
        return server.port

    async def engine(self, role: Role = Role.BOTH, ready: bool = True, **settings: Any) -> Running:
        """An engine and its door, ready to serve."""
        if role is Role.PREFILL and "bootstrap_port" not in settings:
            settings["bootstrap_port"] = await self.directory(settings.get("bootstrap_key", ""))
        door = Door()  # it is open before the engine is made, which is told its port
        server = Server(door, "127.0.0.1", 0, role.value)
        await server.start()
        self._floors[1].append(server.stop)
        told = {"port": server.port, "events_port": 0, "replay_port": 0, "blocks": 128}
        engine = Engine(EngineSettings(role=role, **(told | settings)), SystemClock())
        await engine.start()
        self._floors[2].append(engine.stop)
        door.app = engine.app
        url = f"http://127.0.0.1:{engine.settings.port}"
        session = aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=30))
        self._floors[0].append(session.close)
        running = Running(engine, session)
        return await running.ready() if ready else running

    async def close(self) -> None:
        """Clients, doors and directories, engines."""
        for floor in self._floors:
            await asyncio.gather(*(stop() for stop in floor))


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """start(role, **settings) -> Running; everything is stopped at the end of the test."""
    house = House()
    try:
        yield house.engine
    finally:
        await house.close()

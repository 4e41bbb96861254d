"""Engines: the processes beside the plane: a rank directory, and a tiny engine with its own.

Edge of the roof. wiring.py runs them. Open it to change what such a process is made of.
"""

from __future__ import annotations

import secrets

from prometheus_client import CollectorRegistry

from kvplane.bootstrap import BootstrapMetrics, RoomSweeper, RoomTable, bootstrap_app
from kvplane.bootstrap import Directory as RankDirectory
from kvplane.composite import Composite
from kvplane.doors import Server
from kvplane.engine import Engine, EngineSettings
from kvplane.runtime import SystemClock
from kvplane.settings import Settings
from kvplane.vocabulary import Generation, Role


class Directory(Composite):
    """One rank directory, alone or beside a prefill engine."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self._host, self._port = host, port

    async def build(self) -> None:
        """The table, then its door."""
        clock, registry = SystemClock(), CollectorRegistry()
        rooms, metrics = RoomTable(), BootstrapMetrics(registry)
        table = RankDirectory(Generation(secrets.token_hex(8)))
        app = bootstrap_app(table, rooms, clock, metrics=metrics, registry=registry)
        await self.begin(RoomSweeper(rooms, clock))
        await self.begin(Server(app, self._host, self._port, "bootstrap"))


class EngineProcess(Composite):
    """One tiny engine; a prefill gets its own rank directory."""

    def __init__(self, told: Settings) -> None:
        super().__init__()
        self._told = told

    async def build(self) -> None:
        """Directory, engine, then the door."""
        told = self._told
        names = (
            "host port advertise_host bootstrap_port events_port replay_port event_form blocks "
            "block_size model context_length tp pp dp checksums faults"
        )
        values = {name: told[name] for name in names.split()}
        engine = Engine(EngineSettings(role=Role(told["role"]), **values), SystemClock())
        if engine.settings.role is Role.PREFILL:
            await self.begin(Directory(told["host"], told["bootstrap_port"]))
        await self.begin(engine)
        await self.begin(Server(engine.app, told["host"], told["port"], "engine"))

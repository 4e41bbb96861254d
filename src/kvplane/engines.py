"""Engines: the processes beside the plane: a rank directory, and a tiny engine with its own.

Edge of the roof. wiring.py runs them. Open it to change what such a process is made of.
"""

from __future__ import annotations

import secrets

from kvplane.bootstrap import (
    BootstrapMetrics,
    DirectorySettings,
    RoomSweeper,
    RoomTable,
    bootstrap_app,
)
from kvplane.bootstrap import Directory as RankDirectory
from kvplane.composite import Composite
from kvplane.doors import Server, new_registry
from kvplane.engine import Engine, EngineSettings
from kvplane.runtime import SystemClock
from kvplane.settings import Settings
from kvplane.tls import BadTls, Tls
from kvplane.vocabulary import Generation, Role


class Directory(Composite):
    """One rank directory, alone or beside a prefill engine."""

    def __init__(
        self,
        host: str,
        port: int,
        settings: DirectorySettings,
        tls: Tls | None = None,
        owner: Generation | None = None,  # the instance it is part of
    ) -> None:
        super().__init__()
        self._host, self._port, self._settings, self._tls = host, port, settings, tls
        self._owner = owner
        self._name = "bootstrap" if owner is None else "directory"  # who is told of a taken port

    async def build(self) -> None:
        """The table, then its door."""
        clock, registry, settings = SystemClock(), new_registry(), self._settings
        rooms = RoomTable(settings.room_ttl_s, settings.most_rooms)
        table = RankDirectory(Generation(secrets.token_hex(8)), settings.doubt_s, self._owner)
        app = bootstrap_app(
            table, rooms, clock, settings, metrics=BootstrapMetrics(registry), registry=registry
        )
        await self.begin(RoomSweeper(rooms, clock))
        await self.begin(Server(app, self._host, self._port, self._name, self._tls))
        await self.begin(app)  # ends first: questions that wait are answered, then the port closes


def directory_settings(told: Settings) -> DirectorySettings:
    """What flags and environment say of a directory's writers."""
    return DirectorySettings(write_key=told["write_key"], open_writes=told["open_writes"])


def tls(told: Settings) -> Tls | None:
    """The certificate of a door, where one is told. Raises BadTls where half of it is missing."""
    cert, key, authority = (told[name] for name in ("tls_cert", "tls_key", "client_ca"))
    if cert is None and key is None and authority is None:
        return None
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        if path is None:
            others = {"tls_cert": cert, "tls_key": key, "client_ca": authority}
            said = ", ".join(f"{other} = {found!r}" for other, found in others.items() if found)
            flag = "--" + name.replace("_", "-")
            raise BadTls(f"{name} is missing: {said} needs {flag} FILE too")
    return Tls(cert, key, authority)


class EngineProcess(Composite):
    """One tiny engine; a prefill gets its own rank directory, if it is node 0 of its nodes."""

    def __init__(self, told: Settings) -> None:
        super().__init__()
        self._told = told

    async def build(self) -> None:
        """Directory, engine, then the door."""
        told = self._told
        names = (
            "host port advertise_host bootstrap_port events_port replay_port event_form blocks "
            "block_size model context_length tp pp dp nnodes node_rank dist_init_addr backend "
            "checksums faults"
        )
        values = {name: told[name] for name in names.split()} | {
            "bootstrap_key": told["write_key"],
            "open_writes": told["open_writes"],
            "load_balance": told["load_balance_method"],
        }
        engine = Engine(
            EngineSettings(role=Role(told["role"]), **values), SystemClock(), new_registry()
        )
        if engine.settings.role is Role.PREFILL and engine.settings.nodes.leads:
            writers = directory_settings(told)
            at, owner = (told["host"], told["bootstrap_port"]), engine.generation
            await self.begin(Directory(*at, writers, owner=owner))
        await self.begin(engine)
        await self.begin(Server(engine.app, told["host"], told["port"], "engine"))

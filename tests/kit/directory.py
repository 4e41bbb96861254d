"""Directory: a rank directory on a real port, and a caller that sees what is on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from kit.clock import FakeClock
from kvplane.bootstrap import (
    BootstrapMetrics,
    Directory,
    DirectorySettings,
    RoomTable,
    bootstrap_app,
)
from kvplane.doors import Server
from kvplane.vocabulary import Generation


@dataclass
class Reply:
    """One HTTP answer as it came."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """One connection that is kept alive; nothing is added to what the test says."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.opened = 0

    async def call(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        reader, writer = await self._open()
        lines = [f"{method} {path} HTTP/1.1", "Host: directory"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body or method in ("PUT", "POST"):
            lines.append(f"Content-Length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        async with asyncio.timeout(10):
            return await self._read(reader, method)

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            self.opened += 1
        return self._streams

    async def _read(self, reader: asyncio.StreamReader, method: str) -> Reply:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in head[1:-2]:
            name, _, value = line.partition(": ")
            headers[name.lower()] = value
        length = 0 if method == "HEAD" else int(headers["content-length"])
        body = await reader.readexactly(length)
        if headers.get("connection") == "close":
            await self.close()
        return Reply(int(head[0].split()[1]), headers, body)

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            await self._streams[1].wait_closed()
            self._streams = None


@dataclass
class Seat:
    """A running directory with all its parts in the test's hands."""

    port: int
    directory: Directory
    rooms: RoomTable
    clock: FakeClock
    wire: Wire
    app: Any
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def put(self, **members: Any) -> Reply:
        return await self.wire.call("PUT", "/route", json.dumps(rank(**members)).encode())

    async def get(
        self, dp: object = -1, cp: object = -1, tp: object = -1, pp: object = -1
    ) -> Reply:
        query = f"prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
        return await self.wire.call("GET", f"/route?{query}")

    async def ranks(self) -> Any:
        return (await self.wire.call("GET", "/ranks")).json()


def rank(**changes: Any) -> dict[str, Any]:
    """What a rank of the smallest instance sends; a member given as ... is left out."""
    members = {
        "attn_tp_size": 1,
        "attn_tp_rank": 0,
        "attn_cp_size": 1,
        "attn_cp_rank": 0,
        "attn_dp_size": 1,
        "attn_dp_rank": 0,
        "pp_size": 1,
        "pp_rank": 0,
        "system_dp_size": 1,
        "system_dp_rank": 0,
        "rank_ip": "10.0.0.1",
        "rank_port": 40000,
        "page_size": 64,
        "kv_cache_dtype": "bfloat16",
    } | changes
    return {name: value for name, value in members.items() if value is not ...}


@contextlib.asynccontextmanager
async def serving(
    start: str = "server-1",
    port: int = 0,
    room_ttl_s: float = 240.0,
    metrics: bool = False,
    **limits: Any,
) -> AsyncIterator[Seat]:
    """A directory on loopback until the block ends."""
    registry = CollectorRegistry()
    clock = FakeClock()
    directory = Directory(Generation(start))
    rooms = RoomTable(ttl_s=room_ttl_s)
    counters = BootstrapMetrics(registry) if metrics else None
    told = registry if metrics else None
    app = bootstrap_app(directory, rooms, clock, DirectorySettings(**limits), counters, told)
    server = Server(app, "127.0.0.1", port, "bootstrap")
    await server.start()
    wire = Wire(server.port)
    try:
        yield Seat(server.port, directory, rooms, clock, wire, app, registry)
    finally:
        await wire.close()
        await server.stop()

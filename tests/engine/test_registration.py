"""Registration: ranks enter their directory, and enter it again when it has forgotten them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
from kit.ports import free_port
from kit.wait import until
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvplane.bootstrap import (
    BootstrapClient,
    Directory,
    NotRegistered,
    RoomTable,
    bootstrap_app,
)
from kvplane.doors import Server
from kvplane.engine.cells import Cell
from kvplane.engine.metrics import EngineMetrics
from kvplane.engine.registration import Registrar
from kvplane.engine.settings import EngineSettings
from kvplane.runtime import SystemClock, cancel
from kvplane.vocabulary import Generation, Role


@pytest.fixture
async def client() -> AsyncIterator[BootstrapClient]:
    async with aiohttp.ClientSession() as session:
        yield BootstrapClient(session)


def server(port: int, life: str) -> Server:
    app = bootstrap_app(Directory(Generation(life)), RoomTable(), SystemClock())
    return Server(app, "127.0.0.1", port, "bootstrap")


def registrar(client: BootstrapClient, port: int, ports: Mapping[int, int]) -> Registrar:
    settings = EngineSettings(
        role=Role.PREFILL, bootstrap_port=port, dp=len(ports), register_every_s=0.05
    )
    metrics = EngineMetrics(CollectorRegistry())
    cells = {Cell(dp, 0, 0): port for dp, port in ports.items()}
    return Registrar(client, cells, Generation("g1"), settings, SystemClock(), metrics)


async def test_all_dp_ranks_enter_with_port_and_generation(client: BootstrapClient) -> None:
    port = free_port()
    directory = server(port, "d1")
    await directory.start()
    ranks = registrar(client, port, {0: 4000, 1: 4001})
    assert ranks.unit(1).detail == f"dp rank 1 is not registered at 127.0.0.1:{port} yet"
    assert await ranks._all()
    for dp, wanted in ((0, 4000), (1, 4001)):
        found = await client.rank(f"127.0.0.1:{port}", dp, 0, 0, 0)
        assert (found.host, found.port, found.generation) == ("127.0.0.1", wanted, "g1")
    topology, _ = await client.topology(f"127.0.0.1:{port}")
    assert (topology.shape.dp, topology.shape.page_size) == (2, 16)
    await directory.stop()


async def test_a_directory_that_comes_later_or_comes_back_is_told(client: BootstrapClient) -> None:
    port = free_port()
    ranks = registrar(client, port, {0: 4000})
    keeping = asyncio.create_task(ranks.keep())
    assert not ranks.ready.is_set()
    first = server(port, "d1")
    await first.start()
    await until(ranks.ready.is_set)
    assert ranks.unit(0).ok
    await first.stop()
    await until(lambda: not ranks.ready.is_set())
    assert "no longer registered" in ranks.unit(0).detail
    second = server(port, "d2")
    await second.start()
    await until(ranks.ready.is_set)
    assert (await client.rank(f"127.0.0.1:{port}", 0, 0, 0, 0)).port == 4000
    await cancel(keeping)
    await second.stop()


def without(app: ASGIApp, tp: int) -> ASGIApp:
    """A directory that one tensor rank never reaches."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "PUT":
            await app(scope, receive, send)
            return
        asked = Request(scope, receive)
        told = json.loads(await asked.body())
        if told["attn_tp_rank"] == tp:
            await PlainTextResponse("lost on the way", 502)(scope, receive, send)
            return

        async def again() -> Message:
            return {"type": "http.request", "body": json.dumps(told).encode(), "more_body": False}

        await app(scope, again, send)

    return serve


async def test_one_rank_that_never_registers_is_named_and_the_others_are_in(
    client: BootstrapClient,
) -> None:
    app = bootstrap_app(Directory(Generation("d1")), RoomTable(), SystemClock())
    directory = Server(without(app, tp=3), "127.0.0.1", 0, "bootstrap")
    await directory.start()
    settings = EngineSettings(role=Role.PREFILL, bootstrap_port=directory.port, tp=4)
    cells = {cell: 4000 + cell.tp for cell in settings.sizes.cells(0)}
    metrics = EngineMetrics(CollectorRegistry())
    ranks = Registrar(client, cells, Generation("g1"), settings, SystemClock(), metrics, try_s=0.3)
    for _ in range(2):
        assert not await ranks._all()
        assert not ranks.ready.is_set()
    known, address = ranks.unit(0), settings.bootstrap_address
    assert not known.ok
    assert known.detail.startswith(
        f"3 of 4, missing tp=3: rank tp=3 is not registered at {address} yet: "
    ), known.detail
    assert [ranks.rank(cell).ok for cell in cells] == [True, True, True, False]
    with pytest.raises(NotRegistered, match=r"\(3 workers registered\). Missing tp=3"):
        await client.topology(address)
    await directory.stop()

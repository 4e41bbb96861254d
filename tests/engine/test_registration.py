"""Registration: ranks enter their directory, and enter it again when it has forgotten them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest
from kit.ports import free_port
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.bootstrap import BootstrapClient, Directory, RoomTable, bootstrap_app
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

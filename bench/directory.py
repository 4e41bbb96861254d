"""Directory: how fast `kvplane bootstrap` answers what decodes ask, and what it costs.

A server process of its own and one client process; all loads take turns in every round. The
processor time is the figure to compare: on a busy machine requests/s is what the others left.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from itertools import cycle, islice

import uvloop

from bench.http_load import Load, cpu_s, request
from bench.timing import ROUNDS, Row
from kvplane.children import Child

TP = 8  # ranks of the prefill instance
ROOMS = 1000  # known to the directory
ASKED = 64  # rooms in one question
BURST_S = 0.8


def rows(seconds: float = BURST_S, rounds: int = ROUNDS) -> Iterator[Row]:
    """Requests per second and CPU microseconds per request, load by load."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield from runner.run(_measure(seconds, rounds))


async def _measure(seconds: float, rounds: int) -> list[Row]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = ["bootstrap", "--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
    server = Child("bootstrap", words, f"http://127.0.0.1:{port}/health")
    await server.start()
    loads: dict[str, Load] = {}
    try:
        assert server.pid is not None
        await _fill(port)
        loads = _loads(port)
        for load in loads.values():
            await load.open()
        for load in loads.values():
            await load.burst(seconds / 2)  # warm-up
        values = [await _round(loads, seconds, server.pid) for _ in range(rounds)]
    finally:
        for load in loads.values():
            load.close()
        await server.stop()
    return [
        Row(f"directory, {name}", unit, tuple(one[name][at] for one in values))
        for name in loads
        for at, unit in enumerate(("requests/s", "CPU us"))
    ]


async def _round(loads: dict[str, Load], seconds: float, pid: int) -> dict[str, list[float]]:
    found = {}
    for name, load in loads.items():
        before = cpu_s(pid)
        count, took = await load.burst(seconds)
        found[name] = [count / took, (cpu_s(pid) - before) / count * 1e6]
    return found


def _loads(port: int) -> dict[str, Load]:
    where = "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank={}&target_pp_rank=0"
    ranks = [request("GET", where.format(rank)) for rank in range(TP)]
    whole = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"
    rooms = json.dumps({"bootstrap_rooms": list(range(1, ASKED + 1))}).encode()
    return {
        "rank GET, 8 connections": Load(port, ranks),
        "rank GET, 64 connections": Load(port, list(islice(cycle(ranks), 64))),
        "topology GET, 8 connections": Load(port, [request("GET", whole)] * 8),
        f"query of {ASKED} rooms, 8 connections": Load(
            port, [request("POST", "/query_dp_ranks", rooms)] * 8
        ),
    }


async def _fill(port: int) -> None:
    """One instance of TP ranks, all registered, and the rooms."""
    told = [request("PUT", "/route", json.dumps(_rank(rank)).encode()) for rank in range(TP)]
    for room in range(1, ROOMS + 1):
        body = json.dumps({"bootstrap_room": room, "dp_rank": room % 4}).encode()
        told.append(request("POST", "/register_dp_rank", body))
    for one in told:
        load = Load(port, [one])
        await load.open()  # answered with 200, or WrongAnswer
        load.close()


def _rank(rank: int) -> dict[str, object]:
    return {
        "attn_tp_size": TP, "attn_tp_rank": rank, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "system_dp_size": 1, "system_dp_rank": 0,
        "pp_size": 1, "pp_rank": 0, "rank_ip": "10.0.0.9", "rank_port": 40_000 + rank,
        "page_size": 16, "kv_cache_dtype": "auto", "load_balance_method": "round_robin",
        "prefill_http_port": 30_000, "decode_allocation_policy": "early",
    }  # fmt: skip

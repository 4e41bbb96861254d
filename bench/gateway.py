"""Gateway: what a request costs on its way through, beside sglang-router in the same run.

Set SGL_ROUTER to its executable for the peer's figures and ratios; without it ours stand alone.
One prefill and one decode that compute nothing, round robin, breaker, metrics and evidence on.
CPU is that of a gateway's whole process tree. Rounds are interleaved, who comes first alternates.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from bench.gateway_load import ask, chat
from bench.http_load import WrongAnswer
from bench.timing import Absent, Row

ROUNDS, TOGETHER, STREAMS = 3, 8, 16
SIZES = {"1 kB": (1_000, 2_000), "32 kB": (32_000, 250), "256 kB": (256_000, 80)}  # bytes, requests
CHUNKS, STREAMED = 64, 96  # parts of a long stream; streams of a round
ALONE = 300  # requests one at a time
BOOT_S = 60.0

Figures = dict[str, dict[str, list[float]]]  # what -> who -> one per round


@dataclass(frozen=True)
class Gateway:
    """A process and its port."""

    name: str
    port: int
    pid: int


def rows(
    rounds: int = ROUNDS,
    sizes: dict[str, tuple[int, int]] = SIZES,
    streamed: int = STREAMED,
    alone: int = ALONE,
) -> Iterator[Row | Absent]:
    """CPU of a request by size and of a part of a stream; what is added to p50."""
    peer = os.environ.get("SGL_ROUTER", "")
    with ExitStack() as stack:
        prefill, decode = (_engine(stack) for _ in range(2))
        running = [_ours(stack, "ours", prefill, decode, "round_robin")]
        running.append(_ours(stack, "prefix", prefill, decode, "prefix", "--tokenizer", "builtin"))
        if peer:
            running.append(_sglang(stack, peer, prefill, decode))
        figures = uvloop.run(_measured(running, decode, rounds, sizes, streamed, alone))
    for what, found in figures.items():
        unit = "ms" if "p50" in what else "us" if "part" in what else "ms CPU"
        yield Row(f"gateway, {what}", unit, tuple(found["ours"]), tuple(found.get("peer", ())))
        if "prefix" in found:
            extra = [b - a for a, b in zip(found["ours"], found["prefix"], strict=True)]
            yield Row(f"  {what}, more with the prefix policy", unit, tuple(extra))
    if not peer:
        yield Absent("gateway, sglang-router's figures", "SGL_ROUTER names no executable")


async def _measured(
    running: Sequence[Gateway],
    engine: int,
    rounds: int,
    sizes: dict[str, tuple[int, int]],
    streamed: int,
    alone: int,
) -> Figures:
    figures: Figures = {}
    for gateway in running:
        await _ready(gateway)
        await ask(gateway.port, chat(1_000), 200, TOGETHER)
    for number in range(rounds):
        order = running[:: 1 if number % 2 == 0 else -1]
        for name, (size, count) in sizes.items():
            for one in order:
                cost = await _cpu_ms(one, chat(size), count, TOGETHER)
                _note(figures, f"CPU of a request, {name}", one, cost)
        for one in order if streamed else ():
            if one.name == "prefix":
                continue
            short, long = [
                await _cpu_ms(one, chat(1_000, parts), streamed, STREAMS) for parts in (1, CHUNKS)
            ]
            _note(figures, "CPU of a part of a stream", one, (long - short) / (CHUNKS - 1) * 1e3)
        for one in order if alone else ():
            if one.name == "prefix":
                continue
            direct = statistics.median(await ask(engine, chat(1_000), alone, 1))
            through = statistics.median(await ask(one.port, chat(1_000), alone, 1))
            _note(figures, "added to p50, one at a time", one, (through - direct) * 1e3)
    return figures


def _note(figures: Figures, what: str, gateway: Gateway, value: float) -> None:
    figures.setdefault(what, {}).setdefault(gateway.name, []).append(value)


async def _cpu_ms(gateway: Gateway, request: bytes, count: int, together: int) -> float:
    before = _cpu_ns(gateway.pid)
    await ask(gateway.port, request, count, together)
    return (_cpu_ns(gateway.pid) - before) / count / 1e6


def _cpu_ns(pid: int) -> int:
    """Of a process and its children, to the nanosecond where the kernel tells."""
    found = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        for told in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            found += int(told.read_text().split()[0])
    return found


async def _ready(gateway: Gateway) -> None:
    """Until it answers: gateways look at their engines first."""
    end = time.monotonic() + BOOT_S
    while True:
        try:
            await ask(gateway.port, chat(200), 1, 1)
            return
        except (OSError, WrongAnswer):
            if time.monotonic() > end or psutil.Process(gateway.pid).status() == "zombie":
                raise
            await asyncio.sleep(0.2)


def _ours(stack: ExitStack, name: str, prefill: int, decode: int, *policy: str) -> Gateway:
    port, engines = _free_port(), [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    chosen, *more = policy
    command = [
        sys.executable, "-m", "kvplane", "router", "--host", "127.0.0.1", "--port", str(port),
        "--prefill", engines[0], "9101", "--decode", engines[1], "--policy", chosen,
        "--decode-policy", "round_robin", "--no-watch-directories", *more,
    ]  # fmt: skip
    return Gateway(name, port, _started(stack, command))


def _sglang(stack: ExitStack, executable: str, prefill: int, decode: int) -> Gateway:
    port, engines = _free_port(), [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
    command = [
        executable, "launch", "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port()),
        "--worker-startup-check-interval", "1", "--pd-disaggregation", "--prefill", engines[0],
        "9101", "--decode", engines[1], "--policy", "round_robin", "--log-level", "warn",
    ]  # fmt: skip
    return Gateway("peer", port, _started(stack, command))


def _engine(stack: ExitStack) -> int:
    port = _free_port()
    _started(stack, [sys.executable, "-m", "bench.gateway_engine", str(port)])
    return port


def _started(stack: ExitStack, command: list[str]) -> int:
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=quiet, stderr=quiet)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process.pid


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Trouble for a running plane: fault switches, stops, wakes, kills, restarts, resets, garbage."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import time
from collections import Counter

import psutil

from kit.plane import Plane
from kvplane.children import Child
from kvplane.transfer.frames import PROTOCOL, AbortFrame, HoldFrame, encode_frame

FAULTS = {
    "prefill": [
        *(("register", kind) for kind in ("delay", "error", "reset", "hang")),
        *(("connect", kind) for kind in ("delay", "error", "reset")),
        *(("verify", kind) for kind in ("delay", "error", "reset", "flip-byte", "swap-pages")),
        *(("verify", kind) for kind in ("foreign-room", "short", "stale-generation", "hang")),
    ],
    "decode": [
        *(("resolve-topology", kind) for kind in ("delay", "error", "reset")),
        *(("resolve-rank", kind) for kind in ("delay", "error", "reset")),
        *(("consume", kind) for kind in ("delay", "error", "reset", "hang")),
    ],
}
BEGINNINGS = [
    b"", b"KVT1", b"\x00\x00\x00\x10", b"\xff\xff\xff\xff", b"\xff" + bytes(8) + b"\x7f",
    b"GET /route?", b"PUT /route HTTP/1.1\r\n",
    b"POST /generate HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999\r\n\r\n",
    encode_frame(HoldFrame(protocol=PROTOCOL, room=1)), encode_frame(AbortFrame(reason="?")),
]  # fmt: skip


async def chaos(running: Plane, name: str, chance: random.Random, count: Counter[str]) -> None:
    """One thing goes wrong with one engine; ends when it is over, but for armed switches."""
    dice, child = chance.random(), running.children[name]
    if dice < 0.55:
        stage, kind = chance.choice(FAULTS[running.engines[name].role])
        times = 1 if kind == "hang" else chance.randrange(1, 4)
        count[kind] += 1
        await running.fault(name, stage=stage, kind=kind, count=times, seconds=0.5)
    elif dice < 0.75:
        count["garbage"] += 1
        await garbage(child, chance)
    elif dice < 0.88:
        count["stopped and woken"] += 1
        await stopped(child, chance.uniform(0.05, 4.0))
    elif dice < 0.94:
        count["killed"] += 1
        child.kill()
        await restarted(running, name, chance.uniform(0, 2.0))
    else:
        count["restarted"] += 1
        await restarted(running, name, 0.0)


async def restarted(running: Plane, name: str, away_s: float) -> None:
    """Told to stop if it lives, and started anew at the same address."""
    await running.children[name].stop()
    await asyncio.sleep(away_s)
    running.children[name] = running.engines[name].child()
    await running.children[name].start()


async def stopped(child: Child, seconds: float) -> None:
    """SIGSTOP for so long."""
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(child.pid, signal.SIGCONT)


async def garbage(child: Child, chance: random.Random) -> None:
    """Bytes nobody can mean on any port it listens on; then silence, an end or a reset."""
    assert child.pid is not None
    listening = [
        each.laddr.port
        for each in psutil.Process(child.pid).net_connections(kind="tcp")
        if each.status == psutil.CONN_LISTEN
    ]
    if not listening:
        return
    data = chance.choice(BEGINNINGS) + chance.randbytes(chance.choice([0, 1, 60, 5000]))
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(5):
            port = chance.choice(listening)
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            if chance.random() < 0.5:
                await asyncio.sleep(chance.uniform(0, 2.0))
            if chance.random() < 0.5:  # a reset instead of an end
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.close()


async def trouble(
    running: Plane, name: str, chance: random.Random, count: Counter[str], end: float
) -> None:
    """One engine after the other thing, until `end`."""
    while time.monotonic() < end:
        await asyncio.sleep(chance.uniform(0.1, 1.3))
        await chaos(running, name, chance, count)

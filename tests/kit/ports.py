"""Free TCP ports on loopback."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import deque

# Below where kernels take ports for who connects: else a connection of another test may have a
# port between the moment it was found free and the moment it is listened on. And below 30000,
# above 9101: the ports that commands take where none is named, as the demo of a test does.
# Each worker of pytest-xdist has a part of them: found free by two, a port is listened on by one.
FIRST, COUNT = 12_000, 16_000
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_ME = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_PART = COUNT // _WORKERS
_BEGIN = FIRST + _PART * _ME
RANGE = (_BEGIN, _BEGIN + _PART)
_given: deque[int] = deque(maxlen=1000)  # lately; who got them may not listen yet
CHANCE = random.SystemRandom()  # no test's seed makes two of them find the same port


def free_port(host: str = "127.0.0.1", run: int = 1) -> int:
    """A port nobody listens on right now; the first of `run` such ports in a row."""
    while True:
        first = CHANCE.randrange(RANGE[0], RANGE[1] - run)
        wanted = range(first, first + run)
        if all(port not in _given and _is_free(host, port) for port in wanted):
            _given.extend(wanted)
            return first


def free_ports(count: int, run: int = 1) -> list[int]:
    """`count` different free ports, each the first of `run`."""
    return [free_port(run=run) for _ in range(count)]


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, contextlib.suppress(OSError):
        probe.bind((host, port))
        return True
    return False


def has_ipv6() -> bool:
    """Whether [::1] can be listened on here."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True

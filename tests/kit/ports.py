"""Free TCP ports on loopback."""

from __future__ import annotations

import contextlib
import random
import socket

# Below where kernels take ports for who connects: else a connection of another test may have a
# port between the moment it was found free and the moment it is listened on.
RANGE = (16_000, 32_000)
CHANCE = random.SystemRandom()  # no test's seed makes two of them find the same port


def free_port(host: str = "127.0.0.1", run: int = 1) -> int:
    """A port nobody listens on right now; the first of `run` such ports in a row."""
    while True:
        first = CHANCE.randrange(RANGE[0], RANGE[1] - run)
        if all(_is_free(host, port) for port in range(first, first + run)):
            return first


def free_ports(count: int, run: int = 1) -> list[int]:
    """`count` different free ports, each the first of `run`."""
    found: list[int] = []
    while len(found) < count:
        port = free_port(run=run)
        if all(abs(port - other) >= run for other in found):
            found.append(port)
    return found


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

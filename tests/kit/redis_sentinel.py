"""A master, its replica and three sentinels on loopback; failover when a test says so."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from kit.durable import Durable
from kit.ports import free_ports
from kit.redis import _die_with_parent, _wait_for_ping, binary

NAME = "mymaster"
BOOT_S = 30.0


@dataclass
class Sentinels:
    """Two servers, of which one is master, and the ports of who watches them."""

    servers: list[Durable]
    ports: list[int]
    failovers: int = field(default=0)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"redis+sentinel://{hosts}/{NAME}/0"

    def master(self) -> Durable:
        """The server that the sentinels name."""
        _, port = _say(self.ports[0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return next(one for one in self.servers if one.port == int(port))

    def fail_over(self) -> None:
        """The replica is master when this returns, and the old one its replica."""
        before = self.master().port
        self.failovers += 1

        def begun() -> bool:
            with contextlib.suppress(redis.ResponseError):  # INPROG, NOGOODSLAVE: not yet
                _say(self.ports[0], "SENTINEL", "FAILOVER", NAME)
                return True
            return False

        _until(begun, "the sentinels begin no failover")
        _until(lambda: self.master().port != before, "no failover")
        # What the sentinels do 10 s later, when they have seen it serve as a master:
        _say(before, "REPLICAOF", "127.0.0.1", self.master().port)
        _until(lambda: self._swapped(before), "the roles are not swapped")

    def _swapped(self, before: int) -> bool:
        roles = [_say(one.port, "ROLE")[0] for one in self.servers]
        named = [_say(p, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)[1] for p in self.ports]
        return sorted(roles) == [b"master", b"slave"] and all(int(n) != before for n in named)


@contextlib.contextmanager
def sentinels() -> Iterator[Sentinels]:
    """Ready: the replica has all, and every sentinel knows it and the other two."""
    with tempfile.TemporaryDirectory(prefix="kvplane-sentinel-") as folder:
        ports = free_ports(5)
        with contextlib.ExitStack() as stack:
            servers = []
            for number, port in enumerate(ports[:2]):
                home = Path(folder, str(number))
                home.mkdir()
                of = ("--replicaof", "127.0.0.1", str(ports[0])) if number else ()
                servers.append(Durable(str(home), port, ("--repl-diskless-sync-delay", "0", *of)))
                servers[-1].start()
                stack.callback(servers[-1].kill)
            for port in ports[2:]:
                process = _sentinel(Path(folder), port, ports[0])
                stack.callback(process.wait)
                stack.callback(process.kill)
            made = Sentinels(servers, ports[2:])
            _until(lambda: _ready(made), "the sentinels do not find each other")
            yield made


def _sentinel(folder: Path, port: int, master: int) -> subprocess.Popen[bytes]:
    config = folder / f"{port}.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor {NAME} 127.0.0.1 {master} 2\n"
        f"sentinel down-after-milliseconds {NAME} 1000\n"
        f"sentinel failover-timeout {NAME} 4000\n"
    )
    process = subprocess.Popen(
        [binary(), str(config), "--sentinel"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=_die_with_parent,
    )
    _wait_for_ping(process, port)
    return process


def _ready(made: Sentinels) -> bool:
    role = _say(made.servers[1].port, "ROLE")
    if role[0] != b"slave" or role[3] != b"connected":
        return False
    for port in made.ports:
        flat = _say(port, "SENTINEL", "MASTER", NAME)
        told = dict(zip(flat[::2], flat[1::2], strict=True))
        if (told[b"num-slaves"], told[b"num-other-sentinels"]) != (b"1", b"2"):
            return False
    return True


def _until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + BOOT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def _say(port: int, *command: Any) -> Any:
    with redis.Redis(port=port, protocol=2, socket_timeout=10) as client:
        client.response_callbacks.clear()
        return client.execute_command(*command)

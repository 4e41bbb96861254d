"""A Redis Cluster of three masters on loopback, made without redis-cli in a second or two."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from kit.durable import Durable
from kit.ports import free_ports

SLOTS = 16_384
BOOT_S = 20.0


@dataclass
class Cluster:
    """Its nodes; each is stopped, killed or frozen by the test that owns it."""

    nodes: list[Durable]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def keeper(self, slot: int) -> int:
        """Which node had this slot at the start."""
        return min(slot * len(self.nodes) // SLOTS, len(self.nodes) - 1)

    def say(self, node: int, *command: Any) -> Any:
        """One command to one node."""
        return _say(self.nodes[node], *command)

    def move(self, slot: int, here: int, there: int) -> Iterator[None]:
        """Move a slot from node to node, the way redis-cli does; a step for each key.

        Between two steps some of its keys are here, some there.
        """
        names = [self.say(node, "CLUSTER", "MYID") for node in range(len(self.nodes))]
        self.say(there, "CLUSTER", "SETSLOT", slot, "IMPORTING", names[here])
        self.say(here, "CLUSTER", "SETSLOT", slot, "MIGRATING", names[there])
        yield
        port = self.nodes[there].port
        while keys := self.say(here, "CLUSTER", "GETKEYSINSLOT", slot, 1):
            self.say(here, "MIGRATE", "127.0.0.1", port, keys[0], 0, 5000, "REPLACE")
            yield
        for node in (there, here):
            self.say(node, "CLUSTER", "SETSLOT", slot, "NODE", names[there])


@contextlib.contextmanager
def cluster(count: int = 3, arguments: tuple[str, ...] = ()) -> Iterator[Cluster]:
    """Masters that share out all slots and know each other."""
    with tempfile.TemporaryDirectory(prefix="kvplane-cluster-") as folder:
        ports = free_ports(2 * count)
        nodes = []
        for number in range(count):
            home = Path(folder, str(number))
            home.mkdir()
            how = ["--cluster-enabled", "yes", "--cluster-port", str(ports[count + number])]
            how += ["--cluster-node-timeout", "2000", "--cluster-require-full-coverage", "no"]
            nodes.append(Durable(str(home), ports[number], (*how, *arguments)))
        made = Cluster(nodes)
        try:
            for node in nodes:
                node.start()
            _join(made, ports[count:])
            yield made
        finally:
            for node in nodes:
                node.kill()


def _join(made: Cluster, bus: list[int]) -> None:
    count = len(made.nodes)
    borders = [SLOTS * number // count for number in range(count + 1)]
    for number in range(count):
        made.say(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        made.say(number, "CLUSTER", "ADDSLOTSRANGE", borders[number], borders[number + 1] - 1)
    for number in range(1, count):
        made.say(0, "CLUSTER", "MEET", "127.0.0.1", made.nodes[number].port, bus[number])
    deadline = time.monotonic() + BOOT_S
    while not all(_knows_all(made, number) for number in range(count)):
        assert time.monotonic() < deadline, "the nodes of the cluster do not find each other"
        time.sleep(0.02)


def _knows_all(made: Cluster, number: int) -> bool:
    return len(made.say(number, "CLUSTER", "SLOTS")) == len(made.nodes) and (
        "cluster_state:ok" in _text(made.say(number, "CLUSTER", "INFO"))
    )


def _text(answer: Any) -> str:
    return answer.decode() if isinstance(answer, bytes) else str(answer)


def _say(node: Durable, *command: Any) -> Any:
    with redis.Redis(port=node.port, protocol=2, socket_timeout=10) as client:
        client.response_callbacks.clear()
        return client.execute_command(*command)

"""Servers: which node keeps a key now, and what if it no longer does?

Edge: one server, the master that sentinels name, or the masters of a cluster; each node has one
Pool for as long as it is one. line.py calls and says when it doubts a node. Open it to change how a
failover is noticed.

    One        the same address for ever; after a doubt its connections are made anew, since behind
               a name or a forwarder another server may answer now
    Sentinel   asked before the first call, after a doubt, and every LOOK_S
    Cluster    asks any node for the map of slots: before the first call, after a doubt, and when a
               node says that a slot has moved
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Protocol

from redis.exceptions import ConnectionError as Cut
from redis.exceptions import RedisError, ResponseError

from .address import Address
from .pool import Pool, maker

LOOK_S = 1.0  # between two looks at who is master; how long a master cut off may be written to
ASK_S = 1.0  # for one sentinel's, or one node's, answer to that
AGAIN_S = 0.1  # a doubted map is not asked for more often


class Servers(Protocol):
    """What line.py needs."""

    shown: str  # without anything secret
    apart: bool  # whether slots may lie on different nodes

    async def pool(self, slot: int) -> Pool: ...  # of who keeps this slot
    async def all(self) -> list[Pool]: ...  # of everyone that keeps some
    def at(self, host: str, port: int) -> Pool: ...  # of a node another one named
    def moved(self, slot: int, host: str, port: int) -> None: ...
    def doubt(self, pool: Pool) -> None: ...
    async def aclose(self) -> None: ...


def servers(address: Address, most: int, connect_s: float) -> Servers:
    """The kind that an address means; each node gets at most `most` connections."""
    if address.kind == "sentinel":
        return Sentinel(address, most, connect_s)
    if address.kind == "cluster":
        return Cluster(address, most, connect_s)
    return One(address, most, connect_s)


class _Nodes:
    """A Pool per node."""

    apart = False

    def __init__(self, address: Address, most: int, connect_s: float) -> None:
        self.shown = str(address)
        self._address, self._most, self._connect_s = address, most, connect_s
        self._pools: dict[tuple[str, int], Pool] = {}
        self._closed = False

    def at(self, host: str, port: int) -> Pool:
        """The Pool of one node; always the same."""
        if self._closed:
            raise Cut("this store was closed")
        if (host, port) not in self._pools:
            make = maker(self._address, host, port, self._connect_s)
            name = self._address.path or f"{host}:{port}"
            self._pools[host, port] = Pool(make, self._most, name)
        return self._pools[host, port]

    def moved(self, slot: int, host: str, port: int) -> None:
        """Only a cluster's node says so."""
        raise Cut(f"it is a node of a cluster: say redis+cluster://{self.shown}")

    def doubt(self, pool: Pool) -> None:
        """Connections to it are made anew."""
        pool.drop()

    def keep(self, living: set[tuple[str, int]]) -> None:
        """Nodes that are none any more lose their connections."""
        for gone in self._pools.keys() - living:
            self._pools.pop(gone).close()

    async def aclose(self) -> None:
        """Close what is idle; what is in use closes when it comes back."""
        self._closed = True
        self.keep(set())
        await asyncio.sleep(0)  # a loop that ends now lets them go first


class One(_Nodes):
    """One server, or whatever stands behind one address."""

    async def pool(self, slot: int) -> Pool:
        """The same for every slot."""
        return self.at(*(self._address.nodes or (("", 0),))[0])

    async def all(self) -> list[Pool]:
        """The one."""
        return [await self.pool(0)]


class Sentinel(_Nodes):
    """The master that a majority of sentinels made; one connection to each sentinel is enough."""

    def __init__(self, address: Address, most: int, connect_s: float) -> None:
        super().__init__(address, most, connect_s)
        self._sentinels = [
            Pool(maker(address, host, port, ASK_S, sentinel=True), 1, f"{host}:{port}")
            for host, port in address.nodes
        ]
        self._master: Pool | None = None
        self._doubted, self._looked = True, 0.0  # monotonic
        self._asking = asyncio.Lock()

    async def pool(self, slot: int) -> Pool:
        """The master; who comes while it is asked for takes the one before, if undoubted."""
        due = self._doubted or time.monotonic() - self._looked > LOOK_S
        if due and (self._doubted or not self._asking.locked()):
            async with self._asking:
                if self._doubted or time.monotonic() - self._looked > LOOK_S:
                    await self._look()
        assert self._master is not None, "a look finds a master or raises"
        return self._master

    async def all(self) -> list[Pool]:
        """The master."""
        return [await self.pool(0)]

    def doubt(self, pool: Pool) -> None:
        """Ask before the next call."""
        pool.drop()
        self._doubted = True

    async def aclose(self) -> None:
        """Close what is idle."""
        for one in self._sentinels:
            one.close()
        await super().aclose()

    async def _look(self) -> None:
        why: list[str] = []
        for number, one in enumerate(self._sentinels):
            try:
                found = await _ask(one, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._address.master)
            except (RedisError, OSError) as error:
                why.append(f"{one.name}: {error or type(error).__name__}")
                continue
            if found is None:
                why.append(f"{one.name} knows no master {self._address.master}")
                continue
            self._sentinels.insert(0, self._sentinels.pop(number))  # who answers is asked first
            node = found[0].decode(), int(found[1])
            self._master = self.at(*node)
            self.keep({node})
            self._doubted, self._looked = False, time.monotonic()
            return
        if self._doubted or self._master is None:
            raise Cut("no sentinel names the master: " + "; ".join(why))
        self._looked = time.monotonic()  # no reason to doubt it: go on


class Cluster(_Nodes):
    """The masters of a cluster, by their slots."""

    apart = True

    def __init__(self, address: Address, most: int, connect_s: float) -> None:
        super().__init__(address, most, connect_s)
        self._map: list[tuple[int, int, tuple[str, int]]] = []  # first slot, last, node
        self._exceptions: dict[int, tuple[str, int]] = {}  # said since the map was asked for
        self._doubted, self._looked = True, 0.0
        self._asking = asyncio.Lock()

    async def pool(self, slot: int) -> Pool:
        """Of the master that keeps the slot."""
        await self._fresh()
        node = self._exceptions.get(slot)
        for first, last, keeper in () if node else self._map:
            if first <= slot <= last:
                node = keeper
                break
        if node is None:
            self._doubted = True
            raise Cut(f"the cluster has nobody for slot {slot}")
        return self.at(*node)

    async def all(self) -> list[Pool]:
        """Every master."""
        await self._fresh()
        return [self.at(*node) for node in sorted({node for _, _, node in self._map})]

    def moved(self, slot: int, host: str, port: int) -> None:
        """Believed at once; the map is asked for again."""
        self._exceptions[slot] = (host or self._address.nodes[0][0], port)
        self._doubted = True

    def doubt(self, pool: Pool) -> None:
        """Its connections are made anew, the map is asked for again."""
        pool.drop()
        self._doubted = True

    async def _fresh(self) -> None:
        def due() -> bool:
            again = time.monotonic() - self._looked > AGAIN_S
            return not self._map or (self._doubted and again)

        if due() and not (self._map and self._asking.locked()):
            async with self._asking:
                if due():
                    await self._look()

    async def _look(self) -> None:
        why: list[str] = []
        known = [*self._pools, *(n for n in self._address.nodes if n not in self._pools)]
        for node in known:
            try:
                answer = await _ask(self.at(*node), "CLUSTER", "SLOTS")
            except (RedisError, OSError) as error:
                why.append(f"{node[0]}:{node[1]}: {error or type(error).__name__}")
                continue
            if answer:
                self._take(node, answer)
                return
            why.append(f"{node[0]}:{node[1]} knows no slots")
        self._looked = time.monotonic()
        if not self._map:
            raise Cut("no node of the cluster tells its slots: " + "; ".join(why))

    def _take(self, asked: tuple[str, int], answer: Sequence[Any]) -> None:
        """The map; the node that answered stays first, so that a dead one is not asked first."""
        self._map = []
        for first, last, master, *_ in answer:
            host = (master[0] or b"").decode() or asked[0]
            self._map.append((int(first), int(last), (host, int(master[1]))))
        self._exceptions.clear()
        self._doubted, self._looked = False, time.monotonic()
        pool = self._pools.pop(asked, None)
        self._pools = {**({asked: pool} if pool else {}), **self._pools}
        self.keep({asked, *(node for _, _, node in self._map)})


async def _ask(pool: Pool, *command: Any) -> Any:
    """One answer within ASK_S."""
    try:
        async with asyncio.timeout(ASK_S):
            answer = (await pool.call([command]))[0]
    except TimeoutError:
        pool.drop()
        raise Cut(f"no answer in {ASK_S:g} s") from None
    if isinstance(answer, ResponseError):
        raise answer
    return answer

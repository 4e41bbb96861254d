"""Hall: where nodes of one instance meet, with doors for those who do not belong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from kit.wait import until
from kvplane.bootstrap import (
    Address,
    Announced,
    BootstrapMetrics,
    Leader,
    Member,
    Node,
    NodeState,
    RendezvousSettings,
)
from kvplane.bootstrap.joining import (
    PROTOCOL,
    Beat,
    Challenge,
    Frames,
    Hello,
    Message,
    frame,
)
from kvplane.vocabulary import Generation

QUICK = RendezvousSettings(
    beat_s=0.05, silent_s=20.0, hello_s=5.0, first_wait_s=0.02, most_wait_s=0.1, most_bytes=2**20
)
TOLD = Announced(Generation("leader-1"), "10.0.0.1", 8998, {"tp": "4"})


async def echo(body: bytes) -> bytes:
    return b"echo " + body


@dataclass
class Hall:
    """Node 0 and whoever the test lets dial."""

    leader: Leader
    registry: CollectorRegistry
    settings: RendezvousSettings
    stack: AsyncExitStack
    secret: str = ""
    changes: list[tuple[int, str, str]] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.leader.port)

    def node(self, number: int = 1, life: str = "a", handler: Any = echo, **changes: Any) -> Node:
        member = {"nnodes": self.leader._roster.nnodes, "facts": {"tp": "4"}} | changes
        secret = member.pop("secret", self.secret)
        me = Member(number, generation=Generation(life), **member)
        node = Node(self.address, me, handler, settings=self.settings, secret=secret)
        self.stack.push_async_callback(node.stop)
        return node

    async def joined(self, number: int = 1, life: str = "a", handler: Any = echo) -> Node:
        node = self.node(number, life, handler)
        await node.join(20.0)
        await self.sees(number, "joined", life)
        return node

    async def sees(self, number: int, state: str, life: str | None = None) -> NodeState:
        def now() -> NodeState | None:
            found = self.leader.states()[number]
            same = found.state == state and life in (None, found.generation)
            return found if same else None

        found = await until(now)
        assert found is not None
        return found

    def counted(self, name: str, **labels: str) -> float:
        full = f"kvplane_bootstrap_{name}_total"
        return self.registry.get_sample_value(full, labels) or 0.0


@asynccontextmanager
async def hall(
    nnodes: int = 2, port: int = 0, told: Announced = TOLD, secret: str = "", **changes: Any
) -> AsyncIterator[Hall]:
    settings = RendezvousSettings(**{
        name: getattr(QUICK, name) for name in RendezvousSettings.__slots__
    } | changes)  # fmt: skip
    registry = CollectorRegistry()
    leader = Leader(
        Address("127.0.0.1", port), nnodes, told, None, settings, BootstrapMetrics(registry), secret
    )
    async with AsyncExitStack() as stack:
        await leader.start()
        stack.push_async_callback(leader.stop)
        made = Hall(leader, registry, settings, stack, secret)
        leader.watch(lambda s: made.changes.append((s.rank, s.state, str(s.generation))))
        yield made


class Raw:
    """A node that says only what the test says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer, self.frames = reader, writer, Frames(2**21)
        self.early: list[Message] = []

    @staticmethod
    async def dial(address: Address) -> Raw:
        return Raw(*await asyncio.open_connection(address.host, address.port))

    async def hello(self, **changes: Any) -> Message:
        assert isinstance(await self.hear(), Challenge)
        members = {"protocol": PROTOCOL, "node_rank": 1, "nnodes": 2, "generation": "raw"}
        members |= {"nonce": b"n" * 32, "facts": {"tp": "4"}} | changes
        self.say(Hello(**members))
        return await self.hear()

    def say(self, message: Message) -> None:
        self.writer.write(frame(message))

    async def hear(self, *skip: type) -> Message:
        async with asyncio.timeout(20):
            while True:
                while not self.early:
                    data = await self.reader.read(65_536)
                    if not data:
                        raise EOFError
                    self.early += self.frames.feed(data)
                message = self.early.pop(0)
                if not isinstance(message, (Beat, *skip)):
                    return message

    async def closed(self) -> bool:
        try:
            while True:
                await self.hear()
        except (EOFError, ConnectionError):
            return True

    async def leave(self) -> None:
        self.writer.close()


@dataclass
class Slow:
    """A handler that works until it is let go."""

    running: int = 0
    cancelled: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, body: bytes) -> bytes:
        self.running += 1
        try:
            await self.go.wait()
            return body
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

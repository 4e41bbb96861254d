"""A prefill and a decode over real sockets on loopback; the resolver is a table."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from kit.onesided import StandInBackend
from kit.wait import until

from kvplane.bootstrap import Topology
from kvplane.runtime import SystemClock
from kvplane.transfer import (
    BACKENDS,
    UNTOUCHED,
    Layout,
    Metadata,
    Offers,
    Puller,
    Region,
    Tamper,
    TransferMetrics,
    TransferSettings,
)
from kvplane.vocabulary import BootstrapTriple, Generation, Room, Shape, StageRecord

PAGES, LAYERS = 24, 2
LAYOUT = Layout("tiny", 16, "float16", LAYERS, 2, 16, 2048)
SETTINGS = TransferSettings(
    bootstrapping_s=5.0, connect_s=2.0, stall_s=1.0, verdict_s=2.0, hello_s=1.0, fence_s=2.0
)


@dataclass
class FakeEndpoint:
    host: str
    port: int
    generation: Generation | None = None


@dataclass
class FakeResolved:
    topology: Topology
    generation: Generation | None = None


@dataclass
class FakeResolver:
    """Answers from fields; `error` is raised instead."""

    endpoints: dict[int, FakeEndpoint]  # by dp rank
    ranks: dict[tuple[int, int], FakeEndpoint] = field(default_factory=dict)  # by tp, pp rank
    shape: Shape = field(default_factory=Shape)
    follow: bool = True
    rooms: dict[int, int] = field(default_factory=dict)
    error: Exception | None = None
    asked: list[int] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    generation: Generation | None = None  # of the topology's answer
    expected: list[object] = field(default_factory=list)  # generations asked for, in order
    more: dict[str, Any] = field(default_factory=dict)  # members of the topology

    async def topology(self, address: str) -> FakeResolved:
        if self.error is not None:
            raise self.error
        shape = self.shape
        facts = (shape.tp, shape.cp, shape.dp, shape.pp, shape.page_size, shape.kv_dtype)
        topology = Topology(*facts, follow_bootstrap_room=self.follow, **self.more)
        return FakeResolved(topology, self.generation)

    async def endpoint(
        self, address: str, dp: int, cp: int, tp: int, pp: int, expected: object = None
    ) -> FakeEndpoint:
        self.asked.append(dp)
        self.expected.append(expected)
        if (tp, pp) in self.ranks:
            return self.ranks[tp, pp]
        if dp not in self.endpoints:
            raise LookupError(f"dp rank {dp} is not registered")
        return self.endpoints[dp]

    async def dp_ranks(
        self, address: str, rooms: Sequence[Room], wait_s: float = 0.0
    ) -> Mapping[Room, int]:
        self.waited_s = wait_s
        return {room: self.rooms[room] for room in rooms if room in self.rooms}

    def forget(self, address: str) -> None:
        self.forgotten.append(address)


MEMBERS = {**BACKENDS, "stand-in": StandInBackend}  # one-sided without a library


def memory(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.random((PAGES, 2, 2, 16, 16)).astype(np.float16) for _ in range(LAYERS)]


@dataclass
class Rig:
    """Both sides and everything they said."""

    offers: Offers
    puller: Puller
    resolver: FakeResolver
    prefill_memory: list[np.ndarray]
    decode_memory: list[np.ndarray]
    backends: list[Any]
    metrics: TransferMetrics
    records: list[StageRecord]
    released: list[tuple[int, ...]] = field(default_factory=list)

    async def pull(
        self,
        room: int,
        pages: Sequence[int],
        tokens: int = 64,
        deadline_s: float = 5.0,
        **more: Any,
    ) -> Metadata:
        return await self.puller.pull(
            self.triple(room),
            pages,
            tokens,
            deadline_s=deadline_s,
            released=lambda pages: self.released.append(tuple(pages)),
            **more,
        )

    async def deliver(
        self, room: int, pages: Sequence[int], tokens: int = 64, deadline_s: float = 5.0
    ) -> None:
        said = Metadata(Room(room), tokens=tokens, first_token=7, cached_tokens=16)
        await self.offers.deliver(Room(room), pages, said, deadline_s)

    async def both(
        self, room: int, sources: Sequence[int], pages: Sequence[int], **more: Any
    ) -> tuple[Any, Any]:
        """(pull, deliver): results or exceptions."""
        pulled, delivered = await asyncio.gather(
            self.pull(room, pages, **more), self.deliver(room, sources), return_exceptions=True
        )
        return pulled, delivered

    def triple(self, room: int) -> BootstrapTriple:
        return BootstrapTriple("127.0.0.1", 8998, Room(room))

    def page(self, side: list[np.ndarray], number: int) -> bytes:
        return b"".join(layer[number].tobytes() for layer in side)

    def arrived(self, sources: Sequence[int], pages: Sequence[int]) -> bool:
        return all(
            self.page(self.prefill_memory, source) == self.page(self.decode_memory, page)
            for source, page in zip(sources, pages, strict=True)
        )

    def stages(self, room: int, by: str) -> dict[str, str]:
        mine = [r for r in self.records if r.room == room and r.by == by]
        return {record.stage.value: record.outcome for record in mine}

    def held(self) -> dict[str, int]:
        counts = [self.offers.counts(), self.puller.counts()]
        counts += [backend.counts() for backend in self.backends]
        total: dict[str, int] = {}
        for one in counts:
            for name, value in one.items():
                total[name] = total.get(name, 0) + value
        return total

    async def idle(self) -> None:
        """Everything taken was given back."""
        await until(lambda: not any(self.held().values()), 5, what=f"idle: {self.held()}")
        assert self.metrics.quarantined._value.get() == 0

    async def recovers(self) -> None:
        """The next request is fine, with the same pages."""
        metadata = await asyncio.wait_for(
            asyncio.gather(self.pull(9999, [1, 2, 3]), self.deliver(9999, [4, 5, 6])), 10
        )
        assert metadata[0].first_token == 7
        assert self.arrived([4, 5, 6], [1, 2, 3])
        await self.idle()

    def refused(self, socket: str, why: str) -> float:
        return self.metrics.refused.labels(socket, why)._value.get()


class MakeRig:
    """Builds rigs and takes them down."""

    def __init__(self) -> None:
        self._rigs: list[Rig] = []

    async def __call__(
        self,
        tamper: Tamper = UNTOUCHED,
        backend: str = "tcp",
        layouts: tuple[Layout, Layout] = (LAYOUT, LAYOUT),
        decode_settings: dict[str, Any] | None = None,
        prefill_settings: dict[str, Any] | None = None,
        generation: str = "p1",
    ) -> Rig:
        metrics, records = TransferMetrics(), []
        sends = replace(SETTINGS, **(prefill_settings or {}))
        lands = replace(SETTINGS, **(decode_settings or {}))
        sides = [(memory(1), sends), (memory(2), lands)]
        backends = []
        for layers, settings in sides:
            one = MEMBERS[backend](settings, metrics)
            await one.start("127.0.0.1", [Region.of(layer) for layer in layers])
            backends.append(one)
        clock = SystemClock()
        offers = Offers(
            backends[0], layouts[0], Generation(generation), records.append, clock, sends, metrics,
            tamper, by="prefill",
        )  # fmt: skip
        port = await offers.start("127.0.0.1")
        resolver = FakeResolver({0: FakeEndpoint("127.0.0.1", port)})
        puller = Puller(
            backends[1], layouts[1], resolver, Generation("d1"), records.append, clock, lands,
            metrics, Shape(), by="decode",
        )  # fmt: skip
        rig = Rig(offers, puller, resolver, sides[0][0], sides[1][0], backends, metrics, records)
        self._rigs.append(rig)
        return rig

    async def close(self) -> None:
        for rig in self._rigs:
            await rig.puller.close()
            await rig.offers.close()
            for backend in rig.backends:
                await backend.stop()


@pytest.fixture
async def make_rig() -> AsyncIterator[MakeRig]:
    made = MakeRig()
    yield made
    await made.close()


@pytest.fixture
def new_maker() -> type[MakeRig]:
    """For a test that brings its own event loop and closes what it made."""
    return MakeRig


@pytest.fixture
async def rig(make_rig: MakeRig) -> Rig:
    return await make_rig()

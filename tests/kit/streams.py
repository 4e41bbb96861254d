"""Streams: what the tests of events/ share. A publisher as engines have it, and a view to ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio
from prometheus_client import CollectorRegistry

from kit.ports import free_ports
from kit.wait import until
from kvplane.events import EventsMetrics, EventsSettings, Place, Subscriber, dialect_of
from kvplane.index import MemoryStore, Store, View
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Knowledge, Pod, Worker

VECTORS = Path(__file__).parents[1] / "vectors"
WORKER = Worker(Pod("p0"))
QUICK = EventsSettings(
    connect_s=0.3, settle_s=0.05, idle_check_s=0.2, replay_s=2.0, replay_total_s=5.0,
    replay_retry_s=0.1, replay_retry_most_s=0.2, store_retry_s=0.01, store_retry_most_s=0.05,
    heartbeat_s=0.05, beat_s=0.1, beat_ttl_s=2.0, evicted_check_s=0.05,
)  # fmt: skip
END = b"\xff" * 8


def lines(name: str) -> Iterator[dict[str, Any]]:
    """Objects of a vector file."""
    for line in (VECTORS / name).read_text().splitlines():
        yield json.loads(line)


def number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big")


def _bound(sock: zmq.asyncio.Socket, address: str) -> bool:
    """Whether it listens now: ZMQ lets go of an address some time after a socket was closed."""
    try:
        sock.bind(address)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return False
    return True


@dataclass
class Publisher:
    """PUB and ROUTER of one engine, with what the tests need to go wrong.

    `buffer`: what replay can give back. `questions`: what was asked, in order.
    """

    ports: tuple[int, int] = field(default_factory=lambda: tuple(free_ports(2)))
    topic: bytes = b"kv@p0@m"
    replay_topic: bool = True  # four frames in an answer; before vLLM 0.26 three
    with_replay: bool = True
    host: str = "127.0.0.1"
    buffer: dict[int, bytes] = field(default_factory=dict)
    questions: list[int] = field(default_factory=list)
    sequence: int = 0

    @property
    def events(self) -> str:
        return f"tcp://{self.host}:{self.ports[0]}"

    @property
    def replay(self) -> str | None:
        return f"tcp://{self.host}:{self.ports[1]}" if self.with_replay else None

    async def __aenter__(self) -> Publisher:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)  # XPUB sees subscriptions come: no sleeping
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._pub.setsockopt(zmq.IPV6, 1)
        await until(lambda: _bound(self._pub, self.events), what=f"{self.events} to be free")
        self._tasks: list[asyncio.Task[None]] = []
        self.subscribed = 0
        self._tasks.append(asyncio.create_task(self._watch()))
        if self.replay:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.IPV6, 1)
            replay = self.replay
            await until(lambda: _bound(self._router, replay), what=f"{replay} to be free")
            self._tasks.append(asyncio.create_task(self._serve()))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _watch(self) -> None:
        while True:
            (message,) = await self._pub.recv_multipart()
            self.subscribed += 1 if message[:1] == b"\1" else 0

    async def _serve(self) -> None:
        lead = [self.topic] if self.replay_topic else []
        while True:
            asker, *asked = await self._router.recv_multipart()
            if len(asked) != 2:
                continue  # as the engines do: no answer at all
            first = int.from_bytes(asked[1], "big")
            self.questions.append(first)
            for sequence in sorted(self.buffer):
                if sequence >= first:
                    answer = [asker, b"", *lead, number(sequence), self.buffer[sequence]]
                    await self._router.send_multipart(answer)
            end = [asker, b"", *([b""] if lead else []), END, b""]
            await self._router.send_multipart(end)

    async def listened(self, times: int = 1) -> None:
        """Wait until a subscription has arrived."""
        await until(lambda: self.subscribed >= times, 5, "a subscription")

    async def publish(self, payload: bytes, live: bool = True, kept: bool = True) -> int:
        """The next batch. Not `live`: lost on the wire. Not `kept`: replay lacks it."""
        sequence, self.sequence = self.sequence, self.sequence + 1
        if kept:
            self.buffer[sequence] = payload
        if live:
            await self.raw([self.topic, number(sequence), payload])
        return sequence

    async def raw(self, message: Sequence[bytes]) -> None:
        """Any frames at all."""
        await self._pub.send_multipart(list(message))


@dataclass
class Followed:
    """One subscriber over a store, and what a view makes of the store's stream."""

    subscriber: Subscriber
    store: Store
    registry: CollectorRegistry
    view: View

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvplane_events_{name}", labels) or 0.0

    def believed(self) -> tuple[Knowledge | None, str]:
        known = self.view.known(self.subscriber.worker)
        return (known.state, known.reason) if known else (None, "")

    async def at(self, sequence: int | None) -> None:
        """Wait until the view has seen this batch."""
        worker = self.subscriber.worker

        def seen() -> bool:
            facts = self.view.facts(worker)
            return facts is not None and facts.last == sequence

        await until(seen, 10, f"batch {sequence} in the view")

    async def knows(self, state: Knowledge, why: str = "") -> str:
        """Wait for a state with a reason of this pattern, since it passes through others on the
        way; the reason."""

        def does() -> bool:
            found, reason = self.believed()
            return found is state and re.search(why, reason) is not None

        await until(does, 10, f"{state} {why!r}")
        return self.believed()[1]


@contextlib.asynccontextmanager
async def following(
    publisher: Publisher,
    engine: str = "vllm",
    store: Store | None = None,
    worker: Worker = WORKER,
    settings: EventsSettings = QUICK,
    wrap: Callable[[Store], Any] = lambda store: store,
    **facts: Any,
) -> AsyncIterator[Followed]:
    """A running subscriber of a publisher; everything is given back at the end."""
    clock = SystemClock()
    kept: Store = store or MemoryStore(clock)
    registry, view = CollectorRegistry(), View()
    place = Place(publisher.events, publisher.replay, "m", dialect_of(engine), **facts)
    subscriber = Subscriber(
        worker, place, wrap(kept), clock, EventsMetrics(registry), settings, ingest="me"
    )

    async def follow() -> None:
        snapshot = await kept.snapshot()
        view.load(snapshot)
        async for entry in kept.tail(snapshot.cursor):
            for change in entry.changes:
                view.apply(change)
            view.note(entry.worker, entry.epoch, entry.last, entry.at)

    follower = asyncio.create_task(follow())
    await subscriber.start()
    try:
        yield Followed(subscriber, kept, registry, view)
    finally:
        await subscriber.stop()
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        if store is None:
            await kept.close()

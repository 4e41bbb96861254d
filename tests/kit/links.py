"""Links: PUB -> ingest -> store -> follower, all real; each but the first may be killed and begun.

A killed ingest gets nothing more through and says no goodbye; a killed follower takes its view
along. What is left must be enough for their successors.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from kit.streams import QUICK, WORKER, Publisher
from kit.wait import until
from kvplane.events import EventsMetrics, EventsSettings, Subscriptions
from kvplane.index import Follower, Store, StoreDown, View
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Knowledge, Pod, Role, Worker, WorkerUp

Open = Callable[[], Store]


class Mortal:
    """A store as a process holds it that will be killed: then every call of it is cut off."""

    def __init__(self, store: Store) -> None:
        self._store, self._calls, self._dead = store, set[asyncio.Future[Any]](), False

    def die(self) -> None:
        self._dead = True
        for call in self._calls:
            call.cancel()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        return self._cut(found) if inspect.iscoroutinefunction(found) else found

    def _cut(self, found: Callable[..., Any]) -> Callable[..., Any]:
        async def call(*arguments: Any, **named: Any) -> Any:
            if self._dead:
                raise StoreDown("test", "this process is dead")
            task = asyncio.ensure_future(found(*arguments, **named))
            self._calls.add(task)
            try:
                return await task
            except asyncio.CancelledError:
                task.cancel()
                if self._dead:
                    raise StoreDown("test", "this process is dead") from None
                raise
            finally:
                self._calls.discard(task)

        return call


@dataclass
class Ingest:
    """What `kvplane ingest` is made of, for one worker."""

    store: Store
    mortal: Mortal
    subscriptions: Subscriptions
    registry: CollectorRegistry

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"kvplane_events_{name}", labels) or 0.0

    async def kill(self) -> None:
        self.mortal.die()
        await self.subscriptions.stop()
        await self.store.close()

    async def leave(self) -> None:
        await self.subscriptions.stop()
        await self.store.close()


@dataclass
class Reader:
    """What a router is made of, as far as the index goes."""

    store: Store
    follower: Follower
    view: View

    async def kill(self) -> None:
        await self.follower.stop()
        await self.store.close()


@dataclass
class Links:
    """One engine's stream and who makes a view of it."""

    publisher: Publisher
    open: Open
    engine: str = "vllm"
    settings: EventsSettings = QUICK
    worker: Worker = WORKER
    url: str = "http://127.0.0.1:1"
    sent: int = -1  # number of the newest batch
    ingest: Ingest | None = None
    reader: Reader | None = None

    @property
    def view(self) -> View:
        assert self.reader is not None, "nobody follows"
        return self.reader.view

    async def begin_ingest(self) -> Ingest:
        """One more; the newest is `ingest`."""
        store, registry, clock = self.open(), CollectorRegistry(), SystemClock()
        mortal = Mortal(store)
        following = Subscriptions(mortal, clock, EventsMetrics(registry), self.settings)  # type: ignore[arg-type]
        await following.start()
        replay = (self.publisher.replay,) if self.publisher.replay else ()
        up = WorkerUp(
            self.worker.pod,
            self.url,
            Role.PREFILL,
            self.engine,
            "m",
            events=(self.publisher.events,),
            replay=replay,
        )
        await following.up(up)
        self.ingest = Ingest(store, mortal, following, registry)
        return self.ingest

    async def begin_reader(self) -> Reader:
        """One with an empty view, which it fills from the store."""
        store, view = self.open(), View()
        follower = Follower(store, view, SystemClock())
        await follower.start()
        self.reader = Reader(store, follower, view)
        return self.reader

    async def kill_ingest(self) -> None:
        assert self.ingest is not None
        await self.ingest.kill()
        self.ingest = None

    async def kill_reader(self) -> None:
        assert self.reader is not None
        await self.reader.kill()
        self.reader = None

    async def send(self, frames: tuple[bytes, ...] | list[bytes]) -> None:
        """The next batch, as recorded; replay has it from the same moment."""
        self.sent += 1
        assert int.from_bytes(frames[1], "big") == self.sent, "batches are sent in order"
        self.publisher.buffer[self.sent] = frames[2]
        await self.publisher.raw([self.publisher.topic, *frames[1:]])

    def state(self) -> str:
        facts, known = self.view.facts(self.worker), self.view.known(self.worker)
        last = facts.last if facts else None
        return f"batch {last}, {known.state if known else None}: {known.reason if known else ''}"

    async def seen(self) -> None:
        """Wait until the view has all that was sent, and says that it is exact."""

        def same() -> bool:
            facts, known = self.view.facts(self.worker), self.view.known(self.worker)
            last = -1 if facts is None or facts.last is None else facts.last
            exact = known is not None and known.state is Knowledge.EXACT
            return exact and last == self.sent

        try:
            await until(same, 20)
        except AssertionError:
            raise AssertionError(f"not seen: batch {self.sent}; the view: {self.state()}") from None


def named(topic: bytes) -> str:
    """The pod that a topic like kv@pod@model names, or "": an ingest checks who speaks."""
    first, _, rest = topic.decode(errors="replace").partition("@")
    return rest.rpartition("@")[0] if first == "kv" else ""


@contextlib.asynccontextmanager
async def links(
    open_store: Open,
    topic: bytes = b"kv@p0@m",
    engine: str = "vllm",
    settings: EventsSettings = QUICK,
) -> AsyncIterator[Links]:
    """A publisher with an ingest and a follower over a store; all gone at the end."""
    pod = named(topic) or str(WORKER.pod)
    url = f"http://{pod}" if ":" in pod else "http://127.0.0.1:1"
    async with Publisher(topic=topic) as publisher:
        made = Links(publisher, open_store, engine, settings, Worker(Pod(pod)), url)
        await made.begin_reader()
        await made.begin_ingest()
        try:
            yield made
        finally:
            if made.ingest is not None:
                await made.ingest.leave()
            if made.reader is not None:
                await made.reader.kill()

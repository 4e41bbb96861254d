"""A consumer outside: GET /snapshot, then GET /changes, is the whole index, and stays it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from kit.streams import QUICK
from kit.wait import until

from kvplane.doors import Server
from kvplane.events import Broadcast, routes
from kvplane.index import (
    Batch,
    Follower,
    MemoryStore,
    RedisStore,
    Store,
    View,
    index_app,
    to_hex,
)
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import (
    BlockHash,
    Change,
    Cleared,
    ClearReason,
    Cursor,
    Epoch,
    Group,
    GroupKind,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

WORKERS = [Worker(Pod(f"p{number}")) for number in range(5)]
TIERS = (Tier.GPU, Tier.CPU)  # in the order of a view's
GROUPS = {number: Group(number, GroupKind.WINDOW, 128, 16) for number in (1, 2)}
Kind = tuple[str, int | None]  # tier, and which further cache group; None = the counted one
Held = dict[str, dict[Kind, set[str]]]  # worker -> kind -> blocks


@dataclass
class Consumer:
    """What anybody can write: sets of blocks out of our two routes, in any language."""

    session: aiohttp.ClientSession
    url: str
    cursor: str = ""
    held: Held = field(default_factory=dict)
    events: int = 0

    async def begin(self) -> None:
        """From the snapshot of all."""
        self.held = {}
        async with self.session.get(self.url + "/snapshot") as answer:
            assert answer.status == 200
            *lines, end = [json.loads(line) for line in (await answer.text()).splitlines()]
        name = ""
        for line in lines:
            if "worker" in line:
                name = line["worker"]
                self.held[name] = defaultdict(set)
            else:
                self.held[name][kind(line)].update(line["blocks"])
        self.cursor = end["cursor"]

    async def follow(self, events: int) -> None:
        """So many events, then the connection is dropped, as networks do."""
        headers = {"last-event-id": self.cursor}
        async with self.session.get(self.url + "/changes", headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            while events:
                line = (await answer.content.readline()).decode()
                assert line, "the stream ended"
                if line.startswith("data: "):
                    self.take(json.loads(line[6:]))
                    events -= 1

    def take(self, body: dict[str, Any]) -> None:
        self.events += 1
        self.cursor = body["cursor"]
        for change in body["changes"]:
            held = self.held.setdefault(change["worker"], defaultdict(set))
            if change["kind"] == "stored":
                held[kind(change)].update(change["blocks"])
            elif change["kind"] == "removed":
                held[kind(change)].difference_update(change["blocks"])
            elif change["kind"] == "cleared":
                for tier, group in list(held):
                    if change["tier"] in (None, tier):
                        del held[tier, group]
                if change["reason"] == "gone":
                    del self.held[change["worker"]]

    def shown(self) -> Held:
        return {
            name: {kind: blocks for kind, blocks in held.items() if blocks}
            for name, held in self.held.items()
        }


def kind(told: dict[str, Any]) -> Kind:
    """Of a stretch of a snapshot, or of a change."""
    group = told.get("group")
    return told["tier"], group["number"] if isinstance(group, dict) else group


def truth(view: View) -> Held:
    """What the view holds, in the consumer's words."""
    found: Held = {}
    for worker in view.workers():
        held = found[str(worker)] = defaultdict(set)
        for stretch in view.held(worker):
            held[stretch.tier.value, None].update(map(to_hex, stretch.blocks))
        facts = view.facts(worker)
        for number, further in facts.groups.items() if facts else ():
            for tier, blocks in zip(TIERS, further.held, strict=False):
                if blocks:
                    held[tier.value, number] = set(map(to_hex, blocks))
    assert any(held for held in found.values())
    return found


class Writer:
    """Engines that store, remove, clear, restart and leave, at random."""

    def __init__(self, store: Store, seed: int) -> None:
        self._store, self._random = store, random.Random(seed)
        self._lives: dict[Worker, tuple[Epoch, int]] = {}
        self.steps = 0

    async def step(self) -> None:
        self.steps += 1
        worker = self._random.choice(WORKERS)
        epoch, last = self._lives.get(worker, (None, -1))
        dice = self._random.random()
        if epoch is None or dice < 0.02:
            self._lives[worker] = await self._store.begin_life(worker, epoch), -1
            return
        if dice < 0.03:
            await self._store.forget(worker, epoch)
            del self._lives[worker]
            return
        changes = tuple(self._change(worker, epoch) for _ in range(self._random.randint(1, 4)))
        await self._store.apply(Batch(worker, epoch, last + 1, last + 1, changes))
        self._lives[worker] = epoch, last + 1

    def _change(self, worker: Worker, epoch: Epoch) -> Change:
        tier, dice = self._random.choice(TIERS), self._random.random()
        start = self._random.randrange(0, 190)
        blocks = tuple(BlockHash(1 + at) for at in range(start, start + self._random.randint(1, 9)))
        group = self._random.choice([None, None, *GROUPS])
        if dice < 0.6:
            parent = BlockHash(start) if start else None
            return Stored(worker, epoch, tier, parent, blocks, 16, GROUPS.get(group or 0))
        if dice < 0.97:
            return Removed(worker, epoch, tier, blocks, group)
        return Cleared(worker, epoch, ClearReason.ENGINE, self._random.choice([None, *TIERS]))


@contextlib.asynccontextmanager
async def served(store: Store) -> AsyncIterator[tuple[View, Follower, str]]:
    clock, view = SystemClock(), View()
    follower, broadcast = Follower(store, view, clock), Broadcast(store, clock, QUICK)
    app = index_app(view, follower, clock=clock)
    app.router.routes.extend(routes(broadcast))
    server = Server(app, "127.0.0.1", 0, "index")
    async with running([follower, server, broadcast]):
        await follower.ready.wait()
        yield view, follower, f"http://127.0.0.1:{server.port}"


@pytest.fixture(params=["memory", "redis, 1 shard", "redis, 3 shards"])
def make_store(request: pytest.FixtureRequest, redis_url: str, redis_prefix: str) -> Any:
    if request.param == "memory":
        store = MemoryStore(SystemClock())
        return lambda: store
    return lambda: RedisStore(redis_url, redis_prefix, int(request.param.split()[1]))


async def test_a_snapshot_and_what_follows_it_is_the_index_while_a_writer_writes(
    make_store: Any,
) -> None:
    store = make_store()
    writer, done = Writer(store, 7), asyncio.Event()

    async def write() -> None:
        while not done.is_set():
            await writer.step()
            await asyncio.sleep(0.002)  # engines leave the readers a breath

    async with served(store) as (view, follower, url), aiohttp.ClientSession() as session:
        for _ in range(200):
            await writer.step()
        writing = asyncio.create_task(write())
        consumers = [Consumer(session, url) for _ in range(3)]
        for consumer in consumers:
            await consumer.begin()
            for size in (1, 30, 2, 100, 1):  # the connection drops in between
                await asyncio.wait_for(consumer.follow(size), 30)
        done.set()
        await writing
        goal = await store.head()
        await until(lambda: store.reached(follower.cursor, goal), what="the view at the end")
        for consumer in consumers:
            while not store.reached(Cursor(consumer.cursor), goal):
                await asyncio.wait_for(consumer.follow(1), 30)
            assert consumer.shown() == truth(view)
            assert consumer.events >= 134
    await store.close()


async def test_a_cursor_of_one_process_is_good_at_another(make_store: Any) -> None:
    """Two processes see the shards in different orders; whoever changes over misses nothing."""
    one, other = make_store(), make_store()
    writer = Writer(one, 11)
    async with (
        served(one) as (view, follower, first),
        served(other) as (_, _, second),
        aiohttp.ClientSession() as session,
    ):
        consumer = Consumer(session, first)
        await consumer.begin()
        for _ in range(12):
            for _ in range(25):
                await writer.step()
            await asyncio.wait_for(consumer.follow(20), 30)
            consumer.url = second if consumer.url == first else first
        goal = await one.head()
        await until(lambda: one.reached(follower.cursor, goal), what="the view at the end")
        while not one.reached(Cursor(consumer.cursor), goal):
            await asyncio.wait_for(consumer.follow(1), 30)
        assert consumer.shown() == truth(view)
        assert consumer.events == writer.steps  # each once
    await one.close()
    await other.close()

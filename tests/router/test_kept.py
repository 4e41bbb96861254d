"""Kept: ten thousand attempts are remembered, and cost no look for garbage and little memory."""

from __future__ import annotations

import asyncio
import gc
import itertools
import tracemalloc
import weakref
from typing import Any

import pytest
from kit.gatehouse import gatehouse
from kit.instant import ask, body, instant
from kit.peer import Call, Script, answer
from kit.wait import until

from kvplane.router.asker import AsgiClient
from kvplane.router.settings import BreakerSettings, RetrySettings, RouterSettings

MANY = 200
MOST_BYTES = 2000 * 1.5  # an attempt; half of that here, a longer name or a second room is more


async def test_what_is_kept_of_a_request_is_nothing_to_look_through_and_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = body()
    async with instant(monkeypatch) as (api, house):

        async def many() -> tuple[int, int]:
            for _ in range(MANY):
                assert await ask(api, sent) == 200
                await asyncio.sleep(0)  # who waited for the client to leave is told to end
            house.registry.get_sample_value("nothing")  # a scrape: all is counted
            await asyncio.sleep(0)
            gc.collect()
            return len(gc.get_objects()), tracemalloc.get_traced_memory()[0]

        await many()  # what is made once
        tracemalloc.start()
        try:
            seen = [await many() for _ in range(4)]
        finally:
            tracemalloc.stop()
        assert len(house.ledger) == 5 * MANY
        # The least of each: other tests' threads and caches live in this process too.
        grown = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(seen)]
        assert min(objects for objects, _ in grown) < MANY / 4, "none of each"
        assert min(size for _, size in grown) / MANY < MOST_BYTES


def says(*answers: bytes) -> Script:
    async def script(call: Call) -> None:
        while await call.asked():
            for part in answers:
                await call.send(part)
            if not answers[-1].endswith(END):
                call.writer.transport.abort()
                return

    return script


END = b"}"  # of an answer; without it the connection is cut
GOOD, BAD, BUSY, NO = (answer(b'{"text":"x"}', status) for status in (200, 500, 503, 400))
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TOKEN = b"9\r\ndata: 1\n\n\r\n"
SOON = RouterSettings(
    retry=RetrySettings(first_wait_s=0.001, most_wait_s=0.002, budget_most=1000),
    breaker=BreakerSettings(faults=1000),
)


@pytest.mark.parametrize(
    ("prefill", "decode", "path", "asked", "status"),
    [
        (says(BAD), says(GOOD), "/generate", {"text": "x"}, 502),
        (says(GOOD), says(BUSY), "/generate", {"text": "x"}, 503),
        (says(GOOD), says(NO), "/generate", {"text": "x"}, 400),
        (says(GOOD), says(b""), "/generate", {"text": "x"}, 502),
        (says(GOOD), says(STREAM + TOKEN), "/generate", {"text": "x", "stream": True}, 200),
        (says(GOOD), says(GOOD), "/generate", {"text": "x", "model": "none"}, 404),
        (says(GOOD), says(GOOD), "/generate", {"text": 5}, 400),
        (says(BAD), says(BAD), "/v1/embeddings", {"input": "x"}, 502),
    ],
    ids=["prefill fails", "decode is busy", "decode says no", "decode is cut", "a stream breaks",
         "no such model", "a bad body", "passed on"],
)  # fmt: skip
async def test_what_failed_is_gone_without_a_look_for_garbage(
    prefill: Script, decode: Script, path: str, asked: dict[str, Any], status: int
) -> None:
    """Its body may be 16 MB, and is no longer counted where its bytes are limited."""
    facts = {name: {"model": "tiny"} for name in ("p1", "p2", "d1", "d2")}
    engines = {"p1": prefill, "p2": prefill, "d1": decode, "d2": decode}
    async with gatehouse(engines, SOON, facts=facts) as house:
        assert (await house.post(path, asked))[0] == status
        await until(lambda: house.idle)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                assert (await house.post(path, asked))[0] == status
            await until(lambda: house.idle)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = [one for one in gc.garbage if "kvplane" in repr(type(one)) + repr(one)[:200]]
            assert not ours
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize("more", [{}, {"hold": 1}, {"model": "none"}, {"n": -1}], ids=str)
async def test_a_client_of_any_server_is_gone_without_a_look_for_garbage(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Who waited for it to leave held it, with the whole body."""
    async with instant(monkeypatch) as (api, _):
        clients: list[weakref.ref[AsgiClient]] = []
        watch = AsgiClient.watch

        def watched(client: AsgiClient) -> None:
            clients.append(weakref.ref(client))
            watch(client)

        monkeypatch.setattr(AsgiClient, "watch", watched)
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                await ask(api, body(**more))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(clients) == 3
            assert [one() for one in clients] == [None] * 3
        finally:
            gc.enable()

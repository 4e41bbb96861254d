"""The index equals what the engines hold, in one process and over Redis, after every fault."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio
import redis
from kit.cable import Cable
from kit.indexed import believed, fill, indexed, knowledge, settled, truth
from kit.plane import EngineSeat, Plane
from kit.ports import free_port
from kit.redis import binary, server
from kit.wait import until

SMALL = ["--blocks", "64"]  # evicts after a dozen prompts
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Stage:
    """A running plane; the events of engine "one" go through cables."""

    running: Plane
    cables: tuple[Cable, Cable]
    redis: str | None
    prefix: str


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["memory", "redis"])
async def stage(request: pytest.FixtureRequest) -> AsyncIterator[Stage]:
    """In one process, or with Redis, two ingests and a router; shared, for processes cost."""
    one = EngineSeat("one", "both", SMALL)
    two = EngineSeat("two", "both", [*SMALL, "--event-form", "sglang"])
    url = None if request.param == "memory" else request.getfixturevalue("redis_url")
    async with contextlib.AsyncExitStack() as stack:
        events = await stack.enter_async_context(Cable(one.ports[1]))
        replay = await stack.enter_async_context(Cable(one.ports[2]))
        lines, prefix = {"one": (events, replay)}, f"story-{one.ports[0]}"
        plane = indexed([one, two], url, prefix, ("left", "right"), lines)
        yield Stage(await stack.enter_async_context(plane), (events, replay), url, prefix)


async def killed(running: Plane, name: str) -> None:
    """End a process without a farewell."""
    running.children[name].kill()
    await running.children[name].stop()


async def doubted(running: Plane, name: str, timeout_s: float) -> str:
    """Wait until an engine is no longer called exact; the reason."""

    async def doubt() -> bool:
        return (await knowledge(running, name))[0] in ("partial", "dark")

    await until(doubt, timeout_s, f"doubt about {name}")
    return (await knowledge(running, name))[1]


async def test_stores_evictions_and_both_event_forms_are_followed_exactly(stage: Stage) -> None:
    await fill(stage.running, "one", *range(25))
    await fill(stage.running, "two", 1, 2, 3)
    await settled(stage.running)
    assert len(await truth(stage.running, "one")) > 30
    assert len(await truth(stage.running, "two")) == 18


async def test_what_a_cut_connection_lost_is_doubted_and_then_replayed(stage: Stage) -> None:
    await fill(stage.running, "one", 1, 2)
    await settled(stage.running)
    for cable in stage.cables:
        cable.cut()
    assert await doubted(stage.running, "one", 4)  # before it is called dark
    await fill(stage.running, "one", *range(200, 220))  # stores and evicts unheard
    for cable in stage.cables:
        cable.mend()
    await settled(stage.running)


@pytest.mark.parametrize("name", ["one", "two"])
async def test_a_restarted_engine_is_doubted_and_known_by_its_new_life_alone(
    stage: Stage, name: str
) -> None:
    running = stage.running
    await fill(running, name, *range(5))
    await settled(running)
    old, sent = await truth(running, name), await batches(running, name)
    await killed(running, name)
    assert await doubted(running, name, 4)
    await running.children[name].start()
    await fill(running, name, *range(60, 60 + sent + 1))  # past the number of the old life
    await settled(running)
    assert not old & await believed(running, name)
    await killed(running, name)
    await running.children[name].start()
    await settled(running)
    assert not await believed(running, name)  # silent, and empty all the same


async def batches(running: Plane, name: str) -> int:
    told = await running.get("/truth", at=running.engines[name].url)
    return min(int(told["ranks"][0]["next_batch"]), 40)


async def test_either_ingest_may_die_and_both(stage: Stage) -> None:
    running = stage.running
    if "left" not in running.children:
        pytest.skip("one process has no ingest of its own")
    await killed(running, "left")
    await fill(running, "one", *range(30, 45))
    await settled(running)
    await killed(running, "right")
    await fill(running, "one", *range(50, 60))
    await killed(running, "two")
    await running.children["two"].start()
    await fill(running, "two", *range(50, 60))  # another life meanwhile
    assert await believed(running, "one") != await truth(running, "one")
    await running.children["left"].start()
    await settled(running)


async def test_while_no_ingest_lives_nothing_is_called_exact(stage: Stage) -> None:
    running = stage.running
    if "left" not in running.children:
        pytest.skip("one process has no ingest of its own")
    await fill(running, "one", 1, 2)
    await settled(running)
    held = await believed(running, "one")
    for name in ("left", "right"):
        await killed(running, name)
    begun = time.monotonic()
    assert "ingest" in await doubted(running, "one", 10)
    assert await believed(running, "one") == held  # the last view still answers
    body = {"input_ids": [40] * 64, "sampling_params": {"max_new_tokens": 1}}
    status, _, headers = await running.ask("/generate", body)
    assert (status, headers["x-kvplane-knowledge"]) == (200, "dark"), headers
    assert "ingest" in headers["x-kvplane-reason"]
    print(f"in doubt {time.monotonic() - begun:.1f} s after the last ingest died")
    for name in ("left", "right"):
        await running.children[name].start()
    await settled(running)
    _, _, headers = await running.ask("/generate", body)
    assert headers["x-kvplane-knowledge"] == "exact", headers


async def test_tables_that_redis_lost_are_noticed_and_heard_again(stage: Stage) -> None:
    if stage.redis is None:
        pytest.skip("there is no Redis")
    running = stage.running
    await fill(running, "one", *range(5))
    await settled(running)
    with redis.Redis.from_url(stage.redis) as client:
        tables = client.keys(f"{{{stage.prefix}:*}}:t:*")
        assert client.delete(*tables) == len(running.engines)
    await killed(running, "gateway")  # the next one has nothing but what lies there
    await running.children["gateway"].start()
    await settled(running)
    assert await believed(running, "one")


async def test_a_redis_that_lost_everything_is_filled_again_though_nobody_speaks() -> None:
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        with server(binary(), port=port) as url:
            seats = [EngineSeat("one", "both")]
            running = await stack.enter_async_context(indexed(seats, url))
            await fill(running, "one", 1, 2)
            await settled(running)
        held = len(await truth(running, "one"))
        assert "store" in await doubted(running, "one", 5)
        assert len(await believed(running, "one")) == held  # the last view still answers
        body = {"input_ids": [40] * 64, "sampling_params": {"max_new_tokens": 1}}
        status, _, headers = await running.ask("/generate", body)
        assert (status, headers["x-kvplane-knowledge"]) == (200, "partial"), headers
        assert "store" in headers["x-kvplane-reason"]
        held = len(await truth(running, "one"))
        with server(binary(), port=port):
            await settled(running)
            assert len(await believed(running, "one")) == held
            await stack.aclose()

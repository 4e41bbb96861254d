"""What a request costs the store (nothing), and what a plane knows that is stopped and begun."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from kit.cable import Cable
from kit.indexed import differences, fill, indexed, settled, truth
from kit.plane import EngineSeat, Plane
from kit.wait import until

SLOW_S = 0.005  # of every piece on its way to Redis and back
BLOCK = 16  # tokens
PARALLEL = 50


def prompt(number: int, blocks: int) -> list[int]:
    return [32 + (number * 7 + at) % 90 for at in range(blocks * BLOCK)]


async def ranked(running: Plane, tokens: list[int]) -> tuple[int, str]:
    """Depth of a prompt at the one engine there is, and how well it is known."""
    body = {"model": "tiny", "token_ids": tokens}
    status, found, _ = await running.ask("/index/rank", body)
    assert status == 200, found
    (row,) = found["workers"]
    return row["depth_blocks"], row["knowledge"]


async def pieces_per_s(line: Cable, seconds: float) -> float:
    """What goes to Redis while nobody asks anything."""
    before, begun = line.pieces, time.monotonic()
    await asyncio.sleep(seconds)  # a rate needs a stretch of time
    return (line.pieces - before) / (time.monotonic() - begun)


async def test_no_request_asks_redis_anything_however_long_its_prompt(
    redis_url: str, redis_prefix: str
) -> None:
    seat = EngineSeat("one", "both", ["--blocks", "128"])
    body = {"input_ids": prompt(1, 10), "sampling_params": {"max_new_tokens": 1}}
    async with Cable(_port(redis_url), delay_s=SLOW_S) as line:
        url = f"redis://127.0.0.1:{line.listen}/0"
        async with indexed([seat], url, redis_prefix) as running:
            assert (await running.ask("/generate", body))[0] == 200
            await settled(running)
            idle = await pieces_per_s(line, 2.0)
            for blocks in (10, 1_000, 10_000):
                before, begun = line.pieces, time.monotonic()
                many = [ranked(running, prompt(1, blocks)) for _ in range(PARALLEL)]
                found = {depth for depth, _ in await asyncio.gather(*many)}
                assert found == {10} if blocks == 10 else max(found) <= 128
                few(line.pieces - before, idle * (time.monotonic() - begun), f"{blocks} blocks")
            before, begun = line.pieces, time.monotonic()
            answers = await asyncio.gather(
                *(running.ask("/generate", body) for _ in range(PARALLEL))
            )
            assert {status for status, _, _ in answers} == {200}
            assert {headers["x-kvplane-depth"] for _, _, headers in answers} == {"10/10"}
            few(line.pieces - before, idle * (time.monotonic() - begun), "through the gateway")


def few(pieces: int, idle: float, what: str) -> None:
    """No more went to Redis than would have without anybody asking, give or take some."""
    print(f"{PARALLEL} questions, {what}: {pieces} pieces to Redis, {idle:.0f} if nobody had asked")
    assert pieces < idle + PARALLEL / 5, what


async def test_a_plane_that_was_stopped_knows_all_again_and_serves_meanwhile(
    redis_url: str, redis_prefix: str
) -> None:
    seats = [EngineSeat(name, "both", ["--blocks", "256"]) for name in ("one", "two", "three")]
    async with indexed(seats, redis_url, redis_prefix) as running:
        for number, seat in enumerate(seats):
            await fill(running, seat.name, *range(number * 10, number * 10 + 5))
        await settled(running)
        for name in ("ingest", "gateway"):
            await running.children[name].stop()
        sent = await batches(running)
        while await batches(running) < sent + 50:
            number = await batches(running)
            await fill(running, seats[number % 3].name, 100 + number % 50, tokens=200)
        await running.children["gateway"].start()
        await until(lambda: _ready(running), what="a gateway that is ready")
        for number in range(5):  # while nobody ingests
            body = {"input_ids": prompt(number, 5), "sampling_params": {"max_new_tokens": 1}}
            status, found, _ = await running.ask("/generate", body)
            assert status == 200, found
        assert await differences(running)
        begun = time.monotonic()
        await running.children["ingest"].start()
        up_s = time.monotonic() - begun
        await settled(running)
        all_s = time.monotonic() - begun
        print(f"an ingest that answers after {up_s:.1f} s, and all known after {all_s:.1f} s")
        assert all([await truth(running, seat.name) for seat in seats])


async def batches(running: Plane) -> int:
    """How many batches the engines published."""
    told = [await running.get("/truth", at=seat.url) for seat in running.engines.values()]
    return sum(rank["next_batch"] for one in told for rank in one["ranks"])


@pytest.mark.parametrize("place", ["memory", "redis"])
async def test_a_pod_that_restarts_at_its_name_inherits_nothing(
    place: str, request: pytest.FixtureRequest, redis_prefix: str
) -> None:
    """In two processes the gateway may see it before the ingest: then it is not called exact."""
    seat, asked = EngineSeat("p-0", "both"), prompt(1, 20)
    url = None if place == "memory" else request.getfixturevalue("redis_url")
    async with indexed([seat], url, redis_prefix) as running:
        body = {"input_ids": asked, "sampling_params": {"max_new_tokens": 1}}
        assert (await running.ask("/generate", body))[0] == 200
        await settled(running)
        assert await ranked(running, asked) == (20, "exact")
        child = running.children["p-0"]
        child.kill()
        await child.stop()
        await until(lambda: _well(running, seat, False), what="a gateway that misses the pod")
        await child.start()
        await until(lambda: _well(running, seat, True), what="a gateway that sees the pod")
        if place == "memory":
            assert (await ranked(running, asked))[0] == 0
        while (found := await ranked(running, asked))[0]:
            assert found[1] != "exact"
        _, _, headers = await running.ask("/generate", body)
        assert headers["x-kvplane-depth"] == "0/20"
        await settled(running)
        assert await ranked(running, asked) == (20, "exact")


async def _ready(running: Plane) -> bool:
    async with running.session.get(f"{running.url}/readiness") as answer:
        return answer.status == 200


async def _well(running: Plane, seat: EngineSeat, wanted: bool) -> bool:
    found: dict[str, Any] = await running.get("/workers")
    return any(one["pod"] == seat.pod and one["is_healthy"] is wanted for one in found["workers"])


def _port(url: str) -> int:
    return int(url.rpartition(":")[2].partition("/")[0])

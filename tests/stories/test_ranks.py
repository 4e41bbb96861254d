"""Ranks: sides of different tp, pp and dp behind one gateway answer as one engine."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from kit.house import house
from kit.pair import alone, asked
from kit.plane import EngineSeat, Plane, plane
from kit.wait import until

from kvplane.vocabulary import Role

QUIET = ["--retry-max-retries", "0", "--cb-failure-threshold", "100000"]  # every failure is shown
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Plane]:
    """Prefill tp 4 x dp 2, decode tp 2."""
    seats = [
        EngineSeat("prefill", "prefill", ["--tp", "4", "--dp", "2"]),
        EngineSeat("decode", "decode", ["--tp", "2"]),
    ]
    async with plane(seats, QUIET, workers=3) as made:
        yield made


def prompts() -> list[list[int]]:
    chance = random.Random(11)
    stem = [chance.randrange(32, 127) for _ in range(600)]
    lengths = [1, 16, 17, 100, 333, 1500]
    fresh = [[chance.randrange(32, 127) for _ in range(length)] for length in lengths]
    return fresh + [stem[: 100 * more] + [40 + more] * 9 for more in (1, 3, 6)]


async def test_tokens_are_those_of_one_engine(running: Plane) -> None:
    asks = [asked(tokens, 12) for tokens in prompts()]
    ones = [alone(tokens, 12) for tokens in prompts()]
    together = await asyncio.gather(*(running.ask("/generate", body) for body in asks))
    assert [status for status, _, _ in together] == [200] * len(asks), together
    assert [two["output_ids"] for _, two, _ in together] == ones
    rooms = [int(headers["x-kvplane-room"]) for _, _, headers in together]
    assert {room % 2 for room in rooms} == {0, 1}  # both dp ranks had some
    for body, one in zip(asks, ones, strict=True):  # again, now both sides hold a part
        status, two, _ = await running.ask("/generate", body)
        assert (status, two["output_ids"]) == (200, one)


@pytest.mark.parametrize("kind", ["flip-byte", "swap-pages", "foreign-room", "short"])
async def test_a_wrong_part_of_one_rank_is_named_through_the_gateway(
    running: Plane, kind: str
) -> None:
    for dp in (0, 1):
        await running.fault("prefill", stage="verify", kind=kind, rank=f"dp={dp} tp=2")
    chance = random.Random(kind)
    tokens = [chance.randrange(32, 127) for _ in range(90)]
    status, found, _ = await running.ask("/generate", asked(tokens, 2))
    assert status == 502, found
    error = found["error"]
    assert (error["code"], error["stage"]) == ("transfer_failed", "verify"), error
    assert "prefill tp=2: " in error["message"], error
    room = await running.get(f"/rooms/{error['room']}")
    broken = [stage for stage in room["stages"] if stage["outcome"] == "failed"]
    assert broken[0]["stage"] == "verify" and "tp=2" in broken[0]["detail"], room
    async with running.session.delete(f"{running.engines['prefill'].url}/fault") as answer:
        assert answer.status == 200
    await no_leak(running)


async def no_leak(running: Plane) -> None:
    """Every page is free or used by a prefix cache, and no rank holds anything of a room."""

    async def idle(name: str) -> bool:
        truth = await running.get("/truth", at=running.engines[name].url)
        return not truth["rooms"]["open"] and all(settled(rank) for rank in truth["ranks"])

    for name in ("prefill", "decode"):
        await until(lambda name=name: idle(name), what=f"{name} idle")


def settled(rank: dict[str, Any]) -> bool:
    pages = rank["pages"]
    balanced = pages["free"] + pages["used"] == pages["all"] and pages["quarantined"] == 0
    rooms = ("rooms", "pulls", "fences", "quarantined", "landings")
    held = [shard["transfer"].get(name, 0) for shard in rank["shards"] for name in rooms]
    return balanced and rank["sequences"] == 0 and not any(held)


async def test_a_gateway_pairs_only_sides_that_can_meet_and_says_what_is_in_the_way() -> None:
    async with house() as home:
        prefill = await home.engine(Role.PREFILL, tp=2)
        staged = await home.engine(Role.DECODE, pp=2)
        await home.gateway(*prefill.words, *staged.words)
        refused = await home.generate(range(40, 90))
        assert refused.status == 503
        assert "pp: prefill 1, decode 2, must be equal or 1" in refused.error["message"], refused
        fitting = await home.engine(Role.DECODE, tp=4)
        await home.add(fitting)
        await until(lambda: home.well(fitting.pod))
        for seed in range(4):
            ids = [seed + 40] * 50
            found = await home.generate(ids)
            assert (found.status, found.body["output_ids"]) == (200, alone(ids, 4))

"""Data-parallel ranks: each is a worker of its own, from the events to the room's number."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Any

import pytest
from kit.plane import EngineSeat, Plane, plane
from kit.wait import until

pytestmark = pytest.mark.slow


async def converse(running: Plane, number: int) -> set[int]:
    """Three turns; the prefill ranks that served them."""
    chance = random.Random(number)
    said = f"{number} conversation: " + "hello world " * chance.randrange(4, 20)
    messages: list[dict[str, Any]] = [{"role": "user", "content": said}]
    ranks = set()
    for _ in range(3):
        body = {"model": "tiny", "messages": messages, "max_tokens": 8}
        status, found, headers = await running.ask("/v1/chat/completions", body)
        assert status == 200, found
        room, rank = int(headers["x-kvplane-room"]), headers["x-kvplane-prefill"].endswith("@1")
        assert 0 < room < 2**63 and room % 2 == rank, headers
        cached: dict[str, Any] = {}

        async def told(room: int = room, cached: dict[str, Any] = cached) -> bool:
            """Prefill's own answer, which tells it, may end after decode's."""
            cached.update((await running.get(f"/rooms/{room}"))["cached_tokens"])
            return cached["actual"] is not None

        await until(told, 10, "prefill's count of cached tokens")
        assert cached["predicted"] == cached["actual"], (number, cached, headers)
        ranks.add(int(rank))
        await until(partial(held, running, headers, messages), 10, "the prompt in the index")
        messages += [found["choices"][0]["message"], {"role": "user", "content": "go on " * 5}]
    return ranks


async def held(running: Plane, headers: dict[str, str], messages: list[dict[str, Any]]) -> bool:
    """Does the index show the whole blocks of this prompt on the prefill that computed it?"""
    asked = {"model": "tiny", "messages": messages}
    _, found, _ = await running.ask("/index/rank", asked)
    depths = {one["worker"]: one["depth_blocks"] for one in found["workers"]}
    return depths[headers["x-kvplane-prefill"]] == found["blocks"]


@pytest.mark.parametrize("form", ["sglang"])  # vllm: the same road, see test_index_truth
async def test_what_each_rank_holds_is_foretold_and_rooms_lead_to_it(form: str) -> None:
    flags = ["--dp", "2", "--event-form", form]
    seats = [EngineSeat("prefill", "prefill", flags), EngineSeat("decode", "decode", flags)]
    async with plane(seats, workers=4) as running:
        served = await asyncio.gather(*(converse(running, number) for number in range(5)))
        truth = await running.get("/truth", at=running.engines["prefill"].url)
    assert set().union(*served) == {0, 1}, "both ranks took part"
    assert all(rank["pages"]["used"] for rank in truth["ranks"]), truth["ranks"]

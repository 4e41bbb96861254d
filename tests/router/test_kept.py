"""Kept: ten thousand attempts are remembered, and cost no look for garbage and little memory."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import pytest
from kit.instant import ask, body, instant

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
            objects, before = await many()
            more, after = await many()
        finally:
            tracemalloc.stop()
        assert len(house.ledger) == 3 * MANY
        assert more - objects < MANY / 4, "none of each"
        assert (after - before) / MANY < MOST_BYTES

"""Who leaves while it waits for pages, at whatever moment, keeps none, and all of it is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvplane.engine.cache import Lease
from kvplane.engine.errors import Overloaded
from kvplane.engine.unit import Unit

Start = Callable[..., Awaitable[Any]]


async def turns(count: int) -> None:
    """Let everybody else go on so often."""
    for _ in range(count):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def meanwhile(last: BaseException | None = None) -> AsyncIterator[None]:
    """Takes a while to end, as telling a prefill does."""
    try:
        yield
    finally:
        await turns(3)
        if last is not None:
            raise last


async def leaves(unit: Unit, taken: Lease, waiting: asyncio.Task[Lease], moment: int) -> None:
    """So many turns after pages came back for it; where it got them all the same, it gives them."""
    await turns(2)
    unit.give_back(taken)
    await turns(moment)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        unit.give_back(await waiting)


@pytest.mark.parametrize("moment", range(9))
@pytest.mark.parametrize("held", [meanwhile, contextlib.nullcontext])
async def test_who_leaves_around_its_turn_keeps_no_page(start: Start, moment: int, held) -> None:
    both = await start(blocks=8)
    unit = both.engine.units[0]
    taken = await unit.lease([1] * 100, 28)
    waiting = asyncio.create_task(unit.lease([2] * 100, 0, "", held()))
    await leaves(unit, taken, waiting, moment)
    assert (unit.cache.pages().free, unit.cache.at_work) == (8, 0)


async def test_pages_come_back_where_what_ran_meanwhile_fails(start: Start) -> None:
    unit = (await start(blocks=8)).engine.units[0]
    taken = await unit.lease([1] * 100, 28)
    waiting = asyncio.create_task(unit.lease([2] * 100, 0, "", meanwhile(Overloaded("no more"))))
    await turns(2)
    unit.give_back(taken)
    with pytest.raises(Overloaded):
        await waiting
    assert (unit.cache.pages().free, unit.cache.at_work) == (8, 0)


@pytest.mark.parametrize("moment", range(3))
async def test_blocks_that_made_room_for_who_left_are_told_as_gone(
    start: Start, moment: int
) -> None:
    both = await start(blocks=8)
    unit = both.engine.units[0]
    await both.tokens(input_ids=[7] * 64, sampling_params={"max_new_tokens": 1})
    taken = await unit.lease([1] * 60, 4)
    waiting = asyncio.create_task(unit.lease([2] * 100, 0))
    await leaves(unit, taken, waiting, moment)
    assert unit.cache.evicted_blocks == 3
    assert unit.cache.drain() == [], "evicted, and nobody was told"

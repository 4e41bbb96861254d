"""Busy streams wake together, after at most one beat."""

from __future__ import annotations

import asyncio

from kvplane.events.pulse import Pulse
from kvplane.runtime import cancel


async def test_who_comes_while_one_waits_goes_on_with_it() -> None:
    pulse, order = Pulse(0.05), []
    loop = asyncio.get_running_loop()
    begun = loop.time()

    async def one(name: int) -> None:
        await pulse.wait()
        order.append((name, loop.time() - begun))

    early = asyncio.create_task(one(0))
    await asyncio.sleep(0)
    await asyncio.gather(early, *(one(name) for name in range(1, 5)))
    assert [name for name, _ in order] == [0, 1, 2, 3, 4]
    assert order[0][1] > 0.045 and order[-1][1] - order[0][1] < 0.04


async def test_one_that_gives_up_takes_nobody_along() -> None:
    pulse = Pulse(0.01)
    gone, stays = (asyncio.create_task(pulse.wait()) for _ in range(2))
    await asyncio.sleep(0)
    await cancel(gone)
    async with asyncio.timeout(5):
        await stays
        await pulse.wait()  # and another begins after it


async def test_no_time_is_one_turn_of_the_loop() -> None:
    async with asyncio.timeout(5):
        await Pulse(0.0).wait()

"""Busy streams wake together, beats are a while apart; the first after a silence waits for none."""

from __future__ import annotations

import asyncio

from kvplane.events.pulse import Pulse
from kvplane.runtime import cancel

EVERY_S = 0.05


async def beat(pulse: Pulse) -> None:
    """Until the next one."""
    called = asyncio.get_running_loop().create_future()
    pulse.call(lambda: called.done() or called.set_result(None))
    await called


async def waited(pulse: Pulse) -> float:
    """Seconds until the next beat."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with asyncio.timeout(5):
        await beat(pulse)
    return loop.time() - begun


async def test_the_first_waits_for_nothing_and_the_next_for_the_rest_of_the_beat() -> None:
    pulse = Pulse(EVERY_S)
    assert await waited(pulse) < EVERY_S / 2
    assert await waited(pulse) > EVERY_S * 0.9
    await asyncio.sleep(EVERY_S * 0.6)  # work counts as waiting
    assert await waited(pulse) < EVERY_S * 0.9
    await asyncio.sleep(EVERY_S * 1.1)
    assert await waited(pulse) < EVERY_S / 2


async def test_who_comes_while_others_wait_goes_on_with_them() -> None:
    pulse, woken = Pulse(EVERY_S), list[float]()
    await beat(pulse)

    async def one() -> None:
        await beat(pulse)
        woken.append(asyncio.get_running_loop().time())

    early = asyncio.create_task(one())
    await asyncio.sleep(EVERY_S / 5)
    await asyncio.gather(early, *(one() for _ in range(5)))
    assert len(woken) == 6 and woken[-1] - woken[0] < EVERY_S / 2


async def test_one_that_gives_up_takes_nobody_along() -> None:
    pulse = Pulse(EVERY_S)
    await beat(pulse)
    gone, stays = (asyncio.create_task(waited(pulse)) for _ in range(2))
    await asyncio.sleep(0)
    await cancel(gone)
    assert await stays > 0
    await waited(pulse)  # and another begins after it


async def test_no_time_is_one_turn_of_the_loop() -> None:
    pulse = Pulse(0.0)
    for _ in range(3):
        assert await waited(pulse) < EVERY_S

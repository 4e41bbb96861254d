"""Busy streams wake together, beats are a while apart; the first after a silence waits for none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvplane.events import pulse as pulses
from kvplane.events.pulse import Pulse
from kvplane.runtime import cancel

EVERY_S = 1.0


class Loop:
    """Of a test alone: its time moves when the test says so, and timers are called at theirs."""

    def __init__(self) -> None:
        self._now, self.timers = 100.0, list[tuple[float, Callable[[], None]]]()

    def time(self) -> float:
        return self._now

    def call_later(self, delay_s: float, back: Callable[[], None]) -> None:
        self.timers.append((self._now + delay_s, back))

    def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while due := [one for one in self.timers if one[0] <= end]:
            self.timers.remove(one := min(due, key=lambda timer: timer[0]))
            self._now, back = max(self._now, one[0]), one[1]
            back()
        self._now = end


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    monkeypatch.setattr(pulses, "asyncio", SimpleNamespace(get_running_loop=lambda: made))
    return made


def called(pulse: Pulse, loop: Loop) -> list[float]:
    """Asks for the next beat; when it came, once it has."""
    found: list[float] = []
    pulse.call(lambda: found.append(loop.time()))
    return found


def waited_s(pulse: Pulse, loop: Loop) -> float:
    """Until the next beat, and no longer."""
    begun, found = loop.time(), called(pulse, loop)
    assert not found, "not before the loop's next turn"
    loop.advance(0)
    while not found and loop.timers:
        loop.advance(EVERY_S / 4)
    return found[0] - begun


def test_the_first_waits_for_nothing_and_the_next_for_the_rest_of_the_beat(loop: Loop) -> None:
    pulse = Pulse(EVERY_S)
    assert waited_s(pulse, loop) == 0
    assert waited_s(pulse, loop) == EVERY_S
    loop.advance(EVERY_S * 0.75)  # work counts as waiting
    assert waited_s(pulse, loop) == EVERY_S * 0.25
    loop.advance(EVERY_S * 1.5)
    assert waited_s(pulse, loop) == 0


def test_who_comes_while_others_wait_goes_on_with_them(loop: Loop) -> None:
    pulse = Pulse(EVERY_S)
    assert waited_s(pulse, loop) == 0
    begun, woken = loop.time(), [called(pulse, loop)]
    loop.advance(EVERY_S / 4)
    woken += [called(pulse, loop) for _ in range(5)]
    assert len(loop.timers) == 1
    loop.advance(EVERY_S)
    assert woken == [[begun + EVERY_S]] * 6


async def beat(pulse: Pulse) -> None:
    """Until the next one."""
    heard = asyncio.get_running_loop().create_future()
    pulse.call(lambda: heard.done() or heard.set_result(None))
    await heard


async def test_one_that_gives_up_takes_nobody_along() -> None:
    pulse = Pulse(0.01)
    await beat(pulse)
    gone, stays = (asyncio.create_task(beat(pulse)) for _ in range(2))
    await asyncio.sleep(0)
    await cancel(gone)
    await stays
    await beat(pulse)  # and another begins after it


def test_no_time_is_one_turn_of_the_loop(loop: Loop) -> None:
    pulse = Pulse(0.0)
    for _ in range(3):
        assert waited_s(pulse, loop) == 0

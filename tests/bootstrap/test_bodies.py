"""Bodies: whole, bounded in size, in time and all together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from kvplane.bootstrap import DirectorySettings
from kvplane.bootstrap.bodies import Bodies, Receive, Unread, headers_of


def sending(parts: Iterable[bytes], end: bool = True) -> Receive:
    """A client that sends these, and then nothing more."""
    messages: list[Any] = [
        {"type": "http.request", "body": part, "more_body": True} for part in parts
    ]
    if end:
        messages[-1]["more_body"] = False
    waiting = iter(messages)

    async def receive() -> Any:
        found = next(waiting, None)
        if found is None:
            await asyncio.Event().wait()
        return found

    return receive


async def status(bodies: Bodies, receive: Receive, skip: bool = False) -> tuple[str, int]:
    with pytest.raises(Unread) as caught:
        await (bodies.skip(receive) if skip else bodies.read(receive))
    assert caught.value.answer.headers == (("connection", "close"),)
    return caught.value.reason, caught.value.answer.status


async def test_a_body_comes_in_any_number_of_parts() -> None:
    bodies = Bodies(DirectorySettings())
    assert await bodies.read(sending([b"ab", b"", b"c"])) == b"abc"
    assert await bodies.read(sending([b""])) == b""
    await bodies.skip(sending([b"ab", b"c"]))
    assert bodies.held == 0


@pytest.mark.parametrize("skip", [False, True])
async def test_a_body_that_is_long_late_or_cut_is_given_up(skip: bool) -> None:
    bodies = Bodies(DirectorySettings(most_body_bytes=10, body_s=0.02))
    assert await status(bodies, sending([b"x" * 6, b"x" * 6]), skip) == ("long", 413)
    assert await status(bodies, sending([b"x"], end=False), skip) == ("late", 408)

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    assert await status(bodies, gone, skip) == ("cut", 400)
    assert bodies.held == 0


async def test_all_that_arrive_together_hold_a_bounded_number_of_bytes() -> None:
    bodies = Bodies(DirectorySettings(most_bodies_bytes=100))
    slow = [asyncio.create_task(bodies.read(sending([b"x" * 30], end=False))) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bodies.held == 90
    assert await status(bodies, sending([b"x" * 30])) == ("busy", 429)
    await bodies.skip(sending([b"x" * 30]))  # one that is not kept needs no room
    assert await bodies.read(sending([b"x" * 10])) == b"x" * 10
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert bodies.held == 0


def test_all_values_of_a_header_are_found() -> None:
    scope = {"headers": [(b"prefer", b"a"), (b"x", b"y"), (b"prefer", b"\xff")]}
    assert headers_of(scope, "prefer") == ["a", "ÿ"]
    assert headers_of(scope, "none") == []

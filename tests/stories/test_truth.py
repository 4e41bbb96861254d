"""The truth of the KV: two processes answer as one, and no wrong page is ever consumed."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
import pytest_asyncio
from kit.plane import EngineSeat, Plane, plane
from kit.wait import until

QUIET = ["--retry-max-retries", "0", "--cb-failure-threshold", "100000"]  # every failure is shown
TRIES = 100  # faults injected, all kinds of page faults together
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Plane]:
    """One prefill and one decode behind a gateway without retries, and a lone `both` engine."""
    seats = [EngineSeat("prefill", "prefill"), EngineSeat("decode", "decode")]
    lone = EngineSeat("lone", "both")
    child = lone.child()
    try:
        await child.start()
        async with plane(seats, QUIET) as running:
            running.engines["lone"] = lone
            yield running
    finally:
        await child.stop()


def prompts() -> list[list[int]]:
    """30 prompts of 10 to 1500 tokens, some sharing a beginning, none the same."""
    chance = random.Random(7)
    lengths = [10, 15, 16, 17, 31, 32, 33, 100, 160, 161, 500, 999, 1000, 1499, 1500]
    lengths += [chance.randrange(10, 1500) for _ in range(15)]
    stem = [chance.randrange(32, 127) for _ in range(1500)]
    found = []
    for number, length in enumerate(lengths):
        tokens = [chance.randrange(32, 127) for _ in range(length)]
        if number % 3 == 0:
            tokens[: length // 2] = stem[: length // 2]
        found.append(tokens)
    return found


def asked(tokens: Any, stream: bool = False) -> dict[str, Any]:
    sampling = {"max_new_tokens": 12, "ignore_eos": True}
    return {"input_ids": tokens, "sampling_params": sampling, "stream": stream}


async def streamed(running: Plane, body: dict[str, Any], at: str | None = None) -> list[int]:
    """Output ids of a streamed /generate: the last event holds them all."""
    last: dict[str, Any] = {}
    async with running.session.post(f"{at or running.url}/generate", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                last = json.loads(line[6:])
    assert "error" not in last, last
    ids: list[int] = last["output_ids"]
    return ids


async def test_thirty_prompts_give_the_tokens_of_one_engine(whole: Plane) -> None:
    lone = whole.engines["lone"].url
    for tokens in prompts():
        status, one, _ = await whole.ask("/generate", asked(tokens), at=lone)
        assert status == 200, one
        status, two, _ = await whole.ask("/generate", asked(tokens))
        assert status == 200, two
        assert two["output_ids"] == one["output_ids"] and len(one["output_ids"]) == 12
        assert await streamed(whole, asked(tokens, stream=True)) == one["output_ids"]


async def test_a_batch_gives_the_tokens_of_one_engine_each_in_its_own_room(whole: Plane) -> None:
    lone = whole.engines["lone"].url
    for first in range(0, 30, 3):
        batch = prompts()[first : first + 3]
        _, one, _ = await whole.ask("/generate", asked(batch), at=lone)
        status, two, headers = await whole.ask("/generate", asked(batch))
        assert status == 200, two
        assert [item["output_ids"] for item in two] == [item["output_ids"] for item in one]
        assert len(set(headers["x-kvplane-room"].split(","))) == 3


@pytest.mark.parametrize("kind", ["flip-byte", "swap-pages", "foreign-room"])
async def test_no_wrong_page_is_consumed_in_a_hundred_tries(whole: Plane, kind: str) -> None:
    tries = TRIES // 3 + 1
    await whole.fault("prefill", stage="verify", kind=kind, count=tries)
    chance = random.Random(kind)
    for number in range(tries):
        tokens = [chance.randrange(32, 127) for _ in range(chance.randrange(40, 200))]
        status, found, _ = await whole.ask("/generate", asked(tokens))
        assert status >= 500, (number, found)
        assert found["error"]["code"] == "transfer_failed", found
        assert found["error"]["stage"] == "verify", found
        assert int(found["error"]["room"]) > 0
    await no_leak(whole)
    status, found, _ = await whole.ask("/generate", asked(list(range(40, 90))))
    assert status == 200, found  # the fault is spent: the pair works again


@pytest.mark.parametrize("kind", ["short", "stale-generation", "error", "reset"])
async def test_every_other_fault_of_the_transfer_is_a_named_failure(
    whole: Plane, kind: str
) -> None:
    await whole.fault("prefill", stage="verify", kind=kind, count=3)
    for number in range(3):
        tokens = [33 + number] * 50
        status, found, _ = await whole.ask("/generate", asked(tokens))
        assert status >= 500, found
        assert found["error"]["stage"] in ("connect", "verify"), found
        assert found["error"]["message"]
    await no_leak(whole)


async def no_leak(running: Plane) -> None:
    """Every page is free, used by the prefix cache, or held for a fence; no room stays open."""
    for name in ("prefill", "decode"):
        await until(partial(idle, running, name), what=f"nothing held at {name}")


async def idle(running: Plane, name: str) -> bool:
    truth = await running.get("/truth", at=running.engines[name].url)
    (rank,) = truth["ranks"]
    pages = rank["pages"]
    whole = pages["free"] + pages["used"] == pages["all"] and not pages["quarantined"]
    return whole and not truth["rooms"]["open"] and rank["sequences"] == 0


async def test_the_room_tells_its_stages_and_who_saw_them(whole: Plane) -> None:
    _, _, headers = await whole.ask("/generate", asked([60] * 70))
    found = await whole.get(f"/rooms/{headers['x-kvplane-room']}")
    stages = {stage["stage"]: stage for stage in found["stages"]}
    for name in ("register", "resolve-topology", "resolve-rank", "connect", "verify", "consume"):
        assert stages[name]["outcome"] == "ok", found
        assert stages[name]["duration_s"] >= 0 and stages[name]["by"], found


async def test_without_checksums_wrong_pages_change_the_tokens() -> None:
    seats = [
        EngineSeat("prefill", "prefill", ["--no-checksums"]),
        EngineSeat("decode", "decode", ["--no-checksums"]),
        EngineSeat("lone", "both"),
    ]
    chance = random.Random(5)
    async with plane(seats[:2], QUIET) as running:
        lone = seats[2].child()
        try:
            await lone.start()
            for kind in ("flip-byte", "swap-pages"):
                await running.fault("prefill", stage="verify", kind=kind, count=10)
                for _ in range(10):
                    # Whole pages: behind the end of a prompt a page holds nothing to be wrong.
                    tokens = [chance.randrange(32, 127) for _ in range(96)]
                    status, two, _ = await running.ask("/generate", asked(tokens))
                    assert status == 200, two
                    _, one, _ = await running.ask("/generate", asked(tokens), at=seats[2].url)
                    assert two["output_ids"] != one["output_ids"], (kind, tokens)
        finally:
            await lone.stop()

"""Stuck: in which stage is a request, since when, and whom does it wait for? (FR-OP-01)

Two real engines in the test's process; each stage is broken, and held up, one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from kit.house import House, Resident, house
from kit.wait import until

from kvplane.vocabulary import MEETING, Role

pytestmark = pytest.mark.asyncio(loop_scope="module")
NO_RETRY = ("--retry-max-retries", "0", "--cb-failure-threshold", "1000")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[tuple[House, Resident, Resident]]:
    async with house() as home:
        prefill, decode = await home.pair()
        await home.gateway(*prefill.words, *decode.words, *NO_RETRY)
        yield home, prefill, decode


Plane = tuple[House, Resident, Resident]
FAULTS = {  # stage -> who is broken there, and how
    "register": (Role.PREFILL, "error"),
    "resolve-topology": (Role.DECODE, "error"),
    "resolve-rank": (Role.DECODE, "error"),
    "connect": (Role.PREFILL, "error"),
    "verify": (Role.PREFILL, "flip-byte"),
    "consume": (Role.DECODE, "error"),
}


def named(number: int) -> dict[str, str]:
    return {"x-request-id": f"stuck-{number}"}


async def asked(plane: Plane, number: int) -> dict[str, Any]:
    """One request, whatever becomes of it, and what is remembered of it."""
    home = plane[0]
    await home.generate([40 + number] * 50, **named(number))
    told = await home.get(f"/requests/stuck-{number}")
    attempt: dict[str, Any] = told["attempts"][-1]
    return attempt


def stages(attempt: dict[str, Any]) -> list[dict[str, Any]]:
    return [stage for each in attempt["stages"].values() for stage in each]


def reason(attempt: dict[str, Any]) -> tuple[str, str]:
    """The stage that failed first, and why."""
    first = next(stage for stage in stages(attempt) if stage["outcome"] == "failed")
    return first["stage"], first["detail"]


async def test_ten_ways_to_fail_have_ten_reasons_each_with_its_stage(plane: Plane) -> None:
    home, prefill, decode = plane
    found: dict[str, str] = {}
    for number, (stage, (role, kind)) in enumerate(FAULTS.items()):
        broken = prefill if role is Role.PREFILL else decode
        await home.fault(broken, stage=stage, kind=kind, count=1)
        attempt = await asked(plane, number)
        where, found[stage] = reason(attempt)
        assert where == stage, attempt
        whole(attempt)
    found["policy-input"] = await no_policy_input(plane, 7)
    assert found["policy-input"].startswith("no tokens")
    await drained(plane, True)
    where, found["availability"] = reason(await asked(plane, 8))
    assert where == "availability" and "draining" in found["availability"]
    await drained(plane, False)
    async with home.session.delete(f"{home.url}/workers/{decode.pod}"):
        pass
    await until(lambda: gone(home, decode.pod))
    where, found["worker-pool"] = reason(await asked(plane, 9))
    assert (where, found["worker-pool"]) == ("worker-pool", "no decode worker is registered")
    await home.add(decode)
    await until(lambda: home.well(decode.pod))
    assert len(set(found.values())) == len(found) == 9
    async with home.session.get(f"{home.url}/metrics") as answer:
        page = await answer.text()
    for stage in (*found, "pair", "first-byte"):
        assert 'kvplane_router_stage_seconds_count{outcome="' in page
        assert f'stage="{stage}"' in page, stage


async def test_a_tenth_reason_is_that_further_attempts_are_used_up() -> None:
    async with house() as home:
        prefill, decode = await home.pair()
        await home.gateway(*prefill.words, *decode.words, "--retry-max-retries", "1")
        await home.fault(prefill, stage="verify", kind="flip-byte", count=2)
        assert (await home.generate([40] * 50, **named(0))).status == 502
        told = await home.get("/requests/stuck-0")
        assert [one["stopped"] for one in told["attempts"]] == [None, "no attempts left"]
        assert [one["error"]["stage"] for one in told["attempts"]] == ["verify", "verify"]


def whole(attempt: dict[str, Any]) -> None:
    """Every stage has its begin and its end, and the gateway's add up."""
    seen = [stage for stage in stages(attempt) if stage["outcome"] != "not observed"]
    assert all(stage["begin_s"] >= 0 and stage["duration_s"] >= 0 for stage in seen)
    own = [stage for stage in seen if stage["by"] == "gateway"]
    assert sum(stage["duration_s"] for stage in own) == pytest.approx(attempt["duration_s"])


async def no_policy_input(plane: Plane, number: int) -> str:
    """A prompt of more than text: the policy has no tokens to go by."""
    home = plane[0]
    parts = [{"type": "image_url", "image_url": {"url": "x"}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
    await home.post("/v1/chat/completions", body, **named(number))
    told = await home.get(f"/requests/stuck-{number}")
    first = next(s for s in stages(told["attempts"][0]) if s["stage"] == "policy-input")
    return str(first["detail"])


async def drained(plane: Plane, draining: bool) -> None:
    home, prefill, _ = plane
    url = f"{home.url}/workers/{prefill.pod}"
    async with home.session.put(url, json={"draining": draining}) as answer:
        assert answer.status == 202


async def gone(home: House, pod: str) -> bool:
    return not await home.worker(pod)


HELD = {  # stage that hangs -> who hangs there, and the last stage that anybody told of
    "resolve-topology": (Role.DECODE, "register"),
    "resolve-rank": (Role.DECODE, "resolve-topology"),
    "verify": (Role.PREFILL, "connect"),
    "consume": (Role.DECODE, "verify"),
}


@pytest.mark.parametrize("stage", HELD)
async def test_one_question_tells_where_a_request_is_since_when_and_with_whom(
    plane: Plane, stage: str
) -> None:
    home, prefill, decode = plane
    role, last = HELD[stage]
    number, broken = 100 + list(HELD).index(stage), prefill if role is Role.PREFILL else decode
    await home.fault(broken, stage=stage, kind="hang", count=1)
    work = asyncio.create_task(home.generate([number - 20] * 60, **named(number)))

    async def current() -> Any:
        async with home.session.get(f"{home.url}/requests/stuck-{number}") as answer:
            told = await answer.json() if answer.status == 200 else {}
        open_now = [one["current"] for one in told.get("attempts", ()) if one["current"]]
        return open_now[0] if open_now and open_now[0]["last_told"] == last else None

    try:
        found = await until(current, what=f"held up at {stage}, after {last}")
        assert found["stage"] == "first-byte" and found["for_s"] > 0
        assert found["waits_for"] == {"prefill": prefill.pod, "decode": decode.pod}
        rooms = (await home.get("/rooms?limit=1"))["rooms"]
        assert rooms[0]["outcome"] == "open"
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await home.unbroken(broken)  # it may have been given up on the way there
    told = [one.value for one in MEETING]
    assert told.index(last) < told.index(stage)


@pytest.mark.parametrize(
    ("flag", "stream"), [("--first-byte-timeout-secs", True), ("--request-timeout-secs", False)]
)
async def test_a_limit_of_the_gateways_own_ends_what_waits_for_an_engine_that_never_moves(
    flag: str, stream: bool
) -> None:
    """FR-OP-03: the engine enforces nothing, and its health is green."""
    async with house() as home:
        prefill, decode = await home.pair()
        await home.gateway(*prefill.words, *decode.words, "--retry-max-retries", "0", flag, "0.6")
        await home.fault(prefill, stage="verify", kind="hang", count=3)
        body = {"model": "tiny", "prompt": "who waits here for how long " * 4, "stream": stream}
        ended = await asyncio.gather(*(home.post("/v1/completions", body) for _ in range(3)))
        assert [(one.status, one.body["error"]["code"]) for one in ended] == [
            (504, "deadline_exceeded")
        ] * 3
        assert (await home.worker(prefill.pod))["is_healthy"]
        short = body | {"stream": False, "max_tokens": 1}

        async def served() -> bool:  # within that limit, which is short for a busy machine
            return (await home.post("/v1/completions", short)).status == 200

        await until(served, what="and the next one is served")

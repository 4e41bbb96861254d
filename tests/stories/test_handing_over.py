"""Handing over: real engines behind a gateway; what comes of log-probabilities, names and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from kit.house import House, Resident, house
from kit.wait import until

from kvplane.vocabulary import Role

pytestmark = pytest.mark.asyncio(loop_scope="module")
ONCE = ("--retry-max-retries", "0", "--cb-failure-threshold", "1000")
WANTS = {
    "input_ids": list(range(40, 80)),
    "sampling_params": {"max_new_tokens": 8, "ignore_eos": True},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 2,
}
TOLD = [
    f"{part}_{kind}_logprobs" for part in ("input", "output") for kind in ("token", "top")
]  # both sides'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[tuple[House, Resident, Resident]]:
    async with house() as home:
        prefill, decode = await home.pair()
        await home.gateway(*prefill.words, *decode.words, *ONCE)
        yield home, prefill, decode


Plane = tuple[House, Resident, Resident]


def quiet(plane: Plane) -> bool:
    """Nothing is under way in either engine."""
    return not any(one.engine.open_rooms() or one.engine._flows for one in plane[1:])


async def alone(home: House) -> dict[str, Any]:
    """What one engine tells that does both."""
    both = await home.engine(Role.BOTH)
    found: dict[str, Any] = (await home.post("/generate", WANTS, at=both.url)).body
    await home.leave(both)
    return found


async def test_two_engines_tell_the_log_probabilities_that_one_would(plane: Plane) -> None:
    """FR-AP-05: those of the prompt once, those of the answer once, in their fields."""
    home = plane[0]
    want = (await alone(home))["meta_info"]
    got = (await home.post("/generate", WANTS)).body["meta_info"]
    assert {name: len(got[name]) for name in TOLD} == {name: len(want[name]) for name in TOLD}
    assert {name: got[name] for name in TOLD} == {name: want[name] for name in TOLD}


async def metric(home: House, line: str) -> float:
    async with home.session.get(f"{home.url}/metrics") as got:
        page = await got.text()
    values = [row.rpartition(" ")[2] for row in page.splitlines() if row.startswith(line)]
    return float(values[0]) if values else 0.0


async def test_a_decode_whose_prefill_fails_is_ended_by_name_and_keeps_nothing(
    plane: Plane,
) -> None:
    """FR-RT-01."""
    home, prefill, _ = plane
    told = 'kvplane_router_aborts_total{outcome="told",side="decode"}'
    before = await metric(home, told)
    await home.fault(prefill, stage="register", kind="error", count=1)
    reply = await home.generate([9] * 50)
    assert (reply.status, reply.error["code"]) == (502, "transfer_failed")
    await until(lambda: quiet(plane))

    async def heard() -> bool:
        return await metric(home, told) == before + 1

    await until(heard)
    assert (await home.generate([9] * 50)).status == 200


@pytest.mark.parametrize("rid", [None, "a-name-of-the-client"])
async def test_engines_of_a_client_that_left_keep_nothing(plane: Plane, rid: str | None) -> None:
    home, prefill, _ = plane
    await home.fault(prefill, stage="register", kind="hang", count=1)
    body = WANTS | ({"rid": rid} if rid else {})
    task = asyncio.create_task(home.post("/generate", body))
    await until(lambda: not quiet(plane))
    flows = [flow.call.rid for one in plane[1:] for flow in one.engine._flows]
    assert rid is None or set(flows) <= {rid}
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError):
        await task
    await until(lambda: quiet(plane))
    await home.session.delete(f"{prefill.url}/fault")
    assert (await home.generate([8] * 50)).status == 200

"""A rank directory that does not answer costs its time once, however many wait for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from kit.gatehouse import worker
from kit.peer import Call, answer, peer

from kvplane.router import prefill_ids
from kvplane.router.blame import LegFailed
from kvplane.router.fleet import Fleet
from kvplane.router.legs import Legs
from kvplane.router.prefill_ids import PrefillIds
from kvplane.router.target import Target
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Pod, Role, Worker

TABLE = b'{"0": {"engine_id": "a"}}'
MANY = 20


def target(port: int) -> Target:
    """The only prefill, whose directory answers there."""
    fleet = Fleet()
    up = worker("p1", "http://127.0.0.1:1", Role.PREFILL, engine="vllm")
    fleet.up(replace(up, bootstrap_host="127.0.0.1", bootstrap_port=port))
    found = fleet.target(Worker(Pod("p1")))
    assert found is not None
    return found


async def heard(ids: PrefillIds, prefill: Target) -> str:
    try:
        return await ids.of(prefill)
    except LegFailed as failed:
        return str(failed.cause)


@pytest.mark.parametrize(
    ("hangs", "why"), [(True, "did not answer within 0.2 s"), (False, "answered 500")]
)
async def test_whoever_waits_meanwhile_hears_what_one_heard(
    monkeypatch: pytest.MonkeyPatch, hangs: bool, why: str
) -> None:
    monkeypatch.setattr(prefill_ids, "ASK_S", 0.2)
    well = False

    async def script(call: Call) -> None:
        while await call.request():
            if well:
                await call.send(answer(TABLE))
            elif hangs:
                await call.closed()
            else:
                await asyncio.sleep(0.05)
                await call.send(answer(b"{}", 500))

    async with peer(script) as directory:
        legs, prefill = Legs(), target(directory.port)
        ids = PrefillIds(legs, SystemClock())
        async with asyncio.timeout(0.2 * MANY / 4):
            told = await asyncio.gather(*(heard(ids, prefill) for _ in range(MANY)))
        assert all(why in one for one in told) and len(set(told)) == 1
        assert len(directory.requests) == 1
        well = True  # and whoever comes later asks anew
        assert await heard(ids, prefill) == "a"
        await legs.stop()

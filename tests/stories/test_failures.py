"""Failures: what a client hears when engines fail, and that nobody else pays for it.

Two real prefills and two real decodes. What is measured here is printed by `pytest -s`; the limits
asserted are ten times as long, for machines that are busy.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from kit.house import House, Resident, house
from kit.plane import EngineSeat, together
from kit.wait import until

from kvplane.engine import Engine
from kvplane.vocabulary import Role

PROMPT = list(range(40, 90))
NO_RETRY = ("--retry-max-retries", "0")
SPREAD = ("--policy", "round_robin", "--decode-policy", "round_robin")
BUSIER = 10  # than the machine the figures are of


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as built:
        yield built


class Aborts:
    """Which names each engine was told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: Counter[str | None] = Counter()
        own = Engine.abort

        def abort(engine: Engine, rid: str | None) -> int:
            if engine.settings.role is Role.DECODE:
                self.told[rid] += 1
            return own(engine, rid)

        monkeypatch.setattr(Engine, "abort", abort)


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> Aborts:
    return Aborts(monkeypatch)


async def four(home: House, *words: str) -> tuple[list[Resident], list[Resident]]:
    """Two prefills, two decodes and a gateway over them."""
    prefills = [await home.engine(Role.PREFILL) for _ in range(2)]
    decodes = [await home.engine(Role.DECODE) for _ in range(2)]
    told = [word for one in (*prefills, *decodes) for word in one.words]
    await home.gateway(*told, *words)
    await until(lambda: home.all_well(*(one.pod for one in (*prefills, *decodes))))
    return prefills, decodes


async def circuits(home: House) -> dict[str, str]:
    """Those that are not closed, by worker."""
    async with home.session.get(f"{home.url}/metrics") as got:
        lines = (await got.text()).splitlines()
    marks = [line for line in lines if line.startswith("kvplane_router_circuit_state{")]
    found = {}
    for line in marks:
        labels, _, value = line.partition("{")[2].rpartition("} ")
        state, worker = (part.partition("=")[2].strip('"') for part in labels.split(","))
        if float(value) and state != "closed":
            found[worker] = state
    return found


async def gauge(home: House, name: str) -> float:
    async with home.session.get(f"{home.url}/metrics") as got:
        lines = (await got.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_prefills_that_fail_are_told_at_once_and_each_decode_is_told_once(
    home: House, aborts: Aborts
) -> None:
    """Decodes wait for a cache that never comes: they are not waited for."""
    prefills, _ = await four(home, "--retry-max-retries", "2")
    await asyncio.gather(*(home.generate(PROMPT) for _ in range(4)))  # connections are there
    for prefill in prefills:
        await home.fault(prefill, stage="register", kind="error", count=99)
    found = await home.generate(PROMPT)
    assert (found.status, found.error["stage"]) == (502, "register"), found.body
    backoff = (0.05 + 0.05 * 1.5) * 1.2
    print(f"three attempts: {found.took_s * 1e3:.0f} ms, of them backoff {backoff * 1e3:.0f} ms")
    assert found.took_s < (0.2 + backoff) * BUSIER
    told = await home.get(f"/requests/{found.headers['x-request-id']}")
    rooms = [room for one in told["attempts"] for room in one["rooms"]]
    assert len(rooms) == len(set(rooms)) == 3
    await until(lambda: aborts.told.total() == 3, what="an abort for each attempt")
    assert set(aborts.told) == {f"kvplane-{int(room):016x}" for room in rooms}


async def test_after_twenty_requests_at_a_bad_prefill_no_decode_is_suspected(home: House) -> None:
    prefills, _ = await four(home, *SPREAD, "--retry-max-retries", "2")
    bad = prefills[0]
    await home.fault(bad, stage="register", kind="error", count=999)
    served = Counter([(await home.generate([50 + n] * 40)).status for n in range(20)])
    assert served == {200: 20}, "each by the other prefill"
    assert await circuits(home) in ({}, {bad.pod: "open"})
    for _ in range(20):
        assert (await home.generate(PROMPT)).status == 200
    assert await circuits(home) == {bad.pod: "open"}
    await until(lambda: nothing_open(home))


async def nothing_open(home: House) -> bool:
    names = ("legs_open", "inflight_tokens", "inflight_requests", "rooms_open", "aftermath_open")
    return not any([await gauge(home, f"kvplane_router_{name}") for name in names])


async def test_a_decode_that_is_frozen_or_dies_costs_only_its_own_requests(home: House) -> None:
    """A process of its own: frozen (nothing answers, sockets stay), thawed, then killed in the
    middle of a stream."""
    sick = EngineSeat("sick", "decode")
    prefills = [await home.engine(Role.PREFILL) for _ in range(2)]
    well = await home.engine(Role.DECODE)
    words = [word for one in (*prefills, well) for word in one.words]
    quick = ("--health-check-interval-secs", "0.5", "--request-timeout-secs", "5")
    strict = ("--cb-failure-threshold", "2", "--cb-success-threshold", "1")
    async with together([child := sick.child()]):
        await home.gateway(*words, *sick.gateway_flags(), *SPREAD, *NO_RETRY, *quick, *strict)
        await until(lambda: home.all_well(sick.pod, well.pod))
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        answers = await asyncio.gather(*(home.generate([60 + n] * 40) for n in range(8)))
        for answer in answers:
            there = answer.headers["x-kvplane-decode"] == sick.pod
            assert answer.status == (504 if there else 200), answer
            assert answer.took_s < 5 * BUSIER
        assert Counter(answer.status for answer in answers) == {200: 4, 504: 4}
        await until(lambda: nothing_open(home), what="no leg is held")
        assert await circuits(home) == {sick.pod: "open"}, "no prefill is suspected"
        assert [(await home.generate(PROMPT)).status for _ in range(4)] == [200] * 4
        os.kill(child.pid, signal.SIGCONT)
        await drain(home, well.pod, True)
        await until(partial(served_by, home, sick.pod), what="it serves again")
        assert await circuits(home) == {}
        stream, lines = await reading(home)
        await drain(home, well.pod, False)
        child.kill()
        async with stream:
            lines += [line async for line in stream.content if line.strip()]
        error = json.loads(lines[-1].removeprefix(b"data: "))["error"]
        assert error["code"] == "decode_failed" and error["room"], error
        assert not any(b"[DONE]" in line for line in lines)
        assert (await home.generate(PROMPT)).status in (200, 503)
        await until(lambda: nothing_open(home))


async def drain(home: House, pod: str, draining: bool) -> None:
    """Take one out by hand, or back in."""
    worker = await home.worker(pod)
    url = f"{home.url}/workers/{worker['id']}"
    async with home.session.put(url, json={"draining": draining}) as got:
        assert got.status == 202


async def served_by(home: House, pod: str) -> bool:
    answer = await home.generate(PROMPT)
    return answer.status == 200 and answer.headers["x-kvplane-decode"] == pod


async def reading(home: House) -> tuple[Any, list[bytes]]:
    """A long stream, after its first line."""
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    stream = await home.session.post(f"{home.url}/generate", json=body)
    return stream, [await stream.content.readline()]


async def served(home: House) -> bool:
    return (await home.generate(PROMPT)).status == 200


async def test_without_workers_it_is_said_at_once_and_one_that_is_added_serves_at_once(
    home: House,
) -> None:
    await home.gateway(ready=False)
    answer = await home.generate(PROMPT)
    assert (answer.status, answer.error["code"]) == (503, "no_prefill_available")
    print(f"no workers: {answer.took_s * 1e3:.1f} ms")
    assert answer.took_s < 0.1 * BUSIER
    prefill, decode = await home.pair()
    await home.add(prefill)
    await until(lambda: home.well(prefill.pod))
    refused = await home.generate(PROMPT)
    assert (refused.status, refused.error["code"]) == (503, "no_decode_available")
    begun = time.monotonic()
    await home.add(decode)
    await until(lambda: served(home))
    took_s = time.monotonic() - begun
    print(f"POST /workers to the end of the first answer: {took_s * 1e3:.0f} ms")
    assert took_s < 0.1 * BUSIER

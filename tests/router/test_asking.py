"""Asking: whose engines are asked for their stages, when, and what is shown (aftermath.py)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise

from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer
from kit.wait import until

from kvplane.router.aftermath import Sample
from kvplane.router.settings import RouterSettings

SETTINGS = RouterSettings(tokenizer="builtin")
TELLING = {name: {"engine": "kvplane"} for name in ("p1", "d1")}
TOLD = [
    {"stage": stage, "outcome": "ok", "duration_s": 0.1, "by": "d1", "at": 5.0}
    for stage in ("connect", "verify", "consume")
]


async def engine(call: Call) -> None:
    while request := await call.request():
        asked = request.startswith(b"GET /rooms/")
        await call.send(answer(json.dumps({"stages": TOLD}).encode() if asked else b"{}"))


ENGINES: dict[str, Script] = {"p1": engine, "d1": engine}


def questions(house: Gatehouse) -> int:
    every = (one for peer in house.engines.values() for one in peer.requests)
    return sum(one.startswith(b"GET /rooms/") for one in every)


async def test_of_what_went_well_few_engines_are_asked_until_somebody_wants_to_see_it() -> None:
    async with gatehouse(ENGINES, SETTINGS, facts=TELLING) as house:
        rooms = []
        for number in range(30):
            _, _, headers = await house.post("/generate", {"text": f"{number}"})
            rooms.append(headers["x-kvplane-room"])
        await until(lambda: house.idle)
        asked = questions(house)
        meetings = house.ledger.meetings()
        blank = [one for one in meetings if not one.collected]
        assert blank and asked < 2 * 30, "a few a second"
        room = str(blank[0].rooms[0])
        _, found = await house.get(f"/rooms/{room}")
        told = [stage["stage"] for stage in found["stages"] if stage["by"] == "d1"]
        assert told == ["connect", "verify", "consume"] and found["collected"]
        assert questions(house) == asked + 2
        await house.get(f"/rooms/{room}")
        assert questions(house) == asked + 2, "what is known is not asked for again"


async def test_of_what_failed_the_engines_are_asked_at_once() -> None:
    async def broken(call: Call) -> None:
        while request := await call.request():
            asked = request.startswith(b"GET /rooms/")
            told = [{**TOLD[0], "outcome": "failed", "detail": "no", "by": "d1"}]
            body = json.dumps({"stages": told}).encode() if asked else b"{}"
            await call.send(answer(body, 200 if asked else 502))

    async with gatehouse({"p1": engine, "d1": broken}, SETTINGS, facts=TELLING) as house:
        house.gateway.aftermath._sample = Sample(1e-9)
        house.gateway.aftermath._sample.take(house.ledger.now)
        for number in range(3):
            status, _, _ = await house.post("/generate", {"text": f"{number}"})
            assert status == 502
        await until(lambda: house.idle)
        failed = house.ledger.meetings(failed=True)
        assert failed and all(one.collected and any(one.stages.values()) for one in failed)


async def test_several_who_want_to_see_a_room_ask_its_engines_once() -> None:
    async with gatehouse(ENGINES, SETTINGS, facts=TELLING) as house:
        house.gateway.aftermath._sample.take(float("inf"))  # none of its own accord
        house.gateway.aftermath._sample._next = float("inf")
        _, _, headers = await house.post("/generate", {"text": "x"})
        await until(lambda: house.idle)
        path = f"/rooms/{headers['x-kvplane-room']}"
        found = await asyncio.gather(*(house.get(path) for _ in range(5)))
        assert {shown["collected"] for _, shown in found} == {True}
        assert questions(house) == 2


def test_a_sample_is_even_and_saves_nothing_up() -> None:
    sample = Sample(4.0)

    def moments() -> Iterator[float]:
        for step in range(1000):
            if sample.take(100 + step / 100):
                yield step / 100

    taken = list(moments())
    assert 38 <= len(taken) <= 41
    assert all(after - before >= 0.25 for before, after in pairwise(taken))
    assert sample.take(1000.0) and not sample.take(1000.1)


async def test_the_clients_trace_goes_to_both_engines_and_into_the_evidence() -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with gatehouse(ENGINES, SETTINGS, facts=TELLING) as house:
        sent = {"traceparent": trace, "tracestate": "vendor=1", "x-request-id": "traced"}
        await house.post("/generate", {"text": "x"}, sent)
        for peer in house.engines.values():
            assert b"traceparent: " + trace.encode() in peer.requests[0]
            assert b"tracestate: vendor=1" in peer.requests[0]
        _, found = await house.get("/requests/traced")
        assert found["attempts"][0]["traceparent"] == trace
        await house.post("/generate", {"text": "x"}, {"x-request-id": "bare"})
        _, found = await house.get("/requests/bare")
        assert found["attempts"][0]["traceparent"] is None
        long = {"traceparent": "0" * 5000, "x-request-id": "long"}
        await house.post("/generate", {"text": "x"}, long)
        _, found = await house.get("/requests/long")
        assert found["attempts"][0]["traceparent"] is None

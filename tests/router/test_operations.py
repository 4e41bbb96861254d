"""Operations: what an operator sees of a gateway whose engines misbehave (FR-OP-*).

Scripted engines; the stories with real ones are in tests/stories.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from kit.gatehouse import Gatehouse, gatehouse, worker
from kit.peer import Call, Script, answer
from kit.wait import until

from kvplane.router.breaker import Outcome
from kvplane.router.fleet import Fleet
from kvplane.router.settings import BreakerSettings, RouterSettings
from kvplane.vocabulary import Generation, Pod, Role, Worker
from kvplane.workers import WorkerFault, worker_from_table

KNOWING = RouterSettings(tokenizer="builtin")
LIST = {"object": "list", "data": [{"id": "tiny", "object": "model"}]}


async def serving(call: Call) -> None:
    """An engine that answers everything at once."""
    while request := await call.request():
        models = request.startswith(b"GET /v1/models")
        await call.send(answer(json.dumps(LIST).encode() if models else b"{}"))


PAIR: dict[str, Script] = {"p1": serving, "d1": serving}


# FR-OP-02: green health while nothing can be served


def gone(house: Gatehouse, name: str) -> None:
    house.fleet.down(Pod(name))


def open_circuit(house: Gatehouse, name: str) -> None:
    breaker, now = house.gateway.breakers.of(Worker(Pod(name))), house.gateway.clock.now()
    for _ in range(3):
        if (ticket := breaker.admit(now)) is not None:
            breaker.book(ticket, Outcome.FAULT, now)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ([(gone, "d1")], "no healthy decode"),
        ([(gone, "p1")], "no healthy prefill"),
        ([(open_circuit, "p1"), (open_circuit, "d1")], "no healthy prefill: p1 failed too often"),
    ],
)
async def test_a_gateway_that_lives_and_cannot_serve_is_not_ready_and_says_why(
    broken: list[tuple[Any, str]], reason: str
) -> None:
    settings = RouterSettings(tokenizer="builtin", breaker=BreakerSettings(faults=3, pause_s=60))
    async with gatehouse(PAIR, settings) as house:
        _, found = await house.get("/v1/models")
        assert found["data"] == LIST["data"], "a model that is served is as its engine tells it"
        for breaks, name in broken:
            breaks(house, name)
        assert await house.get("/liveness") == (200, "OK")
        status, found = await house.get("/readiness")
        assert (status, found["status"]) == (503, "not ready")
        assert found["reason"].startswith(reason)
        _, found = await house.get("/v1/models")
        assert found["data"][0]["kvplane"]["ready"] is False
        assert found["data"][0]["kvplane"]["reason"].startswith(reason)


async def test_a_prefill_of_one_model_and_a_decode_of_another_are_not_ready() -> None:
    async with gatehouse(PAIR, KNOWING, facts={"d1": {"model": "other"}}) as house:
        assert (await house.post("/generate", {"text": "x"}))[0] >= 400
        status, found = await house.get("/readiness")
        assert (status, found["status"]) == (503, "not ready")
        assert "model 'tiny': no healthy decode" in found["reason"]
        assert "model 'other': no healthy prefill" in found["reason"]
        house.fleet.up(worker("d2", house.engines["d1"].url, Role.DECODE))
        assert (await house.get("/readiness"))[0] == 200, "one model can be served"


async def test_without_its_store_a_gateway_is_ready_and_degraded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gatehouse(PAIR, KNOWING) as house:
        assert (await house.get("/readiness"))[1]["status"] == "ready"
        monkeypatch.setattr(house.gateway.loop, "_store_down_s", lambda: 4.2)
        status, found = await house.get("/readiness")
        assert (status, found["status"]) == (200, "degraded")
        assert found["reason"] == "the index store does not answer since 4 s"


# FR-OP-03: everything waits though health is green


async def test_a_prefill_that_takes_requests_and_never_moves_is_left_alone_and_named() -> None:
    """Health says well all the time; its clients are given up by the gateway's own deadline."""

    async def stuck(call: Call) -> None:
        while request := await call.request():
            if request.startswith(b"POST"):
                await call.closed()
                return
            page = b'sglang:num_prefill_bootstrap_queue_reqs{tp_rank="0"} 6.0\n'
            await call.send(answer(page if b"/metrics" in request else b"OK"))

    brought: dict[int, asyncio.Event] = defaultdict(asyncio.Event)

    def room(request: bytes) -> int:
        return int(json.loads(request.partition(b"\r\n\r\n")[2])["bootstrap_room"])

    async def prefill(call: Call) -> None:
        while request := await call.request():
            brought[room(request)].set()
            await call.send(answer(b"{}"))

    async def decode(call: Call) -> None:
        while request := await call.request():
            await brought[room(request)].wait()  # as a decode does for its KV
            await call.send(answer(b"{}"))

    async with gatehouse({"p1": stuck, "p2": prefill, "d1": decode}, KNOWING) as house:
        monotonic = house.gateway.clock.now
        asked = [
            asyncio.create_task(house.post("/generate", {"text": f"{number}"}))
            for number in range(12)
        ]
        waits = Worker(Pod("p1"))
        target = house.fleet.target(waits)
        assert target is not None
        await until(lambda: target.inflight_requests >= 3)
        skew = 100.0
        house.gateway.clock.now = lambda: monotonic() + skew  # type: ignore[method-assign]
        _, found = await house.get("/diagnosis")
        (said,) = [one for one in found["findings"] if one["rule"] == "stuck"]
        assert (said["culprit"], said["stage"], said["blocks"]) == ("p1", "first-byte", True)
        assert "its own metrics: num_prefill_bootstrap_queue 6" in said["sentence"]
        _, _, headers = await house.post("/generate", {"text": "after"})
        assert headers["x-kvplane-prefill"] == "p2"
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


# FR-OP-04: an abort storm


async def test_after_a_storm_of_aborts_throughput_is_back_and_retries_stayed_in_budget() -> None:
    """Clients with little patience while prefill is slow; a second here is ten of the field."""
    slow_s = 0.0

    async def prefill(call: Call) -> None:
        while await call.request():
            await asyncio.sleep(slow_s)
            await call.send(answer(b"{}"))

    async with gatehouse({"p1": prefill, "d1": prefill}, KNOWING) as house:

        async def rate(requests: int) -> float:
            began = time.perf_counter()
            found = await asyncio.gather(
                *(house.post("/generate", {"text": f"n {n}"}) for n in range(requests))
            )
            assert {status for status, _, _ in found} == {200}
            return requests / (time.perf_counter() - began)

        async def impatient(session: aiohttp.ClientSession, number: int) -> None:
            timeout = aiohttp.ClientTimeout(total=0.4)
            body = {"text": f"storm {number}"}
            try:
                async with session.post(f"{house.url}/generate", json=body, timeout=timeout):
                    pass
            except TimeoutError:
                pass

        def left() -> int:
            outcomes = Counter(one.outcome for one in house.ledger.meetings(10_000))
            assert outcomes["failed"] == 0
            return outcomes["client_gone"]

        async def back() -> bool:
            return await rate(40) > 0.9 * before

        before = min([await rate(40) for _ in range(3)])
        slow_s = 5.0
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            for _ in range(10):  # a busy machine lets few of them in
                await asyncio.gather(*(impatient(session, number) for number in range(150)))
                if left() >= 100:
                    break
        slow_s = 0.0
        await until(lambda: house.idle, what="all that was left is given back")
        every = (one for engine in house.engines.values() for one in engine.requests)
        seen = sum(one.startswith(b"POST /generate") for one in every)
        assert seen <= 2 * len(house.ledger) * 1.2, "retries stay in their budget"
        assert left() >= 100
        _, found = await house.get("/diagnosis")
        assert "clients-leave" in {one["rule"] for one in found["findings"]}
        assert not found["blocked"]
        await until(back, timeout_s=30, what="nine tenths of what it was")


# FR-OP-05: metric labels from user input


async def test_no_name_that_a_client_makes_up_becomes_a_series() -> None:
    chance = random.Random(5)

    def series(house: Gatehouse) -> int:
        return sum(len(list(family.samples)) for family in house.registry.collect())

    def word() -> str:
        return "".join(chance.choices("abcdefgh/%20-_", k=12))

    async with gatehouse(PAIR, KNOWING) as house:
        for path, body in (
            ("/v1/completions", {"model": "tiny", "prompt": "x", "user": "me"}),
            ("/v1/completions", {"model": "other", "prompt": "x"}),
            ("/v1/nowhere", {}),
        ):
            await house.post(path, body)
        before = series(house)

        async def client(number: int) -> None:
            for _ in range(20):
                name = word()
                body = {"model": name, "prompt": "x", "user": name, "lora_path": name}
                await house.post("/v1/completions", body, {"x-request-id": word()})
                await house.post(f"/v1/{name}", {"model": name})
                wanted = {"model": "tiny", "prompt": "x", "user": name, "cache_salt": name}
                status, _, _ = await house.post("/v1/completions", wanted)
                assert status == 200

        await asyncio.gather(*(client(number) for number in range(8)))
        await until(lambda: house.idle)
        assert series(house) == before


# FR-OP-06: memory and tasks over a long run


async def test_workers_that_come_and_go_and_clients_that_leave_leave_nothing_behind() -> None:
    """Compressed: what is counted here per request or worker must be back at its base; the run of
    a million requests is tests/soak/soak_long.py."""
    settings = RouterSettings(tokenizer="builtin", rooms_kept=200)
    async with gatehouse(PAIR, settings) as house:
        house.ledger._most = 200
        base = 0
        for life in range(8):
            house.fleet.down(Pod("p1"))
            house.gateway.forget(Pod("p1"))
            house.fleet.up(worker("p1", house.engines["p1"].url, Role.PREFILL))

            async def ask(number: int) -> None:
                posted = asyncio.create_task(house.post("/generate", {"text": f"{number}"}))
                if number % 20 == 0:
                    await asyncio.sleep(0)
                    posted.cancel()
                await asyncio.gather(posted, return_exceptions=True)

            await asyncio.gather(*(ask(number) for number in range(40)))
            await until(lambda: house.idle)
            if life == 2:
                base = len(asyncio.all_tasks())
        # Of the test's own client at most.
        await until(lambda: len(asyncio.all_tasks()) <= base + 3, what="no task more each life")
        ledger = house.ledger
        assert len(ledger._by_room) <= 200 and len(ledger._by_request) <= 200
        assert len(house.gateway.breakers.states(house.gateway.clock.now())) <= 2
        assert house.legs.sockets <= 2 * 40


# FR-OP-08: draining by hand


async def test_who_is_drained_gets_nothing_new_finishes_what_he_has_and_can_come_back() -> None:
    go = asyncio.Event()

    async def decode(call: Call) -> None:
        while request := await call.request():
            if b'"stream":true' not in request.replace(b" ", b""):
                await call.send(answer(b"{}"))
                continue
            head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
            await call.send(head + b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
            await go.wait()
            await call.send(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    scripts: dict[str, Script] = {"p1": serving, "p2": serving, "d1": decode, "d2": decode}
    async with gatehouse(scripts, KNOWING) as house:
        others = {name: house.fleet.target(Worker(Pod(name))) for name in ("p2", "d2")}
        for name in others:
            house.fleet.down(Pod(name))

        async def stream(number: int) -> bytes:
            body = {"text": f"s {number}", "stream": True}
            async with house.session.post(f"{house.url}/generate", json=body) as got:
                assert got.headers["x-kvplane-decode"] == "d1"
                return await got.read()

        async def put(name: str, draining: bool) -> None:
            url = f"{house.url}/workers/{name}"
            async with house.session.put(url, json={"draining": draining}) as got:
                assert got.status == 202

        async def statuses() -> dict[str, str]:
            _, found = await house.get("/workers")
            return {one["pod"]: one["status"] for one in found["workers"]}

        async def served() -> tuple[str, str]:
            _, _, headers = await house.post("/generate", {"text": "new"})
            return headers["x-kvplane-prefill"], headers["x-kvplane-decode"]

        streams = [asyncio.create_task(stream(number)) for number in range(20)]
        running = house.fleet.target(Worker(Pod("d1")))
        assert running is not None
        await until(lambda: running.inflight_requests == 20)
        for target in others.values():
            assert target is not None
            house.fleet.up(target.up)
        await put("p1", True)
        await put("d1", True)
        assert {await served() for _ in range(10)} == {("p2", "d2")}
        assert (await statuses())["d1"] == "draining"
        go.set()
        assert {text[-14:] for text in await asyncio.gather(*streams)} == {b"data: [DONE]\n\n"}
        await until(lambda: house.idle)
        found = await statuses()
        assert (found["p1"], found["d1"], found["p2"]) == ("drained", "drained", "serving")
        await put("p1", False)
        await put("d1", False)
        assert set((await statuses()).values()) == {"serving"}
        both = {await served() for _ in range(20)}
        assert {one for pair in both for one in pair} == {"p1", "d1", "p2", "d2"}


def test_a_worker_that_is_declared_drained_is_so_after_every_start() -> None:
    table = {"url": "http://10.0.0.7:30000", "role": "prefill", "draining": True}
    up = worker_from_table(table)
    fleet = Fleet()
    fleet.up(up)
    (target,) = fleet.targets()
    assert target.draining and not target.usable
    fleet.drain(up.pod, False)
    fleet.up(up)
    assert target.usable, "who was taken in stays so as long as we live"
    fleet.up(replace(up, generation=Generation("another life")))
    assert all(target.usable for target in fleet.targets()), "and whatever life its engine has"
    fleet.drains.forget(up.pod)
    fleet.down(up.pod)
    fleet.up(up)
    assert not any(target.usable for target in fleet.targets()), "until it is deleted"
    with pytest.raises(WorkerFault, match="draining 'yes': must be true or false"):
        worker_from_table(table | {"draining": "yes"})

"""Failing engines, through a real port: whose circuit opens, who is asked next, who hears what."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from kit.gatehouse import Gatehouse, gatehouse, worker
from kit.peer import Call, answer
from kit.ports import free_port
from kit.wait import until

from kvplane.parts import Hall
from kvplane.router.breaker import Outcome
from kvplane.router.legs_settings import LegSettings
from kvplane.router.request import parse
from kvplane.router.settings import (
    BreakerSettings,
    FleetSettings,
    RetrySettings,
    RouterSettings,
)
from kvplane.vocabulary import Pod, Role, Shape, Worker

HANG = b""
GOOD = answer(b'{"text":"good"}')
BAD = answer(b'{"error":{"message":"boom"}}', 500)
LATER = b"retry-after: %d\r\n"
BUSY = answer(b"{}", 429, LATER % 20)
NEVER = RetrySettings(retries=0)
SOON = RetrySettings(first_wait_s=0.01)


class Engine:
    """A scripted engine: what it says may be changed while it runs, or depend on the body."""

    def __init__(self, say: bytes | Callable[[dict[str, Any]], bytes] = GOOD) -> None:
        self.say, self.asked, self.aborted = say, 0, list[str]()
        self.gate = asyncio.Event()  # nothing is said before it is set
        self.gate.set()

    async def serve(self, call: Call) -> None:
        while request := await call.request():
            body = json.loads(request.partition(b"\r\n\r\n")[2] or b"{}")
            if b" /abort_request " in request:
                self.aborted.append(body["rid"])
                await call.send(answer(b"{}"))
                continue
            self.asked += 1
            await self.gate.wait()
            said = self.say(body) if callable(self.say) else self.say
            if said == HANG:
                await call.closed()
                return
            await call.send(said)


def plane(**engines: Engine) -> dict[str, Callable[[Call], Any]]:
    return {name: engine.serve for name, engine in engines.items()}


async def ask(house: Gatehouse, stream: bool = False) -> tuple[int, bytes, dict[str, str]]:
    return await house.post("/generate", {"text": "x", "stream": stream})


async def many(house: Gatehouse, count: int) -> Counter[int]:
    """Statuses of so many at once."""
    return Counter(
        status for status, _, _ in await asyncio.gather(*(ask(house) for _ in range(count)))
    )


def circuits(house: Gatehouse) -> dict[str, str]:
    states = house.gateway.breakers.states(house.gateway.clock.now())
    return {str(worker): str(state) for worker, state in states.items()}


def admits(house: Gatehouse, name: str) -> bool:
    return house.gateway.breakers.admits(Worker(Pod(name)), house.gateway.clock.now())


def pause_over(house: Gatehouse, name: str) -> None:
    """Time went by."""
    house.gateway.breakers.of(Worker(Pod(name)))._until = house.gateway.clock.now()


def wait_s(house: Gatehouse, name: str) -> float:
    return house.gateway.breakers.wait_s([Worker(Pod(name))], house.gateway.clock.now())


def counted(house: Gatehouse, side: str, names: Iterable[str], outcome: str) -> float:
    return sum(house.count("legs_total", side=side, worker=n, outcome=outcome) for n in names)


@pytest.mark.parametrize("side", ["p1", "d1"])
async def test_callers_mistakes_are_passed_on_and_no_circuit_opens(side: str) -> None:
    body = b'{"object":"error","message":"no"}'
    engines = {"p1": Engine(GOOD if side == "d1" else HANG), "d1": Engine(HANG)}
    settings = RouterSettings(breaker=BreakerSettings(faults=3), retry=SOON)
    async with gatehouse(plane(**engines), settings) as house:
        for number in range(20):
            wanted = (400, 401, 404, 413, 422)[number % 5]
            engines[side].say = answer(body, wanted)
            status, said, _ = await ask(house)
            assert (status, said) == (wanted, body)
        assert engines[side].asked == 20, "none was tried again"
        for engine in engines.values():
            engine.say = GOOD
        assert (await ask(house))[0] == 200
        assert set(circuits(house).values()) == {"closed"}


@pytest.mark.parametrize("status", [429, 503])
async def test_busy_is_not_broken_and_a_worker_alone_serves_as_soon_as_it_can(status: int) -> None:
    worker = Engine(answer(b'{"message":"full"}', status, LATER % 1))
    settings = RouterSettings(breaker=BreakerSettings(faults=3), retry=NEVER)
    async with gatehouse(plane(u1=worker), settings) as house:
        for _ in range(15):
            found, _, headers = await ask(house)
            assert (found, headers["retry-after"]) == (status, "1")
        assert worker.asked == 15 and circuits(house) == {"u1": "closed"}
        worker.say = GOOD
        assert (await ask(house))[0] == 200


async def test_what_a_worker_alone_asks_to_wait_is_waited_and_then_it_serves() -> None:
    def busy_once(body: dict[str, Any]) -> bytes:
        return answer(b"full", 429, LATER % 1) if worker.asked == 1 else GOOD

    worker = Engine(busy_once)
    async with gatehouse(plane(u1=worker), RouterSettings(retry=SOON)) as house:
        begun = time.monotonic()
        assert (await ask(house))[0] == 200
        assert time.monotonic() - begun >= 1 and worker.asked == 2


async def test_where_another_can_serve_nobody_waits_for_the_busy_one() -> None:
    busy, free = Engine(answer(b"full", 429, LATER % 3600)), Engine()
    settings = RouterSettings(prefill_policy="round_robin", retry=SOON)
    async with gatehouse(plane(u1=busy, u2=free), settings) as house:
        assert await many(house, 10) == {200: 10}
        asked = busy.asked
        assert asked > 0
        assert await many(house, 10) == {200: 10}
        assert busy.asked == asked, "it asked to be left alone"


async def test_a_429_that_stays_is_a_429() -> None:
    worker = Engine(answer(b'{"message":"full"}', 429, LATER % 3600))
    async with gatehouse(plane(u1=worker), RouterSettings(retry=SOON)) as house:
        status, body, headers = await ask(house)
        assert (status, body, headers["retry-after"]) == (429, b'{"message":"full"}', "3600")
        assert worker.asked == 1


async def test_an_open_prefill_sends_nothing_to_decode_and_a_whole_pair_probes_it() -> None:
    prefill, decode = Engine(BAD), Engine(HANG)
    circuit = BreakerSettings(faults=10, successes=1, pause_s=600, quick_s=600)
    settings = RouterSettings(breaker=circuit, retry=NEVER)
    async with gatehouse(plane(p1=prefill, d1=decode), settings) as house:
        for _ in range(10):
            assert (await ask(house))[0] == 502
        sent = decode.asked
        begun = time.monotonic()
        status, body, headers = await ask(house)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_prefill_available")
        assert int(headers["retry-after"]) > 500 and time.monotonic() - begun < 2
        assert (prefill.asked, decode.asked) == (10, sent)
        pause_over(house, "p1")
        assert (await ask(house))[0] == 502, "the probe"
        assert prefill.asked == 11
        assert (await ask(house))[0] == 503
        prefill.say = decode.say = GOOD
        pause_over(house, "p1")
        assert (await ask(house))[0] == 200
        assert circuits(house) == {"p1": "closed", "d1": "closed"}
        await until(lambda: house.idle)


@pytest.mark.parametrize("dead", ["p1", "d1"])
async def test_an_engine_that_refuses_the_gateway_is_blamed_itself_at_connect(dead: str) -> None:
    alive, role = Engine(HANG), Role.PREFILL if dead == "p1" else Role.DECODE
    other = "d1" if dead == "p1" else "p1"
    async with gatehouse(plane(**{other: alive}), RouterSettings(retry=NEVER)) as house:
        house.fleet.up(worker(dead, f"http://127.0.0.1:{free_port()}", role))
        status, body, _ = await ask(house)
        error = json.loads(body)["error"]
        assert (status, error["code"], error["stage"]) == (503, f"{role}_failed", "connect")
        async with house.session.get(f"{house.url}/diagnosis") as told:
            first = (await told.json())["first"]
        named = (first["rule"], first["stage"], first["culprit"])
        assert named == ("connection-refused", "connect", dead)
        assert circuits(house)[other] == "closed"
        await until(lambda: house.idle)


async def test_where_every_prefill_is_dead_the_pool_is_said_first() -> None:
    async with gatehouse(plane(d1=Engine(HANG)), RouterSettings(retry=SOON)) as house:
        for name in ("p1", "p2"):
            url = f"http://127.0.0.1:{free_port()}"
            house.fleet.up(worker(name, url, Role.PREFILL))
            for _ in range(3):
                house.fleet.mark_health(Pod(name), False, 0.0, f"{url[7:]} refused the connection")
        assert (await ask(house))[0] == 503
        async with house.session.get(f"{house.url}/diagnosis") as told:
            findings = (await told.json())["findings"]
        first, *rest = [(one["stage"], one["culprit"]) for one in findings if one["blocks"]]
        assert first == ("worker-pool", "prefill pool") and findings[0]["count"] == 1
        assert sorted(rest) == [("connect", "p1"), ("connect", "p2")]
        assert all(one["culprit"] != "prefill pool" for one in findings[1:])


@pytest.mark.parametrize("sick", ["p1", "d1"])
async def test_where_no_pair_is_left_a_unified_worker_serves_and_the_pair_when_it_is_back(
    sick: str,
) -> None:
    """In the same request, and while the circuit is open."""
    engines = {"p1": Engine(), "d1": Engine(), "u1": Engine()}
    engines[sick].say = BAD
    circuit = BreakerSettings(faults=3, successes=1, pause_s=600, quick_s=600)
    settings = RouterSettings(breaker=circuit, retry=SOON)
    async with gatehouse(plane(**engines), settings) as house:
        for number in range(1, 6):
            status, _, headers = await ask(house)
            assert (status, headers["x-kvplane-decode"]) == (200, "u1")
            assert engines[sick].asked == min(number, 3)
        assert circuits(house)[sick] == "open"
        engines[sick].say = GOOD
        pause_over(house, sick)
        status, _, headers = await ask(house)
        assert (status, headers["x-kvplane-decode"]) == (200, "d1")
        assert set(circuits(house).values()) == {"closed"}
        await until(lambda: house.idle)


@pytest.mark.parametrize("sick", ["p1", "d1"])
async def test_where_all_of_a_side_are_busy_a_unified_worker_serves_unless_it_is_too(
    sick: str,
) -> None:
    """Else each request would be refused first, and cost a retry of those that may be afforded."""
    engines = {"p1": Engine(), "d1": Engine(), "u1": Engine()}
    engines[sick].say = BUSY
    few = replace(SOON, retries=1, budget_most=2.0, budget_share=0.0)
    async with gatehouse(plane(**engines), RouterSettings(retry=few)) as house:
        for _ in range(10):
            status, _, headers = await ask(house)
            assert (status, headers["x-kvplane-decode"], engines[sick].asked) == (200, "u1", 1)
        engines["u1"].say = BUSY
        assert (await ask(house))[0] == 429
        assert engines[sick].asked == 2, "all are: the last one is never refused for it"
        await until(lambda: house.idle)


@pytest.mark.parametrize("sick", [False, True])
async def test_where_no_prefill_fits_a_decode_a_unified_worker_serves(sick: bool) -> None:
    """Else who adds a pair that does not fit takes away the service that there was."""
    engines = {"p1": Engine(), "d1": Engine(), "u1": Engine(), "u2": Engine()}
    engines["u1"].say = BAD if sick else GOOD
    circuit = BreakerSettings(faults=1, pause_s=600, quick_s=600)
    settings = RouterSettings(breaker=circuit, retry=SOON)
    facts = {"d1": {"shape": Shape(tp=3)}, "p1": {"shape": Shape(tp=2)}}
    async with gatehouse(plane(**engines), settings, facts=facts) as house:
        for _ in range(4):
            status, _, headers = await ask(house)
            assert (status, headers["x-kvplane-decode"][0]) == (200, "u")
        assert engines["p1"].asked == engines["d1"].asked == 0 and engines["u2"].asked > 0
        _, (first, _, met) = await house.gateway.weigh(parse("/generate", b'{"text":"x"}', "r"))
        assert first[0].target.role is Role.BOTH and met is None, "the page says the same"
        await until(lambda: house.idle)


async def test_a_health_check_that_says_well_brings_a_probe_early() -> None:
    prefill, other, decode = Engine(BAD), Engine(), Engine()
    circuit = BreakerSettings(faults=1, successes=1, quick_s=0.05, pause_s=600)
    settings = RouterSettings(prefill_policy="round_robin", breaker=circuit, retry=SOON)
    async with gatehouse(plane(p1=prefill, p2=other, d1=decode), settings) as house:
        decode.gate.clear()
        first = [asyncio.create_task(ask(house)) for _ in range(2)]
        await until(lambda: circuits(house).get("p1") == "open")
        decode.gate.set()
        await asyncio.gather(*first)
        assert not admits(house, "p1")
        prefill.say, hall = GOOD, Hall(house.gateway.clock, house.gateway)
        assert not hall.health(Pod("p2"), False, "slow"), "look again soon"
        assert not admits(house, "p1")
        assert not hall.health(Pod("p1"), True, ""), "look again soon"
        await until(lambda: admits(house, "p1"))
        for _ in range(2):
            await ask(house)
        assert circuits(house)["p1"] == "closed"
        assert hall.health(Pod("p1"), True, ""), "it can be left alone for a while"


async def test_a_worker_that_hangs_while_its_health_is_good_is_passed_by() -> None:
    hung, fine = Engine(HANG), Engine()
    told = FleetSettings(stuck_requests=2, stuck_s=0.2)
    settings = RouterSettings(prefill_policy="round_robin", fleet=told, retry=NEVER)
    async with gatehouse(plane(u1=hung, u2=fine), settings) as house:
        stuck = [asyncio.create_task(ask(house)) for _ in range(4)]
        await until(lambda: hung.asked == 2 and fine.asked == 2)
        await ask_until(house, lambda: fine.asked >= hung.asked + 12)
        before = hung.asked
        assert await many(house, 10) == {200: 10}
        assert hung.asked == before
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        await until(lambda: house.idle)


async def ask_until(house: Gatehouse, so: Callable[[], bool]) -> None:
    """Requests, one a little after the other, until it is so; those that hang are left."""
    asked: set[asyncio.Task[Any]] = set()
    try:
        while not so():
            asked.add(asyncio.create_task(ask(house)))
            await asyncio.wait(asked, timeout=0.02)
            assert len(asked) < 2000, "it never was"
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_decodes_that_report_a_dead_prefill_stay_and_it_is_found() -> None:
    """Decodes answer 500 'transfer failed' for whatever p1 should have sent."""

    def decode(body: dict[str, Any]) -> bytes:
        failed = answer(b'{"error":{"message":"transfer failed"}}', 500)
        return failed if body["bootstrap_port"] == 1111 else GOOD

    engines = plane(p1=Engine(), p2=Engine(), d1=Engine(decode), d2=Engine(decode))
    facts = {"p1": {"bootstrap_port": 1111}, "p2": {"bootstrap_port": 2222}}
    circuit = BreakerSettings(faults=5)
    settings = RouterSettings(prefill_policy="round_robin", breaker=circuit, retry=SOON)
    async with gatehouse(engines, settings, facts=facts) as house:
        for _ in range(40):
            assert (await ask(house))[0] == 200, "by another pair"
        assert circuits(house) == {"p1": "open", "p2": "closed", "d1": "closed", "d2": "closed"}
        assert counted(house, "decode", ("d1", "d2"), Outcome.FAULT) == 0
        assert counted(house, "prefill", ("p1",), Outcome.FAULT) == 5
        assert counted(house, "decode", ("d1", "d2"), Outcome.PEER) == 5
        assert len(house.fleet.selectable(house.fleet.targets()[0].role)) == 2
        await until(lambda: house.idle)


@pytest.mark.parametrize("policy", ["prefix", "least_loaded", "round_robin", "power_of_two"])
async def test_load_counts_from_the_choice_on_not_from_the_answer(policy: str) -> None:
    """40 at once over 4 prefills that have not answered yet; decode is quick."""
    prefills = {f"p{number}": Engine() for number in range(1, 5)}
    for engine in prefills.values():
        engine.gate.clear()
    settings = RouterSettings(prefill_policy=policy, retry=NEVER)
    async with gatehouse(plane(**prefills, d1=Engine()), settings) as house:
        asked = asyncio.create_task(many(house, 40))
        await until(lambda: sum(engine.asked for engine in prefills.values()) == 40)
        counts = [engine.asked for engine in prefills.values()]
        spread = 10 if policy == "power_of_two" else 2
        assert all(abs(count - 10) <= spread for count in counts), counts
        for engine in prefills.values():
            engine.gate.set()
        assert await asked == {200: 40}
        await until(lambda: house.idle)


FEW, NATIVE = "/v1/completions", "/generate"


@pytest.mark.parametrize(
    ("path", "body", "answers"),
    [
        (FEW, {"prompt": "x"}, 128),
        (FEW, {"prompt": "x", "max_tokens": 900}, 900),
        (FEW, {"prompt": ["x"] * 3, "max_tokens": 900, "n": 2}, 5400),
        (NATIVE, {"text": "x"}, 128),
        (NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": 900}}, 900),
        (NATIVE, {"text": ["x", "y"], "sampling_params": [{"max_new_tokens": 900}] * 2}, 1800),
        (NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": -1}}, 128),
        (NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": "many"}}, 128),
    ],
)
async def test_the_load_of_a_decode_has_every_answer_that_may_come_in_it(
    path: str, body: dict[str, Any], answers: int
) -> None:
    decode = Engine()
    decode.gate.clear()
    facts = {name: {"handoff": "sglang-lists"} for name in ("p1", "d1")}
    async with gatehouse(plane(p1=Engine(), d1=decode), facts=facts) as house:
        asked = asyncio.create_task(house.post(path, body))
        await until(lambda: decode.asked)
        target = house.fleet.target(Worker(Pod("d1")))
        assert target is not None
        assert answers < target.inflight_tokens < answers + 40, "the prompts are a few"
        decode.gate.set()
        await asked
        await until(lambda: house.idle)


async def test_one_that_looks_idle_and_is_busy_gets_no_more_than_its_share() -> None:
    """What an engine reports of itself is not what is gone by: what was sent there is."""
    busy, quick, third = Engine(), Engine(), Engine()
    busy.gate.clear()
    settings = RouterSettings(prefill_policy="least_loaded")
    async with gatehouse(plane(u1=busy, u2=quick, u3=third), settings) as house:
        asked = [asyncio.create_task(ask(house))]
        for _ in range(30):
            asked.append(asyncio.create_task(ask(house)))
            await until(lambda: quick.asked + third.asked + busy.asked == len(asked))
        assert busy.asked <= len(asked) / 3, (busy.asked, quick.asked, third.asked)
        busy.gate.set()
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}


async def test_of_all_that_wait_one_probes_and_a_failed_probe_opens_it_for_longer() -> None:
    prefill, decode = Engine(BAD), Engine(HANG)
    circuit = BreakerSettings(faults=1, successes=1, pause_s=100, quick_s=100)
    settings = RouterSettings(breaker=circuit, retry=NEVER)
    async with gatehouse(plane(p1=prefill, d1=decode), settings) as house:
        assert (await ask(house))[0] == 502
        assert 99 < wait_s(house, "p1") <= 100
        pause_over(house, "p1")
        assert await many(house, 100) == {502: 1, 503: 99}
        assert prefill.asked == 2 >= decode.asked, "a leg may be given up before it was sent"
        assert 100 < wait_s(house, "p1") <= 200
        prefill.say = decode.say = GOOD
        prefill.gate.clear()
        decode.gate.clear()
        pause_over(house, "p1")
        waiting = asyncio.create_task(many(house, 100))
        await until(lambda: prefill.asked == 3)
        decode.gate.set()
        prefill.gate.set()
        statuses = await waiting
        assert statuses[200] >= 1 and statuses[200] + statuses[503] == 100
        assert circuits(house)["p1"] == "closed"
        p1 = house.fleet.target(Worker(Pod("p1")))
        assert p1 is not None
        assert p1.share(house.gateway.clock.now(), FleetSettings()) < 1, "it takes load gradually"
        assert await many(house, 20) == {200: 20}


async def test_a_black_hole_takes_neither_the_others_nor_sockets_without_end() -> None:
    hole, fine = Engine(HANG), Engine()
    legs = LegSettings(connections=3, waiters=3, total_s=1.5)
    told = FleetSettings(stuck_requests=3, stuck_s=0.1)
    settings = RouterSettings(prefill_policy="round_robin", fleet=told, retry=SOON)
    async with gatehouse(plane(u1=hole, u2=fine), settings, legs) as house:

        async def client() -> Counter[int]:
            return Counter([(await ask(house))[0] for _ in range(20)])

        told_all = sum(await asyncio.gather(*(client() for _ in range(5))), Counter[int]())
        assert told_all[200] >= 100 - 6, told_all  # what the hole took before it was known
        assert house.legs.sockets <= 3 + 3
        await until(lambda: house.idle)


async def test_where_every_engine_is_full_the_rest_is_told_when_to_come_back() -> None:
    hole = Engine(HANG)
    legs = LegSettings(connections=2, waiters=2, wait_s=0.3, total_s=1.0)
    async with gatehouse(plane(u1=hole), RouterSettings(retry=NEVER), legs) as house:
        asked = [asyncio.create_task(ask(house)) for _ in range(10)]
        answers = await asyncio.gather(*asked)
        shed = [headers for status, _, headers in answers if status == 503]
        assert len(shed) >= 6 and all(headers["retry-after"] for headers in shed)
        assert house.legs.sockets <= 2
        await until(lambda: house.idle)


async def test_what_is_under_way_is_not_cut_by_failed_health_checks() -> None:
    slow, other = Engine(), Engine()
    slow.gate.clear()
    async with gatehouse(plane(u1=slow, u2=other), RouterSettings(retry=NEVER)) as house:
        under_way = asyncio.create_task(ask(house))
        await until(lambda: slow.asked + other.asked == 1)
        if other.asked:
            await under_way
            under_way = asyncio.create_task(ask(house))
            await until(lambda: slow.asked == 1)
        for _ in range(3):
            house.fleet.mark_health(Pod("u1"), False, house.gateway.clock.now(), "slow")
        assert await many(house, 4) == {200: 4} and slow.asked == 1
        assert house.count("health_changes_total", worker="u1", state="unhealthy") == 1
        slow.gate.set()
        assert (await under_way)[0] == 200
        assert not house.fleet.healthy(Pod("u1")), "one sign is not enough"
        await until(lambda: house.idle)


async def test_further_attempts_are_a_share_of_the_requests() -> None:
    """One is saved up, and two requests earn another."""
    worker = Engine(BAD)
    told = RetrySettings(retries=2, first_wait_s=0.001, budget_share=0.5, budget_most=1)
    settings = RouterSettings(breaker=BreakerSettings(faults=1000), retry=told)
    async with gatehouse(plane(u1=worker), settings) as house:
        for number in range(1, 11):
            assert (await ask(house))[0] == 502
            assert worker.asked == number + (number + 1) // 2
        assert house.count("retries_total", reason="decode_failed") == 5


def shut(house: Gatehouse, name: str, at: float) -> None:
    """Its circuit opened at this time of the gateway's clock."""
    breaker = house.gateway.breakers.of(Worker(Pod(name)))
    ticket = breaker.admit(house.gateway.clock.now())
    assert ticket is not None
    breaker.book(ticket, Outcome.FAULT, at)


@pytest.mark.parametrize(
    ("deadline_s", "pause_s", "status"), [(30.0, 0.5, 200), (0.5, 4.0, 503), (30.0, 400.0, 503)]
)
async def test_where_all_circuits_are_open_the_first_that_returns_serves(
    deadline_s: float, pause_s: float, status: int
) -> None:
    circuit = BreakerSettings(faults=1, pause_s=pause_s, quick_s=pause_s)
    settings = RouterSettings(breaker=circuit, retry=NEVER, request_timeout_s=deadline_s)
    workers = {name: Engine() for name in ("u1", "u2", "u3")}
    async with gatehouse(plane(**workers), settings) as house:
        now = house.gateway.clock.now()
        for name, later in (("u1", 0.0), ("u2", 100.0), ("u3", 200.0)):
            shut(house, name, now + later)
        found, _, headers = await ask(house)
        assert found == status
        assert [engine.asked for engine in workers.values()] == [int(status == 200), 0, 0]
        assert status == 200 or 0.5 * pause_s < int(headers["retry-after"]) <= pause_s


@pytest.mark.parametrize("framed", [b"content-length: 900000\r\n\r\n", b"\r\n"])
async def test_a_plain_answer_that_breaks_off_is_cut_and_no_error_of_ours(
    framed: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than is held back, so that its head has left; only the end of the connection tells."""
    size = 700_000
    chunked = b"" if framed != b"\r\n" else b"transfer-encoding: chunked\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + chunked + framed

    async def breaks(call: Call) -> None:
        await call.asked()
        part = b"x" * size
        await call.send(head + (b"%x\r\n%b\r\n" % (size, part) if chunked else part))

    async with gatehouse({"u1": breaks}, RouterSettings(retry=NEVER)) as house:
        with pytest.raises(aiohttp.ClientPayloadError):
            await house.post("/v1/completions", {"prompt": "a"})
        await until(lambda: house.idle)
        assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_a_decode_whose_streams_break_does_not_close_its_circuit_by_beginning_them() -> None:
    """Its health is good, so that it is probed soon; each time it is left alone for longer."""
    head = (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )

    async def breaks(call: Call) -> None:
        await call.asked()
        await call.send(head + b"9\r\ndata: 1\n\n\r\n")
        await asyncio.sleep(0.01)

    breaker = BreakerSettings(faults=2, successes=2, pause_s=0.05, quick_s=0.05)
    async with gatehouse({"u1": breaks}, RouterSettings(retry=NEVER, breaker=breaker)) as house:
        circuit = house.gateway.breakers.of(Worker(Pod("u1")))
        now, waits = house.gateway.clock.now, list[float]()
        for number in range(6):
            await asyncio.sleep(circuit.wait_s(now()))
            body = (await house.post("/v1/completions", {"prompt": "a", "stream": True}))[1]
            assert b'"error"' in body
            await until(lambda: house.idle)
            if number:  # the first alone is too few
                assert not circuit.closed
                waits.append(circuit.wait_s(now()))
        assert waits == sorted(waits) and waits[-1] > 8 * waits[0]


async def test_where_no_prefill_fits_a_decode_the_only_unified_worker_is_tried_again() -> None:
    """As where there is nobody else at all: pairs that fit nobody are no others to turn to."""
    first = [BAD]
    unified = Engine(lambda body: first.pop() if first else GOOD)
    engines = {"p1": Engine(), "d1": Engine(), "u1": unified}
    facts = {"d1": {"shape": Shape(tp=3)}, "p1": {"shape": Shape(tp=2)}}
    circuit = BreakerSettings(faults=2, pause_s=600, quick_s=0.2)
    settings = RouterSettings(breaker=circuit, retry=SOON)
    async with gatehouse(plane(**engines), settings, facts=facts) as house:
        status, _, headers = await ask(house)
        assert (status, headers["x-kvplane-decode"], unified.asked) == (200, "u1", 2)
        first += [BAD] * 2
        assert (await ask(house))[0] == 502
        status, body, headers = await ask(house)
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_prefill_available")
        assert int(headers["retry-after"]) >= 1, "it comes back: the pair would not"
        await until(lambda: house.idle)


async def test_the_first_that_comes_after_a_prefill_stuck_goes_to_the_unified_worker() -> None:
    engines = {"p1": Engine(HANG), "d1": Engine(HANG), "u1": Engine()}
    told = FleetSettings(stuck_requests=2, stuck_s=0.3)
    async with gatehouse(plane(**engines), RouterSettings(retry=NEVER, fleet=told)) as house:
        waiting = [asyncio.create_task(ask(house)) for _ in range(2)]
        await until(lambda: engines["p1"].asked == 2)
        third = asyncio.create_task(ask(house))
        waiting.append(third)
        await until(lambda: engines["p1"].asked == 3)
        await asyncio.sleep(0.4)
        status, _, headers = await asyncio.wait_for(ask(house), 2)
        assert (status, headers["x-kvplane-decode"]) == (200, "u1")
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: house.idle)

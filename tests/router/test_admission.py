"""Admission: who may not run waits in line or is told why, and every place comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer
from kit.wait import until
from prometheus_client import generate_latest

from kvplane.router.admission import Admission
from kvplane.router.dispatch import ClientGone
from kvplane.router.errors import GatewayError
from kvplane.router.keys import Key, digest_of
from kvplane.router.legs_exchange import Bell
from kvplane.router.settings import AdmissionSettings, KeySettings, RetrySettings, RouterSettings

BODY = {"text": "x"}


@dataclass
class Somebody:
    """Who waits."""

    bell: Bell = field(default_factory=Bell)
    gone: bool = False


def key(name: str = "a", **limits: Any) -> Key:
    return Key(KeySettings(name, "", **limits))


def full(**limits: Any) -> Admission:
    """One place, taken."""
    made = Admission(AdmissionSettings(most_requests=1, **limits))
    made.places.take()
    return made


async def waiting(admission: Admission, count: int = 1) -> None:
    await until(lambda: admission.places.waiting == count)


async def test_who_waits_gets_the_place_of_who_leaves() -> None:
    admission = full()
    entering = asyncio.create_task(admission.enter(key(), Somebody()))
    await waiting(admission)
    admission.leave()
    await entering
    assert (admission.places.running, admission.places.waiting) == (1, 0)
    assert admission.waited == {"served": 1}


async def test_who_waits_too_long_is_told_503_and_leaves_the_line() -> None:
    admission = full(queue_s=0.01)
    with pytest.raises(GatewayError) as late:
        await admission.enter(key(), Somebody())
    assert (late.value.status, late.value.code, late.value.retry_after) == (503, "overloaded", "1")
    assert (admission.places.running, admission.places.waiting) == (1, 0)
    assert admission.refused == {("a", "late"): 1}


async def test_a_full_line_is_429_before_a_body_is_read_and_after() -> None:
    admission = full(queue=1)
    entering = asyncio.create_task(admission.enter(key(), Somebody()))
    await waiting(admission)
    for refuse in (lambda: admission.look(key(), 0.0), None):
        with pytest.raises(GatewayError) as refused:
            await admission.enter(key(), Somebody()) if refuse is None else refuse()
        assert (refused.value.status, refused.value.retry_after) == (429, "1")
    entering.cancel()


async def test_another_keys_flood_does_not_fill_the_line() -> None:
    admission = full(queue=3)
    flood = [asyncio.create_task(admission.enter(key("a"), Somebody())) for _ in range(3)]
    await waiting(admission, 3)
    entering = asyncio.create_task(admission.enter(key("b"), Somebody()))
    done, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
    (pushed,) = done
    assert pushed is flood[2]
    error = pushed.exception()
    assert isinstance(error, GatewayError) and error.status == 429
    admission.leave()
    await flood[0]
    admission.leave()
    await entering  # before the second of the flood
    admission.leave()
    await flood[1]
    admission.leave()
    assert (admission.places.running, admission.places.waiting) == (0, 0)


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", ["leaves", "cancelled"])
async def test_who_leaves_while_he_waits_leaves_nothing_behind(how: str, called: bool) -> None:
    """Also where he is called in the same turn of the loop."""
    admission, somebody = full(), Somebody()
    entering = asyncio.create_task(admission.enter(key(), somebody))
    await waiting(admission)
    if called:
        admission.leave()
    if how == "leaves":
        somebody.gone = True
        somebody.bell.ring()
        with pytest.raises(ClientGone):
            await entering
    else:
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
    assert admission.places.waiting == 0
    assert admission.places.running == (0 if called else 1)
    assert admission.waited == {"gone": 1}


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_clients_that_come_leave_and_are_cut_leaves_nothing_behind(
    seed: int,
) -> None:
    chance, most, ran = random.Random(seed), 3, 0
    admission = Admission(AdmissionSettings(most_requests=most, queue=20, queue_s=0.02))

    async def visit(who: Somebody, name: str, turns: int) -> None:
        nonlocal ran
        await admission.enter(key(name), who)
        try:
            ran += 1
            assert admission.places.running <= most
            for _ in range(turns):
                await asyncio.sleep(0)
        finally:
            admission.leave()

    visits = []
    for _ in range(600):
        who = Somebody()
        visits.append(asyncio.create_task(visit(who, chance.choice("abc"), chance.randrange(5))))
        if chance.random() < 0.3:
            await asyncio.sleep(0)
        if chance.random() < 0.2:
            chance.choice(visits).cancel()
        if chance.random() < 0.2:
            who.gone = True
            who.bell.ring()
    await asyncio.gather(*visits, return_exceptions=True)
    assert ran > 100
    assert (admission.places.running, admission.places.waiting) == (0, 0)


def test_a_rate_is_of_one_key_or_of_all() -> None:
    admission = Admission(AdmissionSettings(requests_per_s=1.0))
    one, two = key("a", requests_per_minute=6, burst=2), key("b")
    admission.look(one, 0.0)
    admission.look(one, 0.0)
    with pytest.raises(GatewayError) as refused:
        admission.look(one, 0.0)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.retry_after == "10" and "of this key" in refused.value.message
    for _ in range(8):
        admission.look(two, 0.0)
    with pytest.raises(GatewayError, match="of all keys together"):
        admission.look(two, 0.0)
    assert admission.refused == {("a", "rate"): 1, ("b", "rate"): 1}


def test_bodies_together_are_bounded_and_one_allowed_body_always_fits() -> None:
    admission = Admission(AdmissionSettings(most_body_bytes=100, most_held_bytes=10))
    one = key("a")
    admission.hold(one, 100)
    with pytest.raises(GatewayError) as refused:
        admission.hold(one, 1)
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    assert admission.refused == {("a", "memory"): 1}
    admission.held_bytes -= 100
    admission.hold(one, 1)


# -- through the door


@contextlib.asynccontextmanager
async def gate(**limits: Any) -> AsyncIterator[tuple[Gatehouse, asyncio.Event]]:
    """A gateway whose engines answer when the event is set."""
    opened = asyncio.Event()

    async def slow(call: Call) -> None:
        while await call.request():
            await opened.wait()
            await call.send(answer())

    scripts: dict[str, Script] = {"p1": slow, "d1": slow}
    settings = RouterSettings(admission=AdmissionSettings(**limits), retry=RetrySettings(retries=0))
    async with gatehouse(scripts, settings) as house:
        yield house, opened
        opened.set()
        await until(lambda: house.idle)
        assert figure(house, "admission_running") == figure(house, "admission_waiting") == 0
        assert figure(house, "admission_body_bytes") == 0


def figure(house: Gatehouse, name: str, **labels: str) -> float:
    return house.count(name, **labels)


async def asked(house: Gatehouse, count: int) -> None:
    """Until so many requests reached the decode."""
    await until(lambda: len(house.engines["d1"].requests) == count)


async def test_requests_beyond_the_limit_wait_and_are_served() -> None:
    async with gate(most_requests=1) as (house, opened):
        posts = [asyncio.create_task(house.post("/generate", BODY)) for _ in range(3)]
        await asked(house, 1)
        await until(lambda: figure(house, "admission_waiting") == 2)
        assert figure(house, "admission_running") == 1
        _, found = await house.get("/diagnosis")
        (full,) = [one for one in found["findings"] if one["rule"] == "gateway-full"]
        assert "1 requests are under way" in full["sentence"] and "2 wait" in full["sentence"]
        opened.set()
        assert [status for status, _, _ in await asyncio.gather(*posts)] == [200] * 3
        assert figure(house, "admission_waited_total", outcome="served") == 2


async def test_a_client_that_leaves_the_line_never_reaches_an_engine() -> None:
    async with gate(most_requests=1) as (house, opened):
        first = asyncio.create_task(house.post("/generate", BODY))
        await asked(house, 1)
        second = asyncio.create_task(house.post("/generate", BODY))
        await until(lambda: figure(house, "admission_waiting") == 1)
        second.cancel()
        await until(lambda: figure(house, "admission_waiting") == 0)
        opened.set()
        assert (await first)[0] == 200
        assert len(house.engines["d1"].requests) == 1
        assert house.count("requests_total", route="/generate", status="gone") == 1


async def test_a_bad_request_is_told_so_at_once_however_long_the_line() -> None:
    async with gate(most_requests=1, queue_s=60) as (house, opened):
        first = asyncio.create_task(house.post("/generate", BODY))
        await asked(house, 1)
        assert (await house.post("/generate", b"{nonsense"))[0] == 400
        opened.set()
        await first


async def test_passed_on_requests_are_counted_and_limited_like_others() -> None:
    """FR-RT-23: no second way in without bookkeeping."""
    async with gate(most_requests=1, queue=0) as (house, opened):
        first = asyncio.create_task(house.post("/v1/embeddings", {"input": "x"}))
        await until(lambda: len(house.engines["p1"].requests) == 1)
        (prefill,) = [t for t in house.fleet.targets() if str(t.worker) == "p1"]
        assert prefill.inflight_requests == 1 and prefill.inflight_tokens > 0
        assert (await house.post("/generate", BODY))[0] == 429
        assert (await house.post("/tokenize", {"prompt": "x"}))[0] == 429
        opened.set()
        assert (await first)[0] == 200
        status = {"route": "/v1/embeddings", "status": "200"}
        assert house.count("requests_total", **status) == 1
        assert house.count("legs_total", side="prefill", worker="p1", outcome="success") == 1


async def test_a_keys_own_limits_do_not_touch_others() -> None:
    keys = (
        KeySettings("one", digest_of("k-one"), most_requests=1),
        KeySettings("two", digest_of("k-two"), requests_per_minute=6, burst=2),
    )

    def sent(name: str) -> dict[str, str]:
        return {"authorization": f"Bearer k-{name}"}

    async with gate(keys=keys) as (house, opened):
        first = asyncio.create_task(house.post("/generate", BODY, sent("one")))
        await asked(house, 1)
        status, body, headers = await house.post("/generate", BODY, sent("one"))
        assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
        assert headers["retry-after"] == "1" and headers["x-request-id"]
        assert figure(house, "key_running", key="one") == 1
        opened.set()
        assert (await first)[0] == 200
        codes = [(await house.post("/generate", BODY, sent("two")))[0] for _ in range(3)]
        assert codes == [200, 200, 429]
        refused = {"key": "two", "reason": "rate"}
        assert figure(house, "admission_refused_total", **refused) == 1


async def test_a_key_is_in_no_log_and_no_metric(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    keys = (KeySettings("one", digest_of("sk-hidden"), "acme"),)
    admitted = AdmissionSettings(api_key="sk-upstream", keys=keys, tenant_secret="hidden-too")

    async def broken(call: Call) -> None:
        await call.request()
        call.reset()

    settings = RouterSettings(admission=admitted, admin_key="root-hidden")
    async with gatehouse({"p1": broken, "d1": broken}, settings) as house:
        for given in ("sk-hidden", "sk-upstream", "sk-wrong"):
            sent = {"authorization": f"Bearer {given}", "x-api-key": given}
            status, body, _ = await house.post("/generate", BODY, sent)
            assert status in (401, 502, 503)
            assert b"hidden" not in body and b"sk-" not in body
        shown = [await house.get(path) for path in ("/workers", "/rooms", "/diagnosis")]
        seen = caplog.text + str(shown) + generate_latest(house.registry).decode()
        assert "sk-" not in seen and "hidden" not in seen

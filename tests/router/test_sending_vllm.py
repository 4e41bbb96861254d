"""Sending to vLLM: prefill first, what is kept is freed, what is computed twice is said."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer, replies
from kit.ports import free_port
from kit.standin import Between, Refused, SglangStandin, VllmStandin
from kit.wait import until

from kvplane.router import handovers
from kvplane.router.attempt import Attempt
from kvplane.router.dispatch import dispatch
from kvplane.router.recomputed import ALARM
from kvplane.router.settings import RetrySettings, RouterSettings
from kvplane.vocabulary import Pod, Worker

ONCE = RouterSettings(retry=RetrySettings(retries=0), tokenizer="builtin")
AGAIN = RouterSettings(retry=RetrySettings(retries=1, first_wait_s=0.01))
PROMPT = {"prompt": "a", "max_tokens": 7}
OTHER = {"engine": "vllm"}
AGAIN_SAID = "decode computed the prompt itself"


@asynccontextmanager
async def pair(
    settings: RouterSettings = ONCE,
    way: str = "vllm",
    more: dict[str, Script] | None = None,
    **kind: Any,
) -> AsyncIterator[tuple[Gatehouse, VllmStandin, VllmStandin]]:
    """A gateway over one prefill and one decode with one network between their caches."""
    between, mooncake = Between(), way == "vllm-mooncake"
    prefill = VllmStandin(between, prefill=True, mooncake=mooncake, **kind)
    decode = VllmStandin(between, mooncake=mooncake)
    scripts = {"p1": prefill.script, "d1": decode.script} | (more or {})
    facts = {name: {"engine": "vllm", "handoff": way} for name in scripts}
    async with gatehouse(scripts, settings, facts=facts) as house:
        if mooncake:  # its rank directory is on a port of its own; here it is the engine's
            up = house.fleet.target(Worker(Pod("p1")))
            assert up is not None
            port = house.engines["p1"].port
            house.fleet.up(replace(up.up, bootstrap_host="127.0.0.1", bootstrap_port=port))
        yield house, prefill, decode
        await until(lambda: house.idle, what="all given back")
        assert prefill.between.kept == {}, "blocks wait for nobody"


@pytest.mark.parametrize("way", ["vllm", "vllm-mooncake"])
@pytest.mark.parametrize("stream", [False, True])
async def test_decode_fetches_what_prefill_computed(way: str, stream: bool) -> None:
    async with pair(way=way) as (house, prefill, decode):
        body = PROMPT | {"stream": stream}
        status, raw, headers = await house.post("/v1/completions", body)
        assert status == 200
        assert b'"text": "t0"' in raw
        assert (prefill.computed, decode.fetched, decode.computed) == (100, 100, 0)
        assert {name: decode.bodies[0][name] for name in body} == body
        assert prefill.bodies[0]["max_tokens"] == 1
        assert (headers["x-kvplane-prefill"], headers["x-kvplane-decode"]) == ("p1", "d1")
        ids = {one.heads[0]["x-request-id"] for one in (prefill, decode)}
        assert ids == {headers["x-request-id"]}


async def test_decodes_body_is_the_clients_bytes_and_prefills_object_whole() -> None:
    raw = b'{ "prompt" : "a", "z" : 1.50, "max_tokens": 7 }'
    async with pair() as (house, _, decode):
        await house.post("/v1/completions", raw)
        (request,) = house.engines["d1"].requests
        assert raw[:-1].rstrip() in request
        assert decode.bodies[0]["kv_transfer_params"]["unknown_to_gateways"] == 1.5


@pytest.mark.parametrize("way", ["vllm", "vllm-mooncake"])
async def test_transfer_objects_and_ranks_of_the_client_never_pass(way: str) -> None:
    """FR-RT-04, as vLLM spells it."""
    hostile = {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "2.2.2.2"}}
    async with pair(way=way) as (house, prefill, decode):
        await house.post("/v1/completions", PROMPT | hostile, {"x-data-parallel-rank": "7"})
        for one in (prefill, decode):
            assert "2.2.2.2" not in json.dumps(one.bodies)
            assert "x-data-parallel-rank" not in one.heads[0]
        assert decode.fetched == 100


@pytest.mark.parametrize("way", ["vllm", "vllm-mooncake"])
async def test_what_a_prefill_refuses_reaches_the_client_and_no_decode_token_does(
    way: str,
) -> None:
    """FR-RT-20: a 400 of prefill is not hidden."""
    async with pair(way=way) as (house, prefill, decode):
        status, raw, _ = await house.post("/v1/completions", PROMPT | {"bad": True})
        assert (status, raw) == (400, b'{"error": {"message": "bad is not known"}}')
        assert decode.fetched == 0
        assert len(prefill.bodies) == 1


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("/generate", {"text": "a"}, "route"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "list of prompts"),
        (
            "/v1/completions",
            {"prompt": "a", "prompt_logprobs": 1},
            "log-probabilities of the prompt",
        ),
    ],
)
async def test_what_cannot_be_handed_over_is_decodes_alone_and_counted(
    path: str, body: dict[str, Any], why: str
) -> None:
    """FR-RT-21: a route or a body outside the hand-over."""
    async with pair() as (house, prefill, decode):
        status, _, headers = await house.post(path, body)
        assert status == (404 if path == "/generate" else 200)  # as the engine has it
        assert (len(prefill.bodies), len(decode.bodies)) == (0, 1)
        assert house.count("not_disaggregated_total", reason=why) == 1
        assert "x-kvplane-room" not in headers


# -- silent recomputation


async def test_a_prefill_that_gives_nothing_to_fetch_is_counted_said_and_served() -> None:
    """FR-RT-21: kv_transfer_params null."""
    why = "prefill gave no transfer parameters"
    async with pair(connected=False) as (house, _, decode):
        for _ in range(ALARM):
            status, _, headers = await house.post("/v1/completions", PROMPT)
            assert status == 200
        await until(lambda: house.count("not_disaggregated_total", reason=why) == ALARM)
        _, found = await house.get(f"/requests/{headers['x-request-id']}")
        assert found["attempts"][0]["why"]["without_transfer"] == why
        assert house.count("not_disaggregated_in_a_row", prefill="p1", decode="d1") == ALARM
        assert "kv_transfer_params" not in decode.bodies[0]


async def test_a_decode_without_its_connector_is_found_out_by_its_cached_tokens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FR-RT-21: decode ignores the object and reports that nothing was cached."""
    async with pair(tells_prefills=False) as (house, prefill, decode):
        decode.connected = False
        for _ in range(ALARM):
            status, _, _ = await house.post("/v1/completions", PROMPT)
            assert status == 200
        await until(lambda: house.count("not_disaggregated_total", reason=AGAIN_SAID) == ALARM)
        assert house.count("not_disaggregated_in_a_row", prefill="p1", decode="d1") == ALARM
        assert [r for r in caplog.messages if "not disaggregated prefill=p1 decode=d1" in r]
        prefill.between.kept.clear()


@pytest.mark.parametrize("way", ["vllm", "vllm-mooncake"])
async def test_where_cached_tokens_cannot_tell_the_decodes_counters_do(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FR-RT-21: a good decode says 0 too where its prefill had nothing cached."""
    monkeypatch.setattr(handovers, "LOOK_S", 0.0)

    async def ask(house: Gatehouse, times: int) -> None:
        for _ in range(times):
            before = len(house.engines["d1"].requests)
            assert (await house.post("/v1/completions", PROMPT))[0] == 200
            await until(lambda n=before: len(house.engines["d1"].requests) >= n + 2)  # type: ignore[misc]
            await until(lambda: house.idle)

    async with pair(way=way) as (house, prefill, decode):
        await ask(house, 2)
        assert house.count("not_disaggregated_total", reason=AGAIN_SAID) == 0
        decode.connected = False
        await ask(house, ALARM)
        assert house.count("not_disaggregated_total", reason=AGAIN_SAID) == ALARM
        assert house.count("not_disaggregated_in_a_row", prefill="p1", decode="d1") == ALARM
        decode.connected = True
        prefill.between.kept.clear()
        await ask(house, 1)
        assert house.count("not_disaggregated_in_a_row", prefill="p1", decode="d1") == 0


async def test_an_engine_whose_counters_are_not_there_is_served_and_not_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handovers, "LOOK_S", 0.0)
    async with pair() as (house, _, decode):
        decode.told = lambda path: answer(b"nothing here", 200)  # type: ignore[method-assign]
        for _ in range(3):
            assert (await house.post("/v1/completions", PROMPT))[0] == 200
        await until(lambda: house.idle)
        assert house.count("not_disaggregated_total", reason=AGAIN_SAID) == 0


# -- what is kept at the prefill


def fetched_for_nobody(body: dict[str, Any]) -> bool:
    return body["max_tokens"] == 1 and body["kv_transfer_params"].get("do_remote_prefill") is True


async def test_blocks_of_a_client_that_left_are_fetched_by_a_decode_called_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves when prefill's answer is here and decode has not been asked yet."""

    async def late(attempt: Attempt, client: Any, headers: Any) -> None:
        leg = attempt.prefill
        assert leg is not None
        await until(lambda: leg.complete)
        client.gone = True
        await dispatch(attempt, client, headers)

    monkeypatch.setattr("kvplane.router.journey.dispatch", late)
    async with pair() as (house, _, decode):
        task = asyncio.create_task(house.post("/v1/completions", PROMPT))
        await until(lambda: house.count("clean_ups_total", outcome="fetched") == 1)
        assert [fetched_for_nobody(body) for body in decode.bodies] == [True]
        assert decode.fetched == 100
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("fails", ["down", "503", "cut"])
async def test_blocks_that_a_failed_decode_never_took_are_fetched_by_another(fails: str) -> None:
    async def cut(call: Call) -> None:
        await call.request()
        call.reset()

    between = Between()
    prefill = VllmStandin(between, prefill=True)
    good = VllmStandin(between)
    bad: Script = cut if fails == "cut" else replies(answer(b"{}", 503))
    scripts = {"p1": prefill.script, "d1": bad, "d2": good.script}
    facts = dict.fromkeys(scripts, OTHER)
    async with gatehouse(scripts, AGAIN, facts=facts) as house:
        target = house.fleet.target(Worker(Pod("d1")))
        other = house.fleet.target(Worker(Pod("d2")))
        assert target is not None
        assert other is not None
        other.inflight_tokens = 10**6  # the bad one is chosen first
        if fails == "down":
            target.url = f"http://127.0.0.1:{free_port()}"
        status, _, headers = await house.post("/v1/completions", PROMPT)
        assert (status, headers["x-kvplane-decode"]) == (200, "d2")
        await until(lambda: house.count("clean_ups_total", outcome="fetched") == 1)
        assert sorted(map(fetched_for_nobody, good.bodies)) == [False, True]
        assert between.kept == {}
        assert good.fetched == 200
        other.inflight_tokens -= 10**6
        await until(lambda: house.idle)


async def test_a_decode_whose_kept_connection_died_fetches_what_it_never_heard_of() -> None:
    between = Between()
    prefill, decode = VllmStandin(between, prefill=True), VllmStandin(between)

    async def once(call: Call) -> None:
        """The second request of a connection is never answered."""
        await decode.one(call)
        await call.request()

    facts = dict.fromkeys(("p1", "d1"), OTHER)
    often = RouterSettings(retry=RetrySettings(retries=9, first_wait_s=0.01))
    async with gatehouse({"p1": prefill.script, "d1": once}, often, facts=facts) as house:
        for _ in range(3):
            status, _, _ = await house.post("/v1/completions", PROMPT)
            assert status == 200
        await until(lambda: house.idle)
        assert house.count("clean_ups_total", outcome="fetched") >= 1
        assert (decode.computed, between.kept) == (0, {})


async def test_where_no_decode_is_left_the_lease_ends_it_and_that_is_counted() -> None:
    async with pair() as (house, prefill, _):
        target = house.fleet.target(Worker(Pod("d1")))
        assert target is not None
        target.url = f"http://127.0.0.1:{free_port()}"
        status, _, _ = await house.post("/v1/completions", PROMPT)
        assert status == 503
        assert house.count("clean_ups_total", outcome="no decode") == 1
        prefill.between.kept.clear()


async def test_a_decode_that_has_the_object_frees_it_itself_when_it_is_closed() -> None:
    """Its own abort tells the prefill; a second fetch would find nothing."""
    async with pair() as (house, prefill, decode):

        async def stuck(path: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
            prefill.between.kept.clear()
            await asyncio.sleep(30)

        decode.reply = stuck  # type: ignore[method-assign]
        task = asyncio.create_task(house.post("/v1/completions", PROMPT))
        await until(lambda: decode.bodies)
        task.cancel()
        await until(lambda: house.idle)
        assert len(decode.bodies) == 1
        assert house.count("aborts_total", side="decode", outcome="closed") == 1


# -- Mooncake's rank directory


async def test_a_restarted_prefill_is_asked_for_its_new_id_after_one_failure() -> None:
    async with pair(AGAIN, "vllm-mooncake") as (house, prefill, decode):
        for _ in range(3):
            assert (await house.post("/v1/completions", PROMPT))[0] == 200
        assert prefill.queries == 1
        assert decode.bodies[0]["kv_transfer_params"]["remote_engine_id"] == "engine-a"
        prefill.engine_id, reply = "engine-b", prefill.reply
        prefill.reply = refuses_once(prefill, reply)  # type: ignore[method-assign]
        assert (await house.post("/v1/completions", PROMPT))[0] == 200
        assert decode.bodies[-1]["kv_transfer_params"]["remote_engine_id"] == "engine-b"


def refuses_once(engine: VllmStandin, reply: Any) -> Any:
    async def told(path: str, headers: dict[str, str], body: dict[str, Any]) -> Any:
        engine.reply = reply  # type: ignore[method-assign]
        raise Refused("restarting", 503)

    return told


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answer(b"{}"), "tells nothing of dp rank 0; registered: none"),
        (answer(b"{}", 404), "answered 404"),
        (answer(b'{"0": 7}'), "answered what is no rank table"),
    ],
)
async def test_a_prefill_whose_ids_are_not_known_fails_with_the_address(
    said: bytes, why: str
) -> None:
    async with pair(way="vllm-mooncake") as (house, prefill, decode):
        prefill.told = lambda path: said  # type: ignore[method-assign]
        status, raw, headers = await house.post("/v1/completions", PROMPT)
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["stage"]) == (503, "prefill_failed", "resolve-rank")
        assert why in error["message"]
        assert f":{house.engines['p1'].port}/query" in error["message"]
        assert headers["x-kvplane-prefill"] == "p1"
        assert decode.bodies == prefill.bodies == []


# -- mixed fleets


async def test_each_pair_of_a_mixed_fleet_is_handed_over_in_its_own_way() -> None:
    between = Between()
    pairs = {
        "p1": SglangStandin(between, prefill=True),
        "d1": SglangStandin(between),
        "p2": VllmStandin(between, prefill=True),
        "d2": VllmStandin(between),
    }
    facts = {
        "p1": {"model": "s"}, "d1": {"model": "s"},
        "p2": {"model": "v", "engine": "vllm"}, "d2": {"model": "v", "engine": "vllm"},
    }  # fmt: skip
    scripts = {name: one.script for name, one in pairs.items()} | {"u1": replies(answer(b"alone"))}
    async with gatehouse(scripts, ONCE, facts=facts | {"u1": {"model": "u"}}) as house:
        for model, body in (("s", None), ("v", None), ("u", b"alone")):
            status, raw, headers = await house.post("/v1/completions", PROMPT | {"model": model})
            assert status == 200, raw
            assert body is None or raw == body
            assert headers["x-kvplane-decode"] == {"s": "d1", "v": "d2", "u": "u1"}[model]
        assert "bootstrap_room" in pairs["d1"].bodies[0]
        assert "kv_transfer_params" in pairs["d2"].bodies[0]
        await until(lambda: house.idle)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({"engine": "vllm"}, {"engine": "sglang"}),
     ({"engine": "vllm"}, {"engine": "vllm", "handoff": "vllm-mooncake"})],
)  # fmt: skip
async def test_two_of_different_ways_never_meet(
    prefill: dict[str, str], decode: dict[str, str]
) -> None:
    scripts = {"p1": replies(answer()), "d1": replies(answer())}
    async with gatehouse(scripts, ONCE, facts={"p1": prefill, "d1": decode}) as house:
        status, raw, _ = await house.post("/v1/completions", PROMPT)
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (503, "no_compatible_pair")
        assert "vllm against" in error["message"]
        assert house.engines["p1"].requests == house.engines["d1"].requests == []

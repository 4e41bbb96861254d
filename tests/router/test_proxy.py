"""Proxy: other engine routes go to one worker, placed, judged and tried again as legs are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer, replies
from kit.wait import until

from kvplane.router.keys import digest_of
from kvplane.router.proxied import ANY, PROXIED, UNIFIED
from kvplane.router.request import COUNTS
from kvplane.router.settings import (
    AdmissionSettings,
    BreakerSettings,
    KeySettings,
    RetrySettings,
    RouterSettings,
)
from kvplane.router.tenants import tenant_salt
from kvplane.vocabulary import Pod

GOOD = replies(answer(b'{"ok":1}'))
ONCE = RouterSettings(retry=RetrySettings(retries=0))
AGAIN = RouterSettings(retry=RetrySettings(first_wait_s=0.001))
EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b'10\r\ndata: {"id":1}\n\n\r\n0\r\n\r\n'
)
ROUTES = sorted(PROXIED)


def asked(house: Gatehouse) -> dict[str, int]:
    return {name: len(engine.requests) for name, engine in house.engines.items()}


@pytest.mark.parametrize("stream", [False, True])
async def test_every_route_is_disaggregated_passed_on_or_refused_clearly(stream: bool) -> None:
    """FR-AP-11: with prefill and decode apart, and with a unified worker beside them."""
    engine = replies(EVENTS if stream else answer(b'{"ok":1}'))
    body = {"input": "x", "model": "tiny", "stream": stream}
    async with gatehouse({"p1": engine, "d1": engine}, ONCE) as house:
        for path in ROUTES:
            status, raw, headers = await house.post(path, body)
            if PROXIED[path] is UNIFIED:
                error = json.loads(raw)["error"]
                assert (status, error["code"]) == (501, "unsupported_route"), path
                assert path in error["message"] and "/v1/chat/completions" in error["message"]
                continue
            assert status == 200, (path, raw)
            assert headers["x-kvplane-prefill"] == "p1" and "x-kvplane-decode" not in headers
        assert asked(house) == {"p1": len([p for p in ROUTES if PROXIED[p] is ANY]), "d1": 0}
    async with gatehouse({"p1": engine, "d1": engine, "u1": engine}, ONCE) as house:
        for number, path in enumerate(ROUTES, start=1):
            status, raw, headers = await house.post(path, body)
            assert status == 200, (path, raw)
            assert raw == (b'data: {"id":1}\n\n' if stream else b'{"ok":1}')
            assert headers["x-kvplane-prefill"] == headers["x-kvplane-decode"] == "u1"
            assert len(house.engines["u1"].requests) == number
            assert house.engines["u1"].requests[-1].startswith(f"POST {path} ".encode())
        assert house.idle


@pytest.mark.parametrize("path", [path for path in ROUTES if PROXIED[path] is UNIFIED])
async def test_a_model_without_a_unified_worker_has_none_though_another_model_has(
    path: str,
) -> None:
    facts = {"p1": {"model": "tiny"}, "d1": {"model": "tiny"}, "u1": {"model": "whole"}}
    async with gatehouse({"p1": GOOD, "d1": GOOD, "u1": GOOD}, ONCE, facts=facts) as house:
        status, raw, _ = await house.post(path, {"input": "x", "model": "tiny"})
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (501, "unsupported_route")
        assert "model 'tiny' has none" in error["message"]
        assert (await house.post(path, {"input": "x", "model": "whole"}))[0] == 200
        for unknown, wanted in (("gone", (404, "model_not_found")), ("", (400, "invalid_request"))):
            status, raw, _ = await house.post(path, {"input": "x", "model": unknown})
            assert (status, json.loads(raw)["error"]["code"]) == wanted
        assert asked(house) == {"p1": 0, "d1": 0, "u1": 1}


async def test_where_nobody_is_the_worker_that_is_missing_is_called_what_it_is() -> None:
    async with gatehouse({}, ONCE) as house:
        for path in ("/v1/embeddings", "/v1/responses"):
            status, raw, _ = await house.post(path, {"input": "x"})
            assert (status, json.loads(raw)["error"]["message"]) == (
                503,
                "no unified worker is registered",
            )


async def test_paths_of_no_table_are_404_and_other_methods_405() -> None:
    async with gatehouse({"u1": GOOD}, ONCE) as house:
        for path in ("/v1/nothing", "/abort_request", "/v1/embeddings/", "//v1/embeddings"):
            assert (await house.post(path, {}))[0] == 404, path
        for path in (*ROUTES, *COUNTS):
            async with house.session.get(house.url + path) as found:
                assert (found.status, found.headers["allow"]) == (405, "POST")
                assert (await found.json())["error"]["code"] == "invalid_request"
        assert asked(house) == {"u1": 0}


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/embeddings", "/generate"])
async def test_a_hundred_at_once_are_spread_over_all_workers(path: str) -> None:
    """FR-RT-23: the same prompt, so that nothing but load can tell them apart."""
    opened = asyncio.Event()

    async def held(call: Call) -> None:
        while await call.request():
            await opened.wait()
            await call.send(answer())

    scripts: dict[str, Script] = dict.fromkeys(("u1", "u2", "u3", "u4"), held)
    settings = RouterSettings(retry=RetrySettings(retries=0), prefill_policy="least_loaded")
    async with gatehouse(scripts, settings) as house:
        body = {"text": "the same", "input": "the same"}
        posts = [asyncio.create_task(house.post(path, body)) for _ in range(100)]
        await until(lambda: sum(asked(house).values()) == 100)
        assert set(asked(house).values()) == {25}
        opened.set()
        assert {status for status, _, _ in await asyncio.gather(*posts)} == {200}
        await until(lambda: house.idle)


async def test_one_after_the_other_they_take_turns() -> None:
    async with gatehouse({"p1": GOOD, "p2": GOOD}, ONCE) as house:
        for _ in range(10):
            await house.post("/v1/embeddings", {"input": "x"})
        assert asked(house) == {"p1": 5, "p2": 5}


async def test_a_worker_of_another_model_is_not_asked() -> None:
    facts = {"p1": {"model": "tiny"}, "u1": {"model": "embedder"}}
    async with gatehouse({"p1": GOOD, "d1": GOOD, "u1": GOOD}, ONCE, facts=facts) as house:
        await house.post("/v1/embeddings", {"input": "x", "model": "embedder"})
        await house.post("/v1/embeddings", {"input": "x", "model": "tiny"})
        assert asked(house) == {"p1": 1, "d1": 0, "u1": 1}
        status, raw, _ = await house.post("/v1/embeddings", {"input": "x", "model": "none"})
        assert (status, json.loads(raw)["error"]["code"]) == (404, "model_not_found")
        status, raw, _ = await house.post("/v1/embeddings", {"input": "x"})
        assert (status, json.loads(raw)["error"]["param"]) == (400, "model")


async def test_a_failing_worker_is_left_for_another_and_its_circuit_opens() -> None:
    settings = RouterSettings(
        retry=RetrySettings(first_wait_s=0.001), breaker=BreakerSettings(faults=3)
    )
    broken = replies(answer(b'{"error":{"message":"no"}}', 500))
    async with gatehouse({"p1": broken, "p2": GOOD}, settings) as house:
        for _ in range(20):
            status, _, headers = await house.post("/v1/embeddings", {"input": "x"})
            assert (status, headers["x-kvplane-prefill"]) == (200, "p2")
        assert asked(house)["p1"] == 3
        assert house.count("circuit_opened_total", worker="p1") == 1
        assert house.count("retries_total", reason="prefill_failed") == 3


@pytest.mark.parametrize("status", [429, 503])
async def test_where_another_can_serve_nobody_waits_for_the_busy_one(status: int) -> None:
    busy = replies(answer(b'{"message":"full"}', status, b"retry-after: 3600\r\n"))
    async with gatehouse({"p1": busy, "p2": GOOD}, AGAIN) as house:
        for _ in range(6):
            code, _, headers = await house.post("/v1/embeddings", {"input": "x"})
            assert (code, headers["x-kvplane-prefill"]) == (200, "p2")
        assert asked(house) == {"p1": 1, "p2": 6}, "it asked to be left alone"
    async with gatehouse({"p1": busy}, AGAIN) as house:
        code, _, headers = await house.post("/v1/embeddings", {"input": "x"})
        assert (code, headers["retry-after"]) == (status, "3600")


async def test_a_kept_connection_that_died_is_no_attempt_of_those_allowed_once() -> None:
    async def once(call: Call) -> None:
        await call.request()
        await call.send(answer(b"good"))
        await call.request()

    async with gatehouse({"p1": once}, ONCE) as house:
        for _ in range(4):
            assert (await house.post("/v1/embeddings", {"input": "x"}))[:2] == (200, b"good")


async def test_a_prefill_that_fails_is_called_one_and_its_circuit_says_when_to_come_back() -> None:
    settings = RouterSettings(
        retry=RetrySettings(retries=0), breaker=BreakerSettings(faults=1, pause_s=30)
    )
    broken = replies(answer(b'{"error":{"message":"no"}}', 500))
    async with gatehouse({"p1": broken, "d1": GOOD}, settings) as house:
        status, raw, headers = await house.post("/v1/embeddings", {"input": "x"})
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (502, "prefill_failed")
        assert error["message"].startswith("prefill p1 answered 500")
        assert headers["x-kvplane-prefill"] == "p1" and "x-kvplane-decode" not in headers


async def test_one_of_another_role_serves_where_all_of_the_first_failed() -> None:
    """In the same request, and while the circuit is open."""
    settings = RouterSettings(
        retry=RetrySettings(first_wait_s=0.001), breaker=BreakerSettings(faults=2, pause_s=600)
    )
    broken = replies(answer(b"{}", 500))
    async with gatehouse({"p1": broken, "d1": GOOD}, settings) as house:
        for _ in range(5):
            status, _, headers = await house.post("/v1/embeddings", {"input": "x"})
            assert (status, headers["x-kvplane-decode"]) == (200, "d1")
        assert asked(house) == {"p1": 2, "d1": 5}
        status, raw, _ = await house.post("/v1/responses", {"input": "x"})
        assert (status, json.loads(raw)["error"]["code"]) == (501, "unsupported_route")


async def test_a_4xx_reaches_the_client_as_it_is_and_is_not_tried_again() -> None:
    told = b'{"object":"error","message":"too long","code":400}'
    async with gatehouse({"p1": replies(answer(told, 400)), "p2": GOOD}, AGAIN) as house:
        found = [await house.post("/v1/embeddings", {"input": "x"}) for _ in range(2)]
        assert sorted(status for status, _, _ in found) == [200, 400]
        assert told in [raw for _, raw, _ in found]
        assert asked(house) == {"p1": 1, "p2": 1}


async def test_members_that_steer_engines_are_taken_out_and_the_rest_stays() -> None:
    raw = (
        b'{"input": "x", "bootstrap_room":7, "kv_transfer_params":{"do_remote_prefill":true},'
        b' "routed_dp_rank":3,  "custom" : 1e2}'
    )
    async with gatehouse({"u1": GOOD}, ONCE) as house:
        for path in ("/v1/responses", "/v1/embeddings"):
            assert (await house.post(path, raw))[0] == 200
            body = house.engines["u1"].requests[-1].partition(b"\r\n\r\n")[2]
            assert json.loads(body) == {"input": "x", "custom": 100.0}
            assert b'"custom" : 1e2' in body


async def test_another_kind_of_body_goes_as_it_is() -> None:
    """Audio comes as multipart."""
    form = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--b--\r\n'
    kind = {"content-type": "multipart/form-data; boundary=b"}
    async with gatehouse({"u1": GOOD}, ONCE) as house:
        assert (await house.post("/v1/audio/transcriptions", form, kind))[0] == 200
        request = house.engines["u1"].requests[-1]
        assert request.endswith(form) and b"boundary=b" in request
        bad: list[tuple[Any, dict[str, str]]] = [
            (b"{nonsense", {"content-type": "application/json"}),
            (b"[1]", {}),
            (b'{"model":5}', {}),
            (b"[" * 100_000, {"content-type": "application/json"}),
            (b'{"model":"' + b"m" * 1025 + b'"}', {}),
        ] + [
            (b'{"cache_salt":"kvplane:x","kv_transfer_params":{},"x":NaN}', {"content-type": kind})
            for kind in ("Application/JSON", "application/x+json", "text/plain", "multipart/a", "")
        ]
        for body, headers in bad:
            status, raw, _ = await house.post("/v1/embeddings", body, headers)
            assert (status, json.loads(raw)["error"]["code"]) == (400, "invalid_request")
        assert asked(house) == {"u1": 1}


async def test_a_tenants_salt_goes_with_what_is_passed_on_too() -> None:
    admission = AdmissionSettings(keys=(KeySettings("a", digest_of("k"), "acme"),))
    settings = RouterSettings(retry=RetrySettings(retries=0), admission=admission)
    sent = {"authorization": "Bearer k"}
    async with gatehouse({"u1": GOOD}, settings) as house:
        await house.post("/v1/responses", {"input": "x", "cache_salt": "mine"}, sent)
        body = json.loads(house.engines["u1"].requests[-1].partition(b"\r\n\r\n")[2])
        assert body["cache_salt"].startswith(tenant_salt("acme", "") + ":")
        status, raw, _ = await house.post("/v1/audio/transcriptions", b"--b--", sent)
        assert (status, json.loads(raw)["error"]["code"]) == (400, "invalid_request")


async def test_a_client_that_leaves_closes_the_leg_and_gives_the_load_back() -> None:
    async def hangs(call: Call) -> None:
        await call.request()
        await call.closed()

    async with gatehouse({"p1": hangs}, ONCE) as house:
        post = asyncio.create_task(house.post("/v1/embeddings", {"input": "x"}))
        await until(lambda: asked(house) == {"p1": 1})
        post.cancel()
        await until(lambda: house.engines["p1"].seen_closed == 1 and house.idle)
        assert house.count("legs_total", side="prefill", worker="p1", outcome="neutral") == 1


async def test_without_a_worker_that_can_the_reason_is_told() -> None:
    async with gatehouse({}, ONCE) as house:
        status, raw, _ = await house.post("/v1/embeddings", {"input": "x"})
        assert (status, json.loads(raw)["error"]["code"]) == (503, "no_prefill_available")
    async with gatehouse({"p1": GOOD, "d1": GOOD}, ONCE) as house:
        for name in ("p1", "d1"):
            house.fleet.drain(Pod(name))
        status, raw, _ = await house.post("/v1/embeddings", {"input": "x"})
        assert status == 503 and "draining" in json.loads(raw)["error"]["message"]

"""Admin workers: sgl router's bodies and statuses; who leaves finishes what it has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer, replies
from kit.wait import until

from kvplane.router import Departures
from kvplane.router.admin_workers import worker_id
from kvplane.router.discovery import Static
from kvplane.router.settings import ProbeSettings, RetrySettings, RouterSettings
from kvplane.runtime import SystemClock
from kvplane.signing import signed
from kvplane.vocabulary import Generation, Pod, WorkerUp
from kvplane.workers import worker_from_table

GOOD = replies(answer(b"{}"))
ONCE = RouterSettings(retry=RetrySettings(retries=0))
JSON = {"content-type": "application/json"}


def declare(table: Any) -> WorkerUp:
    """Engines of these tests tell no rooms."""
    return worker_from_table({"engine": "sglang"} | table)


@contextlib.asynccontextmanager
async def manned(
    scripts: dict[str, Script], drain_s: float = 60.0
) -> AsyncIterator[tuple[Gatehouse, Departures]]:
    """A gateway whose workers come and go by POST and DELETE alone, found by real probes."""
    clock, departures = SystemClock(), Departures.__new__(Departures)  # made below: the fleet first
    async with contextlib.AsyncExitStack() as stack:
        house = await stack.enter_async_context(
            gatehouse(scripts, ONCE, desk=departures, declare=declare)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        quick = ProbeSettings(interval_s=5.0, first_wait_s=0.01, most_wait_s=0.05)
        fleet = house.fleet
        for up in fleet.pods():
            fleet.down(up.pod)
        keys = house.legs.credentials
        asking = signed(session, keys)
        static = Static((), asking, clock, fleet.up, fleet.down, settings=quick)
        Departures.__init__(departures, static, fleet, clock, drain_s, keys)
        stack.push_async_callback(static.stop)
        stack.push_async_callback(departures.stop)
        yield house, departures


async def call(house: Gatehouse, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    async with house.session.request(method, house.url + path, json=body) as found:
        return found.status, await found.json()


async def add(house: Gatehouse, name: str, role: str, **more: Any) -> str:
    """The path of a worker that serves now."""
    url = house.engines[name].url
    status, told = await call(house, "POST", "/workers", {"url": url, "worker_type": role} | more)
    assert status == 202, told
    path = str(told["location"])

    async def healthy() -> bool:
        return bool((await call(house, "GET", path))[1].get("is_healthy"))

    await until(healthy)
    return path


def engine(opened: asyncio.Event | None = None) -> Script:
    """Lives; answers /generate when it may."""

    async def script(call: Call) -> None:
        while request := await call.request():
            if opened is not None and request.startswith(b"POST /generate"):
                await opened.wait()
            await call.send(answer(b'{"data":[{"id":"tiny"}]}'))

    return script


async def test_a_gateway_without_workers_serves_once_two_were_posted() -> None:
    async with manned({"p1": engine(), "d1": engine()}) as (house, _):
        assert (await house.post("/generate", {"text": "x"}))[0] == 503
        assert await house.get("/workers") == (
            200,
            {
                "workers": [],
                "total": 0,
                "stats": {"prefill_count": 0, "decode_count": 0, "regular_count": 0},
            },
        )
        await add(house, "p1", "prefill", bootstrap_port=8998)
        await add(house, "d1", "decode")
        assert (await house.post("/generate", {"text": "x"}))[0] == 200


async def test_each_answer_has_the_members_of_sgl_router() -> None:
    async with manned({"d1": engine()}) as (house, _):
        url = house.engines["d1"].url
        new = {"url": url, "worker_type": "decode", "priority": 7, "cost": 2.5}
        new |= {"labels": {"zone": "a"}, "api_key": "k", "health_check_timeout_secs": 30}
        new |= {"health_failure_threshold": 3, "disable_health_check": False, "dp_aware": False}
        new |= {"max_connection_attempts": 20, "reasoning_parser": "x", "chat_template": "y"}
        status, told = await call(house, "POST", "/workers", new)
        id = worker_id(Pod(url.removeprefix("http://")))
        assert status == 202
        assert told == {
            "status": "accepted",
            "worker_id": id,
            "url": url,
            "location": f"/workers/{id}",
            "message": told["message"],
        }

        async def serves() -> Any:
            _, found = await call(house, "GET", f"/workers/{id}")
            return found if found["is_healthy"] else None

        found = await until(serves)
        assert {name: found[name] for name in list(found)[:11]} == {
            "id": id,
            "url": url,
            "model_id": "tiny",
            "priority": 7,
            "cost": 2.5,
            "worker_type": "decode",
            "is_healthy": True,
            "load": 0,
            "connection_mode": "http",
            "metadata": {"zone": "a"},
            "disable_health_check": False,
        }
        assert "job_status" not in found and "api_key" not in found
        change = {"priority": 9, "labels": {}, "health_check_interval_secs": 60}
        status, told = await call(house, "PUT", f"/workers/{id}", change)
        assert (status, told["status"], told["worker_id"]) == (202, "accepted", id)
        _, found = await call(house, "GET", f"/workers/{id}")
        assert (found["priority"], found["cost"], found["metadata"]) == (9, 2.5, {})
        assert await call(house, "GET", "/get_loads") == (
            200, {"workers": [{"worker": url, "load": 0}]}
        )  # fmt: skip


async def test_a_worker_that_does_not_answer_yet_shows_the_job_that_looks_for_it() -> None:
    async with manned({}) as (house, _):
        url = "http://127.0.0.1:9"
        _, told = await call(house, "POST", "/workers", {"url": url})
        _, found = await call(house, "GET", told["location"])
        job = found["job_status"]
        assert (job["job_type"], job["worker_url"]) == ("AddWorker", url)
        assert job["status"] == "processing" and job["timestamp"] > 1e9
        assert not found["is_healthy"]
        assert (await call(house, "DELETE", told["location"]))[0] == 202
        status, found = await call(house, "GET", told["location"])
        assert (status, found["code"]) == (404, "WORKER_NOT_FOUND")


async def test_a_deleted_worker_gets_nothing_new_and_finishes_what_it_has() -> None:
    opened = asyncio.Event()
    async with manned({"u1": engine(opened), "u2": engine()}) as (house, _):
        path = await add(house, "u1", "regular")
        running = asyncio.create_task(house.post("/generate", {"text": "x"}))
        await until(lambda: any(t.inflight_requests for t in house.fleet.targets()))
        assert (await call(house, "DELETE", path))[0] == 202
        _, found = await call(house, "GET", path)
        assert (found["draining"], found["load"]) == (True, 1)
        status, body, _ = await house.post("/generate", {"text": "x"})
        assert status == 503 and "draining" in json.loads(body)["error"]["message"]
        again = {"url": house.engines["u1"].url}
        status, told = await call(house, "POST", "/workers", again)
        assert status == 400 and "is leaving, 1 requests" in told["error"]["message"]
        assert (await call(house, "DELETE", path))[0] == 202
        await add(house, "u2", "regular")
        assert (await house.post("/generate", {"text": "x"}))[0] == 200
        opened.set()
        assert (await running)[0] == 200

        async def gone() -> bool:
            return (await call(house, "GET", path))[0] == 404

        await until(gone)
        await add(house, "u1", "regular")


async def test_a_deleted_worker_may_be_taken_back_before_it_is_gone() -> None:
    opened = asyncio.Event()
    async with manned({"u1": engine(opened)}) as (house, departures):
        path = await add(house, "u1", "regular")
        running = asyncio.create_task(house.post("/generate", {"text": "x"}))
        await until(lambda: any(t.inflight_requests for t in house.fleet.targets()))
        await call(house, "DELETE", path)
        assert (await call(house, "PUT", path, {"draining": False}))[0] == 202
        opened.set()
        assert (await running)[0] == 200
        await until(lambda: house.idle)
        pod = Pod(house.engines["u1"].url.removeprefix("http://"))
        assert not departures.leaving(pod)
        assert (await house.post("/generate", {"text": "x"}))[0] == 200


async def test_a_worker_that_never_finishes_is_forgotten_at_the_deadline() -> None:
    async with manned({"u1": engine(asyncio.Event())}, drain_s=0.2) as (house, _):
        path = await add(house, "u1", "regular")
        running = asyncio.create_task(house.post("/generate", {"text": "x"}))
        await until(lambda: any(t.inflight_requests for t in house.fleet.targets()))
        await call(house, "DELETE", path)

        async def gone() -> bool:
            return (await call(house, "GET", path))[0] == 404

        await until(gone)
        assert not running.done()  # its request is cut by nobody
        running.cancel()


def keys_seen(house: Gatehouse, name: str, path: str) -> set[bytes | None]:
    """Authorization of all requests to this path of an engine."""
    found: set[bytes | None] = set()
    for request in house.engines[name].requests:
        if request.split(b" ")[1] == path.encode():
            lines = request.partition(b"\r\n\r\n")[0].split(b"\r\n")
            keys = [one[15:] for one in lines if one.lower().startswith(b"authorization:")]
            assert len(keys) < 2
            found.add(keys[0] if keys else None)
    return found


async def test_a_worker_with_a_key_of_its_own_gets_that_one_and_no_other() -> None:
    async with manned({"p1": engine(), "d1": engine()}) as (house, _):
        own = await add(house, "p1", "prefill", bootstrap_port=8998, api_key="k-own")
        await add(house, "d1", "decode")
        sent = {"authorization": "Bearer of-the-client"}
        await house.post("/generate", {"text": "x"}, sent)
        await house.post("/v1/embeddings", {"input": "x"}, sent)
        for path in ("/generate", "/v1/embeddings", "/server_info", "/v1/models", "/ready"):
            assert keys_seen(house, "p1", path) == {b"Bearer k-own"}, path
        assert keys_seen(house, "d1", "/generate") == {b"Bearer of-the-client"}
        assert keys_seen(house, "d1", "/server_info") == {None}
        for engine_seen in house.engines.values():
            engine_seen.requests.clear()
        await call(house, "PUT", own, {"api_key": "k-new"})
        await house.post("/generate", {"text": "x"}, sent)
        assert keys_seen(house, "p1", "/generate") == {b"Bearer k-new"}
        assert "k-new" not in str(await call(house, "GET", own))
        house.engines["p1"].requests.clear()
        await call(house, "PUT", own, {"api_key": ""})
        await house.post("/generate", {"text": "x"}, sent)
        assert keys_seen(house, "p1", "/generate") == {b"Bearer of-the-client"}
        await call(house, "PUT", own, {"api_key": "k-again"})
        await call(house, "DELETE", own)
        assert not house.legs.credentials.known


async def test_draining_by_put_keeps_new_requests_away_and_ends_by_put() -> None:
    async with manned({"u1": engine()}) as (house, _):
        path = await add(house, "u1", "regular")
        await call(house, "PUT", path, {"draining": True})
        assert (await house.post("/generate", {"text": "x"}))[0] == 503
        await call(house, "PUT", path, {"priority": 1})
        assert (await house.post("/generate", {"text": "x"}))[0] == 503
        await call(house, "PUT", path, {"draining": False})
        assert (await house.post("/generate", {"text": "x"}))[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b'{"priority":"x"}', "priority"),
        (b'{"priority":-1}', "priority"),
        (b'{"cost":1e400}', "cost"),
        (b'{"cost":NaN}', "cost"),
        (b'{"labels":{"a":5}}', "labels.a"),
        (b'{"labels":[1]}', "labels"),
        (b'{"draining":"maybe"}', "draining"),
        (b'{"health_failure_threshold":0}', "health_failure_threshold"),
        (b'{"api_key":5}', "api_key"),
        (b'{"api_key":"a b"}', "api_key"),
        (b'{"api_key":"a\\r\\nx: y"}', "api_key"),
    ],
)
async def test_a_change_that_cannot_be_is_refused_by_name(body: bytes, param: str | None) -> None:
    async with gatehouse({"u1": GOOD}, ONCE) as house:
        url = f"{house.url}/workers/{worker_id(Pod('u1'))}"
        async with house.session.put(url, data=body, headers=JSON) as found:
            error = (await found.json())["error"]
            assert (found.status, error["code"]) == (400, "invalid_request")
            assert param is None or error["param"] == param


async def test_who_is_drained_stays_so_when_its_engine_starts_again() -> None:
    """Whatever life it has; a worker of that name is new when the old one was deleted."""
    async with manned({"u1": engine()}) as (house, departures):
        path = await add(house, "u1", "regular")
        (up,) = house.fleet.pods()
        await call(house, "PUT", path, {"draining": True})
        for life in ("2", "3"):
            house.fleet.down(up.pod)  # as discovery tells it
            house.fleet.up(replace(up, generation=Generation(life)))
            assert (await call(house, "GET", path))[1]["status"] == "drained"
            assert (await house.post("/generate", {"text": "x"}))[0] == 503
        await call(house, "PUT", path, {"draining": False})
        house.fleet.up(replace(up, generation=Generation("4")))
        assert (await house.post("/generate", {"text": "x"}))[0] == 200
        await call(house, "PUT", path, {"draining": True})
        await departures.remove(up.pod)
        await until(lambda: not house.fleet.pods())
        await add(house, "u1", "regular")
        assert (await house.post("/generate", {"text": "x"}))[0] == 200


async def test_a_worker_can_be_drained_before_it_serves() -> None:
    async with manned({"u1": engine()}) as (house, departures):
        departures.add(replace(declare({"url": house.engines["u1"].url}), pod=Pod("late")))
        assert (await call(house, "PUT", "/workers/late", {"draining": True}))[0] == 202
        assert (await call(house, "GET", "/workers/late"))[1]["draining"]
        await until(lambda: house.fleet.pods())
        assert (await call(house, "GET", "/workers/late"))[1]["status"] == "drained"
        assert (await house.post("/generate", {"text": "x"}))[0] == 503


async def test_the_log_says_who_is_drained_by_hand_and_whose_health_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with gatehouse({"u1": GOOD, "u2": GOOD}, ONCE) as house:
        for draining in (True, False):
            await call(house, "PUT", "/workers/u1", {"draining": draining})
        for well in [False] * 9 + [True] * 9:
            house.fleet.mark_health(Pod("u2"), well, SystemClock().now(), "it is on fire")
    told = [one for one in caplog.messages if one.startswith("worker ")]
    assert told == [
        "worker draining pod=u1 by=admin",
        "worker taken back pod=u1 by=admin",
        "worker unhealthy pod=u2 why=it is on fire action=no requests",
        "worker healthy pod=u2",
    ]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
@pytest.mark.parametrize(("method", "path"), [("PUT", "/workers/u1"), ("POST", "/workers")])
async def test_a_body_that_is_not_called_json_is_told_what_to_call_it(
    method: str, path: str, kind: str
) -> None:
    async with gatehouse({"u1": GOOD}, ONCE) as house:
        body, head = b'{"draining": true, "url": "http://x:1"}', {"content-type": kind}
        async with house.session.request(method, house.url + path, data=body, headers=head) as said:
            error = (await said.json())["error"]
            assert (said.status, error["param"]) == (400, "body")
            assert kind in error["message"] and "application/json" in error["message"]


async def test_a_worker_with_a_name_of_its_own_is_also_known_by_where_it_is() -> None:
    async with gatehouse({"u1": GOOD, "u2": GOOD}, ONCE) as house:
        at = house.engines["u2"].url.removeprefix("http://")
        for given in ("u2", at, worker_id(Pod("u2"))):
            status, found = await call(house, "GET", f"/workers/{given}")
            assert (status, found["pod"]) == (200, "u2"), given
        assert (await call(house, "PUT", f"/workers/{at}", {"draining": True}))[0] == 202
        assert (await call(house, "GET", "/workers/u2"))[1]["draining"]
        status, told = await call(house, "GET", "/workers/127.0.0.1:9")
        assert (status, told["code"]) == (400, "BAD_REQUEST")
        assert told["error"] == "no worker '127.0.0.1:9'; there are u1, u2"


async def test_every_cache_is_emptied_and_who_did_not_is_named() -> None:
    bad = replies(answer(b"no", 500))
    facts = {"d2": {"engine": "vllm"}}
    async with gatehouse({"p1": GOOD, "d1": bad, "d2": GOOD}, ONCE, facts=facts) as house:
        status, body, _ = await house.post("/flush_cache", {})
        told = json.loads(body)
        assert status == 502
        assert told["successful"] == [house.engines[name].url for name in ("p1", "d2")]
        assert [one["worker"] for one in told["failed"]] == [house.engines["d1"].url]
        assert house.engines["p1"].requests[0].startswith(b"POST /flush_cache ")
        assert house.engines["d2"].requests[0].startswith(b"POST /reset_prefix_cache ")


@pytest.mark.parametrize("path", ["/workers", "/get_loads"])
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({}, 200),
        ({"origin": "http://evil"}, 401),
        ({"origin": "http://evil", "authorization": "Bearer root"}, 200),
        ({"origin": "http://evil", "authorization": "bearer root"}, 200),
        ({"origin": "http://evil", "authorization": "Basic root"}, 401),
        ({"origin": "http://evil", "authorization": "root"}, 401),
        ({"x-real-ip": "1.1.1.1", "authorization": "Bearer roo"}, 401),
    ],
)
async def test_who_may_use_admin_routes(path: str, sent: dict[str, str], status: int) -> None:
    async with (
        gatehouse({}, RouterSettings(admin_key="root")) as house,
        house.session.get(house.url + path, headers=sent) as found,
    ):
        assert found.status == status


async def test_the_docs_page_shows_every_route_and_needs_nothing_from_elsewhere() -> None:
    async with gatehouse({}, ONCE) as house:
        status, page = await house.get("/docs")
        assert status == 200
        _, schema = await house.get("/openapi.json")
        for path in schema["paths"]:
            assert path in page
        assert "bootstrap_port" in page and "<script" not in page
        for word in ("http://", "https://", "//cdn", "src=", "@import", "url("):
            assert word not in page, word


# body -> param, and what the sentence says: the member, its value where that may be shown
REFUSED: list[tuple[bytes, str, str]] = [
    (b"{bad", "body", "body is no valid JSON: Expecting property name"),
    (b"", "body", "body: must be a JSON object"),
    (b"[]", "body", "body: must be a JSON object"),
    (b"{}", "url", "url is missing"),
    (b'{"url": 5}', "url", "url 5: must be a valid string"),
    (b'{"url": "ftp://h:1"}', "url", "url 'ftp://h:1': must be like http://host:port"),
    (b'{"url": "http://h:1", "priority": "high"}', "priority", "priority 'high': must be a valid"),
    (b'{"url": "http://h:1", "bootstrap_port": 70000}', "bootstrap_port", "bootstrap_port 70000: "),
    (b'{"url": "http://h:1", "labels": {"a": 5}}', "labels.a", "labels.a 5: must be a valid"),
    (b'{"url": "http://h:1", "events": 5}', "events", "events 5: must be a valid string"),
    (b'{"url": "http://h:1", "events": "tcp//x"}', "events", "events 'tcp//x': must be like tcp"),
    (b'{"url": "http://h:1", "runtime": "trt"}', "runtime", "runtime 'trt': must be one of"),
    (b'{"url": "http://h:1", "handoff": "x"}', "handoff", "handoff 'x': must be one of"),
    (b'{"url": "http://h:1", "worker_type": "x"}', "worker_type", "worker_type 'x': must be one"),
    (b'{"url": "http://h:1", "api_key": "a secret"}', "api_key", "api_key: must match pattern"),
    (b'{"url": "http://h:1", "api_key": 31415}', "api_key", "api_key: must be a valid string"),
]


@pytest.mark.parametrize(("body", "param", "says"), REFUSED)
async def test_a_body_that_cannot_be_is_answered_with_its_own_member_and_value(
    body: bytes, param: str, says: str
) -> None:
    async with manned({}) as (house, _):
        status, raw, _ = await house.post("/workers", body, JSON)
        error = json.loads(raw)["error"]
        assert (status, error["param"]) == (400, param)
        assert error["message"].startswith(says)
        assert "secret" not in error["message"] and "31415" not in error["message"]

"""API: the error table, sizes, keys, and the admin routes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from dataclasses import replace
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import Request
from kit.gatehouse import gatehouse, worker
from kit.peer import Call, answer, replies
from kit.wait import until

from kvplane.router.access import admit
from kvplane.router.admin_workers import worker_id
from kvplane.router.discovery import Waiting
from kvplane.router.errors import GatewayError
from kvplane.router.settings import AdmissionSettings, RetrySettings, RouterSettings
from kvplane.router.target import Lost
from kvplane.vocabulary import Pod, Role, Stage, WorkerUp

GOOD = replies(answer(b"{}"))
ENGINES = {"p1": GOOD, "d1": GOOD}
SETTINGS = RouterSettings(
    tokenizer="builtin",
    retry=RetrySettings(retries=0),
    admission=AdmissionSettings(most_body_bytes=100_000),
)
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "x"}]

# path, body, status, code, param
TABLE: list[tuple[str, Any, int, str, str | None]] = [
    (CHAT, b"{not json", 400, "invalid_request", None),
    (CHAT, b"[1]", 400, "invalid_request", None),
    (CHAT, {"messages": "x"}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": []}, 400, "invalid_request", "messages"),
    (CHAT, {"messages": ["x"]}, 400, "invalid_request", "messages[0]"),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "invalid_request", "messages[0].role"),
    (
        CHAT,
        {"messages": [*HELLO, {"role": "user", "content": 5}]},
        400,
        "invalid_request",
        "messages[1].content",
    ),
    ("/v1/completions", {"prompt": [-1]}, 400, "invalid_request", "prompt"),
    ("/v1/completions", {"prompt": [[1], [2**32]]}, 400, "invalid_request", "prompt[1]"),
    (CHAT, {"messages": HELLO, "stream": 1}, 400, "invalid_request", "stream"),
    (CHAT, {"messages": HELLO, "tools": "x"}, 400, "invalid_request", "tools"),
    (CHAT, {"messages": HELLO, "model": "other"}, 404, "model_not_found", "model"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "y" * 500}], "model": "tiny"},
        400,
        "context_length_exceeded",
        "messages",
    ),
    ("/v1/completions", {"prompt": [[1], []]}, 400, "invalid_request", "prompt[1]"),
    ("/v1/completions", {"prompt": [7] * 200}, 400, "context_length_exceeded", "prompt"),
    ("/generate", {}, 400, "invalid_request", "text"),
    (CHAT, b" " * 100_001, 413, "payload_too_large", None),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "param"), TABLE)
async def test_bad_input_is_an_error_of_openais_shape(
    path: str, body: Any, status: int, code: str, param: str | None
) -> None:
    facts = {"p1": {"max_tokens": 200}, "d1": {"max_tokens": 200}}
    async with gatehouse(ENGINES, SETTINGS, facts=facts) as house:
        got, raw, headers = await house.post(path, body)
        error = json.loads(raw)["error"]
        assert (got, error["code"]) == (status, code), error
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
        assert error["message"]
        if code == "invalid_request" and param is not None:
            assert param in error["message"], "the sentence alone says which member is wrong"
        assert headers["x-request-id"]
        assert headers["content-type"] == "application/json"
        assert house.engines["p1"].requests == house.engines["d1"].requests == []
        assert house.idle


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200)]
)
async def test_a_body_that_is_packed_is_refused_by_the_name_of_its_packing(
    coding: str, status: int
) -> None:
    async with gatehouse(ENGINES, SETTINGS) as house:
        body, packed = b'{"text":"x"}', {"content-encoding": coding}
        got, raw, _ = await house.post("/generate", body, packed)
        assert got == status
        if status == 415:
            assert f"content-encoding {coding!r}" in json.loads(raw)["error"]["message"]


async def test_no_workers_is_a_503_at_once() -> None:
    async with gatehouse({}, SETTINGS) as house:
        status, body, _ = await house.post(CHAT, {"messages": HELLO})
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_prefill_available")
    async with gatehouse({"p1": GOOD}, SETTINGS) as house:
        status, body, _ = await house.post(CHAT, {"messages": HELLO})
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_decode_available")


async def test_a_body_without_a_length_is_cut_at_the_limit_too() -> None:
    async with gatehouse(ENGINES, SETTINGS) as house:
        reader, writer = await asyncio.open_connection(*house.url[7:].split(":"))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(30):
            writer.write(b"2000\r\n" + b" " * 0x2000 + b"\r\n")
        head = await reader.readuntil(b"\r\n")
        assert b" 413 " in head
        writer.close()


async def test_the_api_key_is_needed_where_there_is_one() -> None:
    settings = RouterSettings(admission=AdmissionSettings(api_key="secret"))
    async with gatehouse(ENGINES, settings) as house:
        for given in ({}, {"authorization": "Bearer wrong"}):
            status, body, _ = await house.post("/generate", {"text": "x"}, given)
            assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        good = {"authorization": "Bearer secret"}
        assert (await house.post("/generate", {"text": "x"}, good))[0] == 200


async def test_more_requests_than_allowed_are_told_to_come_back() -> None:
    gate = asyncio.Event()

    async def slow(call: Call) -> None:
        while await call.request():
            await gate.wait()
            await call.send(answer())

    settings = RouterSettings(admission=AdmissionSettings(most_requests=2, queue=0))
    async with gatehouse({"p1": slow, "d1": slow}, settings) as house:
        two = [asyncio.create_task(house.post("/generate", {"text": "x"})) for _ in range(2)]
        await until(lambda: len(house.engines["d1"].requests) == 2)
        status, body, headers = await house.post("/generate", {"text": "x"})
        assert (status, json.loads(body)["error"]["code"]) == (429, "overloaded")
        assert headers["retry-after"] == "1"
        gate.set()
        assert [status for status, _, _ in await asyncio.gather(*two)] == [200, 200]


async def test_hostile_members_and_headers_never_reach_an_engine() -> None:
    body = {"text": "x", "bootstrap_host": "2.2.2.2", "bootstrap_room": 0, "custom": 1}
    hostile = {
        "x-override-bootstrap-host": "2.2.2.2",
        "x-override-bootstrap-room": "1",
        "x-kvplane-room": "1",
        "cookie": "a=b",
        "x-request-id": "a b",
    }
    async with gatehouse(ENGINES, SETTINGS) as house:
        status, _, headers = await house.post("/generate", body, hostile)
        assert status == 200
        for name in ("p1", "d1"):
            request = house.engines[name].requests[0].lower()
            assert b"2.2.2.2" not in request
            assert b"x-override" not in request
            assert b"cookie" not in request
            assert b'"custom": 1' in request
        assert headers["x-request-id"] != "a b"


async def test_other_engine_routes_go_to_one_worker() -> None:
    async with gatehouse({"p1": replies(answer(b"[1]")), "d1": GOOD}, SETTINGS) as house:
        status, body, headers = await house.post("/v1/embeddings", b'{"input":"x"}')
        assert (status, body) == (200, b"[1]")
        assert headers["x-request-id"]
        assert house.engines["d1"].requests == []
        status, body, _ = await house.post("/nowhere", {})
        assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")


async def test_liveness_and_readiness() -> None:
    async with gatehouse(ENGINES, SETTINGS) as house:
        assert await house.get("/liveness") == (200, "OK")
        assert await house.get("/health") == (200, "OK")
        ready = {"status": "ready", "healthy_workers": 2, "total_workers": 2}
        assert await house.get("/readiness") == (200, ready)
        house.fleet.drain(Pod("d1"))
        status, found = await house.get("/readiness")
        assert (status, found["reason"]) == (503, "no healthy decode: d1 draining")


async def test_models_keep_what_their_engine_says() -> None:
    entry = {"id": "tiny", "object": "model", "max_model_len": 512, "parent": None}
    models = replies(answer(json.dumps({"object": "list", "data": [entry]}).encode()))
    facts = {"p1": {"adapters": ("tiny-lora",), "max_tokens": 512}}
    async with gatehouse({"p1": models, "d1": GOOD}, SETTINGS, facts=facts) as house:
        status, found = await house.get("/v1/models")
        assert status == 200
        assert found["data"][0] == entry
        assert found["data"][1]["id"] == "tiny-lora"
        assert (await house.get("/v1/models/tiny"))[1] == entry
        assert (await house.get("/v1/models/none"))[0] == 404
    async with gatehouse({}, SETTINGS) as house:
        assert await house.get("/v1/models") == (200, {"object": "list", "data": []})
        assert (await house.get("/server_info"))[0] == 503


async def test_the_diagnosis_names_what_keeps_requests_from_being_served() -> None:
    async with gatehouse({"p1": GOOD}, SETTINGS) as house:
        status, found = await house.get("/diagnosis")
        assert status == 200
        assert found["blocked"]
        assert any(one["culprit"] == "decode pool" for one in found["findings"])


ROOMS = ["0", "-1", "x", "9223372036854775808", "1" * 400, "٣"]


@pytest.mark.parametrize("room", [*ROOMS, "1" * 5000, "0" * 19 + "1" * 5000])
async def test_a_room_that_cannot_be_is_a_400(room: str) -> None:
    async with gatehouse({}, SETTINGS) as house:
        status, found = await house.get(f"/rooms/{room}")
        assert (status, found["error"]["param"]) == (400, "room")


async def test_unknown_rooms_and_requests_are_404_and_bad_queries_400() -> None:
    async with gatehouse({}, SETTINGS) as house:
        assert (await house.get("/rooms/9223372036854775807"))[0] == 404
        assert (await house.get("/requests/none"))[0] == 404
        assert await house.get("/rooms") == (200, {"rooms": []})
        status, found = await house.get("/rooms?limit=0")
        assert (status, found["error"]["param"]) == (400, "limit")
        assert (await house.get("/openapi.json"))[0] == 200


HEADED = ["/liveness", "/health", "/readiness", "/v1/models", "/workers", "/rooms", "/diagnosis"]


@pytest.mark.parametrize("path", [*HEADED, "/docs", "/rooms/1", "/nowhere"])
async def test_head_is_answered_as_get_is_without_a_body(path: str) -> None:
    """As balancers and `wget --spider` ask for it."""
    async with gatehouse(ENGINES, SETTINGS) as house:
        parts = urlsplit(house.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        rest = b" HTTP/1.1\r\nhost: x\r\n"
        told = []
        for method, more in ((b"GET", b""), (b"HEAD", b"connection: close\r\n")):
            writer.write(method + b" " + path.encode() + rest + more + b"\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            rows = {row.partition(b":")[0]: row for row in head.lower().split(b"\r\n")[1:]}
            told.append((head.split()[1], rows[b"content-type"], rows[b"content-length"]))
            if method == b"GET":
                await reader.readexactly(int(rows[b"content-length"].partition(b":")[2]))
        assert told[0] == told[1]
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("path", [*HEADED, "/docs", "/rooms/1", "/index/workers"])
async def test_a_path_with_a_slash_behind_it_is_none_and_sends_nobody_elsewhere(path: str) -> None:
    async with gatehouse(ENGINES, SETTINGS) as house:
        found = await house.session.get(
            f"{house.url}{path}/", headers={"host": "evil"}, allow_redirects=False
        )
        assert found.status == 404 and "location" not in found.headers


class Desk:
    """Discovery as the admin routes use it."""

    def __init__(self) -> None:
        self.added: list[WorkerUp] = []

    def add(self, up: WorkerUp) -> None:
        if any(known.pod == up.pod for known in self.added):
            raise ValueError(f"worker {up.pod}: is already there")
        self.added.append(up)

    async def remove(self, pod: Pod) -> bool:
        self.added = [up for up in self.added if up.pod != pod]
        return True

    def waiting(self) -> list[Waiting]:
        return [Waiting(up, "no answer yet") for up in self.added]

    def named(self) -> dict[Pod, WorkerUp]:
        return {up.pod: up for up in self.added}


def declare(table: Any) -> WorkerUp:
    if not table["url"].startswith("http"):
        raise ValueError(f"url {table['url']!r}: must be like http://host:port")
    return worker(table["url"].removeprefix("http://"), table["url"], Role(table["role"]))


async def test_workers_are_added_listed_drained_and_removed() -> None:
    desk = Desk()
    async with gatehouse(ENGINES, SETTINGS, desk=desk, declare=declare) as house:
        new = {"url": "http://10.0.0.9:1", "worker_type": "decode", "priority": 7}
        status, body, headers = await house.post("/workers", new)
        told = json.loads(body)
        assert (status, told["status"]) == (202, "accepted")
        assert headers["location"] == f"/workers/{told['worker_id']}"
        assert (await house.post("/workers", new))[0] == 400
        _, found = await house.get("/workers")
        assert found["total"] == 3
        assert found["stats"] == {"prefill_count": 1, "decode_count": 2, "regular_count": 0}
        _, one = await house.get(headers["location"])
        assert (one["is_healthy"], one["reason"]) == (False, "no answer yet")
        async with house.session.delete(house.url + headers["location"]) as gone:
            assert gone.status == 202
        assert desk.added == []
        url = f"{house.url}/workers/{worker_id(Pod('p1'))}"
        async with house.session.put(url, json={"draining": True}) as changed:
            assert changed.status == 202
        status, body, _ = await house.post("/generate", {"text": "x"})
        assert status == 503
        assert "draining" in json.loads(body)["error"]["message"]


async def test_a_prefill_no_decode_can_find_is_listed_as_such_and_gets_no_request() -> None:
    async with gatehouse(ENGINES, SETTINGS) as house:
        lost = Lost(Stage.RESOLVE_TOPOLOGY, "bootstrap server p1:8998: no answer within 2.0 s")
        house.fleet.mark_lost(Pod("p1"), lost)
        _, found = await house.get("/workers")
        (prefill,) = (one for one in found["workers"] if one["pod"] == "p1")
        assert (prefill["is_healthy"], prefill["reason"]) == (False, str(lost))
        assert (await house.get("/readiness"))[0] == 503
        status, body, _ = await house.post("/generate", {"text": "x"})
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (503, "no_prefill_available")
        assert error["stage"] == "resolve-topology" and str(lost) in error["message"]


async def test_bad_workers_are_refused_by_name() -> None:
    async with gatehouse({}, SETTINGS, desk=Desk(), declare=declare) as house:
        for body, param in (
            ({}, "url"),
            ({"url": 5}, "url"),
            ({"url": "ftp://x"}, "url"),
            ({"url": "http://x:1", "worker_type": "queen"}, "worker_type"),
            ({"url": "http://x:1", "bootstrap_port": 70000}, "bootstrap_port"),
        ):
            status, raw, _ = await house.post("/workers", body)
            assert (status, json.loads(raw)["error"]["param"]) == (400, param)
        assert (await house.get("/workers/nobody"))[0] == 400
        status, found = await house.get(f"/workers/{worker_id(Pod('nobody'))}")
        assert (status, found["code"]) == (404, "WORKER_NOT_FOUND")


async def test_workers_need_the_admin_key_unless_on_loopback() -> None:
    settings = RouterSettings(admin_key="root")
    async with gatehouse({}, settings) as house:
        assert (await house.get("/workers"))[0] == 200
        for name in ("x-forwarded-for", "origin"):
            async with house.session.get(house.url + "/workers", headers={name: "x"}) as found:
                assert found.status == 401
        headers = {"x-forwarded-for": "x", "authorization": "Bearer root"}
        async with house.session.get(house.url + "/workers", headers=headers) as found:
            assert found.status == 200
    headers = {"origin": "x"}
    async with (
        gatehouse({}) as house,
        house.session.get(house.url + "/workers", headers=headers) as found,
    ):
        assert found.status == 403


CALLERS = {
    "127.0.0.1": True,
    "::1": True,
    "::ffff:127.0.0.1": True,  # as a door of both families, `--host ::`, sees 127.0.0.1
    "::ffff:192.0.2.7": False,
    "192.0.2.7": False,
    "2001:db8::7": False,
    "testclient": False,
}


@pytest.mark.parametrize(("host", "let_in"), CALLERS.items())
def test_this_machine_is_known_however_its_address_is_written(host: str, let_in: bool) -> None:
    scope: dict[str, Any] = {"type": "http", "headers": [], "client": (host, 40000)}
    with contextlib.nullcontext() if let_in else pytest.raises(GatewayError, match="loopback"):
        admit(Request(scope), "")
    behind = scope | {"headers": [(b"x-forwarded-for", b"192.0.2.7")]}
    with pytest.raises(GatewayError, match="loopback"):
        admit(Request(behind), "")


BAD_TEXTS = [r"http://\ud800:80", r"http://a\r\nb:80", r"http://h\u0000:80"]


@pytest.mark.parametrize("text", BAD_TEXTS)
@pytest.mark.parametrize("member", ["url", "model_id", "events", "replay", "tokenizer", "runtime"])
async def test_a_worker_whose_name_could_not_be_shown_is_refused(member: str, text: str) -> None:
    desk = Desk()
    async with gatehouse(ENGINES, SETTINGS, desk=desk, declare=declare) as house:
        body = f'{{"url":"http://h:80","{member}":"{text}"}}'
        status, told, _ = await house.post(
            "/workers", body.encode(), {"content-type": "application/json"}
        )
        assert status == 400 and json.loads(told)["error"]["param"].startswith(member)
        assert not desk.waiting()
        assert (await house.get("/workers"))[0] == 200  # nothing is poisoned


async def test_what_breaks_inside_is_a_500_in_the_shape_of_every_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with gatehouse(ENGINES, SETTINGS) as house:
        monkeypatch.setattr(house.ledger, "rooms", lambda *_: 1 / 0)
        status, found = await house.get("/rooms")
        assert (status, found["error"]["code"]) == (500, "internal_error")


async def test_many_rooms_make_no_header_that_nobody_takes() -> None:
    """FR-AP-13: 4096 rooms in one header are 81 kB; clients and proxies take 8, 16 or 64."""
    body = {"prompt": ["a"] * 32, "n": 128}
    async with gatehouse(ENGINES, SETTINGS) as house:
        status, _, headers = await house.post("/v1/completions", body)
        assert (status, headers["x-kvplane-rooms"]) == (200, "4096")
        shown = headers["x-kvplane-room"].split(",")
        assert len(shown) == len(set(shown)) == 128
        assert sum(len(name) + len(value) for name, value in headers.items()) < 4096
        _, found = await house.get(f"/requests/{headers['x-request-id']}")
        rooms = found["attempts"][0]["stages"]
        assert len(rooms) == 4096 and set(shown) <= rooms.keys()
        status, _, headers = await house.post("/v1/completions", {"prompt": ["a"] * 128})
        assert len(headers["x-kvplane-room"].split(",")) == 128
        assert "x-kvplane-rooms" not in headers


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"7," * 2_000_000 + b"7]}",
        b'{"bootstrap_room":[' + b'"a",' * 1_000_000 + b'1],"prompt":"x"}',
        b'{"prompt":[' + b'"a",' * 4095 + b'"a"],"n":128}',
        b'{"prompt":"' + b"a" * 5_000_000 + b'"}',
    ],
    ids=["ids", "reserved member", "rooms", "text"],
)
async def test_a_monstrous_body_keeps_nobody_else_waiting(body: bytes) -> None:
    facts = {"p1": {"max_tokens": 200}, "d1": {"max_tokens": 200}}
    settings = replace(SETTINGS, admission=AdmissionSettings(most_body_bytes=2**25))
    async with gatehouse(ENGINES, settings, facts=facts) as house:
        sent = house.session.post(f"{house.url}/v1/completions", data=BytesIO(body))
        asked = asyncio.ensure_future(sent)
        worst = 0.0
        while not asked.done():
            begun = time.process_time()  # all threads: what others do on this machine is no finding
            await asyncio.sleep(0.001)
            worst = max(worst, time.process_time() - begun)
        async with await asked as answer:
            assert answer.status in (200, 400)
        assert worst < 0.5, worst

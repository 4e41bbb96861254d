"""Sending: what SGLang's engines are sent, refuse, and hear of an attempt's end; stand-ins behind a
real gateway."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, Script, answer, replies
from kit.standin import Between, SglangStandin
from kit.wait import until

from kvplane.router.settings import RetrySettings, RouterSettings
from kvplane.vocabulary import Pod, Worker

CHAT = {"messages": [{"role": "user", "content": "x"}]}
ONCE = RouterSettings(retry=RetrySettings(retries=0))
TWICE_MORE = RouterSettings(retry=RetrySettings(retries=2, first_wait_s=0.01))


@asynccontextmanager
async def pair(
    settings: RouterSettings | None = None, way: str = "", **kind: Any
) -> AsyncIterator[tuple[Gatehouse, SglangStandin, SglangStandin]]:
    """A gateway over one prefill and one decode that meet by room."""
    between = Between()
    prefill = SglangStandin(between, prefill=True, **kind)
    decode = SglangStandin(between, **kind)
    facts = {name: {"handoff": way} for name in ("p1", "d1")}
    scripts = {"p1": prefill.script, "d1": decode.script}
    async with gatehouse(scripts, settings, facts=facts) as house:
        yield house, prefill, decode
        await until(lambda: house.idle, what="all given back")


BODIES: dict[str, tuple[str, dict[str, Any], int]] = {  # FR-RT-05, FR-RT-06
    "one": ("/generate", {"text": "a"}, 1),
    "one in a list": ("/v1/completions", {"prompt": ["a"]}, 1),
    "two": ("/v1/completions", {"prompt": ["a", "b"]}, 2),
    "ids": ("/v1/completions", {"prompt": [[1, 2], [3]]}, 2),
    "33": ("/v1/completions", {"prompt": ["a"] * 33}, 33),
    "texts": ("/generate", {"text": ["a", "b"]}, 2),
    "id lists": ("/generate", {"input_ids": [[1], [2]]}, 2),
    "n of a chat": ("/v1/chat/completions", CHAT | {"n": 3}, 3),
    "n of a completion": ("/v1/completions", {"prompt": "a", "n": 3}, 3),
}


@pytest.mark.parametrize("way", ["sglang", "sglang-lists"])
async def test_each_prompt_and_sample_meets_in_its_own_room_and_all_answers_come(way: str) -> None:
    """FR-RT-05, FR-RT-06."""
    async with pair(way=way) as (house, prefill, decode):
        for name, (path, body, count) in BODIES.items():
            prefill.used, decode.used = [], []
            status, raw, headers = await house.post(path, body)
            if way == "sglang" and name == "n of a chat":
                assert (status, json.loads(raw)["error"]["param"]) == (400, "n")
                continue
            assert status == 200, (name, raw)
            found = json.loads(raw)
            texts = found["choices"] if path != "/generate" else found
            texts = texts if isinstance(texts, list) else [texts]
            assert [one["text"] for one in texts] == [f"t{at}" for at in range(count)], name
            rooms = [int(room) for room in headers["x-kvplane-room"].split(",")]
            assert len(rooms) == count, name
            assert rooms == decode.used == prefill.used, name
            for one in (prefill.bodies[-1], decode.bodies[-1]):
                if way == "sglang-lists" or not name.startswith("n of"):
                    assert {member: one[member] for member in body} == body


@pytest.mark.parametrize(
    ("way", "kind", "status"),
    [("sglang-lists", {"scalar": True}, 400), ("sglang-counted", {"scalar": True}, 200),
     ("sglang-lists", {}, 200), ("sglang-counted", {}, 200)],
)  # fmt: skip
async def test_three_samples_of_a_chat_come_or_the_engines_no_at_once(
    way: str, kind: dict[str, bool], status: int
) -> None:
    """FR-RT-05: engines that take lists, and engines that take scalars only."""
    async with pair(way=way, **kind) as (house, prefill, decode):
        begun = time.monotonic()
        got, raw, headers = await house.post("/v1/chat/completions", CHAT | {"n": 3})
        assert got == status
        assert time.monotonic() - begun < 5
        if status == 200:
            assert len(json.loads(raw)["choices"]) == 3
            assert [str(room) for room in decode.used] == headers["x-kvplane-room"].split(",")
            assert len(set(prefill.used)) == 3
        else:
            assert b"bootstrap_host" in raw


async def test_with_headers_engines_meet_over_the_clients_own_bytes() -> None:
    raw = b'{ "text" : "a", "z" : 1.50 }'
    async with pair(way="sglang-headers", headers=True) as (house, _, decode):
        status, _, headers = await house.post("/generate", raw)
        assert status == 200
        assert house.engines["d1"].requests[0].endswith(raw)
        assert house.engines["p1"].requests[0].endswith(raw)
        assert str(decode.used[0]) == headers["x-kvplane-room"]


ROOMS = [1, "1", -1, 2**64, [1, 1], {"a": 1}, None, 1.5, True]


async def test_a_room_of_the_client_never_reaches_an_engine() -> None:
    """FR-RT-04: two at once, in every type; also hosts, ranks, and headers that mean them."""
    hostile = {
        "x-override-bootstrap-room": "1",
        "x-override-bootstrap-host": "2.2.2.2",
        "x-override-routed-dp-rank": "7",
        "x-data-parallel-rank": "7",
        "x-override-rid": "mine",
    }
    body = {"text": "a", "bootstrap_host": "2.2.2.2", "routed_dp_rank": 7}
    async with pair(headers=True) as (house, prefill, decode):
        for room in ROOMS:
            sent = body | {"bootstrap_room": room}
            asked = [house.post("/generate", sent, hostile) for _ in range(2)]
            assert [status for status, _, _ in await asyncio.gather(*asked)] == [200, 200], room
        assert len(set(decode.used)) == 2 * len(ROOMS)
        assert sorted(prefill.used) == sorted(decode.used)
        assert all(1 < room < 2**63 for room in decode.used)
        for one in (*prefill.bodies, *decode.bodies):
            assert one["bootstrap_host"] == "127.0.0.1"
            assert "routed_dp_rank" not in one
        for head in (*prefill.heads, *decode.heads):
            assert not [name for name in head if name.startswith("x-override")]
            assert "x-data-parallel-rank" not in head


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
async def test_the_rank_of_a_unified_worker_travels(engine: str) -> None:
    facts = {"u1": {"dp_size": 3, "engine": engine}}
    async with gatehouse({"u1": replies(answer())}, ONCE, facts=facts) as house:
        for _ in range(4):
            _, _, headers = await house.post("/v1/completions", {"prompt": "a"})
            head, _, raw = house.engines["u1"].requests[-1].partition(b"\r\n\r\n")
            if engine == "vllm":
                (line,) = (one for one in head.split(b"\r\n") if b"data-parallel-rank" in one)
                rank = int(line.partition(b": ")[2])
            else:
                rank = json.loads(raw)["routed_dp_rank"]
            assert headers["x-kvplane-decode"] == str(Worker(Pod("u1"), rank))


# -- the end of an attempt


async def hang(call: Call) -> None:
    while request := await call.request():
        if b"/abort_request" in request.split(b"\r\n", 1)[0]:
            await call.send(answer(b""))
        else:
            await call.closed()
            return


def aborts(house: Gatehouse, name: str) -> list[str]:
    """Names an engine was told to end."""
    return [
        json.loads(request.partition(b"\r\n\r\n")[2])["rid"]
        for request in house.engines[name].requests
        if request.startswith(b"POST /abort_request ")
    ]


def names(house: Gatehouse, name: str) -> list[Any]:
    """What an engine's requests were called."""
    return [
        json.loads(request.partition(b"\r\n\r\n")[2]).get("rid")
        for request in house.engines[name].requests
        if request.startswith(b"POST /generate ")
    ]


async def cut(call: Call) -> None:
    await call.request()
    call.reset()


FAILS: dict[str, tuple[Script, int]] = {
    "400": (replies(answer(b'{"message":"no"}', 400)), 400),
    "500": (replies(answer(b"{}", 500)), 502),
    "closed": (cut, 502),
}


@pytest.mark.parametrize(("fails", "status"), FAILS.values(), ids=FAILS)
@pytest.mark.parametrize("way", ["sglang", "kvplane"])
async def test_a_prefill_that_fails_ends_its_decode_by_name_once(
    fails: Script, status: int, way: str
) -> None:
    """FR-RT-01: the decode would never answer."""
    facts = {name: {"engine": way} for name in ("p1", "d1")}
    async with gatehouse({"p1": fails, "d1": hang}, ONCE, facts=facts) as house:
        begun = time.monotonic()
        got, raw, _ = await house.post("/generate", {"text": "a"})
        assert got == status
        assert time.monotonic() - begun < 3
        if status == 400:
            assert raw == b'{"message":"no"}'
        else:
            error = json.loads(raw)["error"]
            assert (error["code"], error["stage"]) == ("prefill_failed", "first-byte")
        await until(lambda: house.idle)
        await until(lambda: aborts(house, "d1"))
        assert aborts(house, "d1") == names(house, "d1")
        assert aborts(house, "p1") == []
        assert house.count("aborts_total", side="decode", outcome="told") == 1
        assert house.engines["d1"].seen_closed >= 1


async def test_a_prefill_that_is_silent_is_ended_too() -> None:
    """FR-RT-01: nobody failed, a deadline passed; both are told."""
    async with gatehouse({"p1": hang, "d1": hang}, ONCE) as house:
        asking = asyncio.ensure_future(house.post("/generate", {"text": "a"}))
        await until(lambda: all(house.engines[name].requests for name in ("p1", "d1")))
        for leg in house.legs._live:
            leg.check(math.inf)
        status, raw, _ = await asking
        error = json.loads(raw)["error"]
        assert (status, error["code"], error["stage"]) == (504, "deadline_exceeded", "first-byte")
        await until(lambda: aborts(house, "d1") and aborts(house, "p1"))
        assert aborts(house, "d1") == names(house, "d1") == aborts(house, "p1")
        await until(lambda: house.idle)


async def test_every_attempt_has_fresh_rooms_and_a_name_of_its_own() -> None:
    """FR-RT-03: three attempts, one room on both legs of each, one abort for each, and none begins
    while one before it lives."""
    failing, live = replies(answer(b"{}", 500)), list[int]()
    async with gatehouse({"p1": failing, "d1": hang}, TWICE_MORE) as house:
        sending = house.gateway._means.sending
        begin = sending.begin

        async def watched(*of: Any) -> Any:
            live.append(house.legs.live - sending._errands.out)
            return await begin(*of)

        sending.begin = watched  # type: ignore[method-assign]
        status, _, _ = await house.post("/generate", {"text": "a"})
        assert status == 502
        await until(lambda: len(aborts(house, "d1")) == 3)
        rooms = {
            name: [
                json.loads(request.partition(b"\r\n\r\n")[2])["bootstrap_room"]
                for request in house.engines[name].requests
                if request.startswith(b"POST /generate ")
            ]
            for name in ("p1", "d1")
        }
        assert len(set(rooms["p1"])) == 3
        assert rooms["p1"] == rooms["d1"]
        assert live == [0, 0, 0]
        assert len(set(names(house, "d1"))) == 3
        assert aborts(house, "d1") == names(house, "d1")
        await until(lambda: house.idle)


async def test_no_prefill_is_asked_again_once_decode_has_said_a_token() -> None:
    """FR-RT-03."""

    async def decode(call: Call) -> None:
        await call.request()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        await call.send(head + b"transfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        call.reset()

    async with gatehouse({"p1": replies(answer()), "d1": decode}, TWICE_MORE) as house:
        status, raw, _ = await house.post("/generate", {"text": "a", "stream": True})
        assert status == 200
        assert raw.startswith(b"data: 1\n\n")
        assert b"decode_failed" in raw
        assert len(house.engines["p1"].requests) == 1
        await until(lambda: house.idle)


@pytest.mark.parametrize("given", ["mine", None])
async def test_a_client_that_leaves_ends_both_by_their_exact_name(given: str | None) -> None:
    async with gatehouse({"p1": hang, "d1": hang}, ONCE) as house:
        body = {"text": "a"} | ({"rid": given} if given else {})
        task = asyncio.create_task(house.post("/generate", body))
        await until(lambda: names(house, "p1") and names(house, "d1"))
        task.cancel()
        await until(lambda: aborts(house, "p1") and aborts(house, "d1"))
        assert aborts(house, "p1") == aborts(house, "d1") == names(house, "d1")
        assert given is None or aborts(house, "d1") == [given]
        await until(lambda: house.idle)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/embeddings"])
async def test_a_name_by_which_others_would_end_never_reaches_an_engine(path: str) -> None:
    """SGLang ends all whose names begin with the one that is aborted: ours are not to be had."""
    body = {"text": "a"} if path == "/generate" else {"prompt": "a", "input": "a"}
    engine = replies(answer())
    async with gatehouse({"p1": engine, "d1": engine, "u1": engine}, ONCE) as house:
        for given in ("", "k", "kvplane-", "kvplane-0", ["mine", "kv"]):
            status, raw, _ = await house.post(path, body | {"rid": given})
            error = json.loads(raw)["error"]
            assert (status, error["code"], error["param"]) == (400, "invalid_request", "rid"), given
        assert not any(one.requests for one in house.engines.values())
        for other in ("mine", "kvp-1", "Kvplane-1", None, 7):
            assert (await house.post(path, body | {"rid": other}))[0] == 200, other


async def test_a_name_of_the_client_is_used_again_only_when_it_was_ended() -> None:
    """Else the abort of the first attempt could end the second."""
    seen: list[str] = []

    async def decode(call: Call) -> None:
        while request := await call.request():
            if request.startswith(b"POST /abort_request "):
                await asyncio.sleep(0.1)
                seen.append("ended")
                await call.send(answer(b""))
            elif "asked" not in seen:
                seen.append("asked")
                await call.closed()
            else:
                seen.append("asked")
                await call.send(answer(b'{"text":"t"}'))

    prefill = replies(answer(b"{}", 500), answer(b"{}"))
    async with gatehouse({"p1": prefill, "d1": decode}, TWICE_MORE) as house:
        status, raw, _ = await house.post("/generate", {"text": "a", "rid": "mine"})
        assert (status, raw) == (200, b'{"text":"t"}')
        assert seen == ["asked", "ended", "asked"]
        await until(lambda: house.idle)
        assert house.gateway._means.sending._ending == {}


async def test_each_prompt_of_a_list_is_ended_by_the_name_sglang_gives_it() -> None:
    async with gatehouse({"p1": FAILS["500"][0], "d1": hang}, ONCE) as house:
        await house.post("/generate", {"text": ["a", "b"]})
        await until(lambda: len(aborts(house, "d1")) == 2)
        (name,) = names(house, "d1")
        assert sorted(aborts(house, "d1")) == [f"{name}_0", f"{name}_1"]
        await until(lambda: house.idle)


async def test_an_answer_that_ended_well_is_aborted_nowhere() -> None:
    async with pair() as (house, prefill, decode):
        for stream in (False, True):
            status, _, _ = await house.post("/generate", {"text": "a", "stream": stream})
            assert status == 200
        await until(lambda: house.idle)
        assert prefill.aborted == decode.aborted == []


# -- log-probabilities

SIX = [[-0.5, at, None] for at in range(6)]
EIGHT = [[-1.5, at, None] for at in range(8)]


def likely(prefill: bool) -> Any:
    def told(body: dict[str, Any]) -> Any:
        meta = {"id": "r", "input_token_logprobs": SIX if prefill else []}
        return {"text": "t", "meta_info": meta | {"output_token_logprobs": EIGHT}}

    return told


@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompts_log_probabilities_come_from_prefill(stream: bool) -> None:
    """FR-AP-05."""
    async with pair() as (house, prefill, decode):
        prefill.answers, decode.answers = likely(True), likely(False)
        body = {"text": "a", "return_logprob": True, "logprob_start_len": 0, "stream": stream}
        status, raw, headers = await house.post("/generate", body)
        assert status == 200
        if stream:
            assert raw.endswith(b"\n\ndata: [DONE]\n\n")
            raw = raw.split(b"\n\n")[0].removeprefix(b"data: ")
        else:
            assert int(headers["content-length"]) == len(raw)
        meta = json.loads(raw)["meta_info"]
        assert (meta["input_token_logprobs"], meta["output_token_logprobs"]) == (SIX, EIGHT)


async def test_without_being_asked_for_the_answer_is_decodes_alone() -> None:
    async with pair() as (house, prefill, decode):
        prefill.answers, decode.answers = likely(True), likely(False)
        _, raw, _ = await house.post("/generate", {"text": "a"})
        assert json.loads(raw)["meta_info"]["input_token_logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_prefill_is_not_hidden_by_decodes_answer(stream: bool) -> None:
    """FR-AP-05: decode has said everything before prefill fails."""
    said = asyncio.Event()

    async def late(call: Call) -> None:
        await call.request()
        await said.wait()
        await call.send(answer(b'{"error":{"message":"boom"}}', 500))

    decode = SglangStandin(Between(), answers=likely(False), prefill=True)

    async def first(call: Call) -> None:
        task = asyncio.create_task(decode.script(call))
        await until(lambda: decode.bodies)
        await asyncio.sleep(0.02)
        said.set()
        await task

    async with gatehouse({"p1": late, "d1": first}, ONCE) as house:
        body = {"text": "a", "return_logprob": True, "stream": stream}
        status, raw, _ = await house.post("/generate", body)
        assert (status, json.loads(raw)["error"]["code"]) == (502, "prefill_failed")


@pytest.mark.parametrize("side", ["p1", "d1"])
async def test_more_than_can_be_held_is_the_callers_to_ask_for_less(
    monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    monkeypatch.setattr("kvplane.router.attempt.MOST_BYTES", 2000 if side == "p1" else 10**6)
    monkeypatch.setattr("kvplane.router.dispatch.MOST_BYTES", 2000 if side == "d1" else 10**6)
    long = {"text": "t" * 5000, "meta_info": {"input_token_logprobs": SIX}}
    async with pair(TWICE_MORE) as (house, prefill, decode):
        (prefill if side == "p1" else decode).answers = lambda body: long
        status, raw, _ = await house.post("/generate", {"text": "a", "return_logprob": True})
        error = json.loads(raw)["error"]
        assert (status, error["code"]) == (400, "invalid_request")
        assert "ask for fewer log-probabilities" in error["message"]
        assert len(decode.bodies) == 1  # and no other pair is bothered

"""Gateway: requests through a real port, two scripted engines behind it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse, worker
from kit.peer import Call, Script, answer, replies
from kit.ports import free_port
from kit.wait import until
from prometheus_client import CollectorRegistry

from kvplane.index import View, chain
from kvplane.router.fleet import Fleet
from kvplane.router.gateway import Gateway
from kvplane.router.legs_connection import STALE_S
from kvplane.router.metrics import RouterMetrics
from kvplane.router.prompts import Prompts
from kvplane.router.settings import BreakerSettings, DriftSettings, RetrySettings, RouterSettings
from kvplane.tokens import Tokenizer
from kvplane.vocabulary import (
    Epoch,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Role,
    Stored,
    Tier,
    Worker,
)

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello " * 20}]}
USED = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 48}}}
PREFILLED = replies(answer(json.dumps(USED).encode()))
DECODED = replies(answer(b'{"id":"1","choices":[]}'))
SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
ONCE = RouterSettings(retry=RetrySettings(retries=0), tokenizer="builtin")
KNOWING = RouterSettings(tokenizer="builtin", retry=RetrySettings(first_wait_s=0.01))


def sent(request: bytes) -> dict[str, object]:
    body: dict[str, object] = json.loads(request.partition(b"\r\n\r\n")[2])
    return body


async def hang(call: Call) -> None:
    await call.asked()
    await call.closed()


def teach(house: Gatehouse, name: str, blocks: int, state: Knowledge = Knowledge.EXACT) -> None:
    """The index says that a worker holds the first blocks of CHAT."""
    tokens = Tokenizer.load("builtin").chat(CHAT["messages"])  # type: ignore[arg-type]
    hashes = chain(tokens, Namespace("tiny", 16)).blocks[:blocks]
    who = Worker(Pod(name))
    house.view.apply(Stored(who, Epoch(1), Tier.GPU, None, hashes, 16))
    house.view.apply(Known(who, Epoch(1), state, "as told", 0.0))


async def test_a_chat_passes_both_legs_and_says_how_it_went() -> None:
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING) as house:
        status, body, headers = await house.post(
            "/v1/chat/completions", CHAT, {"x-request-id": "mine-1", "authorization": "Bearer k"}
        )
        assert (status, body) == (200, b'{"id":"1","choices":[]}')
        assert headers["x-request-id"] == "mine-1"
        assert (headers["x-kvplane-prefill"], headers["x-kvplane-decode"]) == ("p1", "d1")
        assert headers["x-kvplane-depth"].startswith("0/")
        assert headers["x-kvplane-knowledge"] == "off"
        assert "not configured" in headers["x-kvplane-reason"]
        room = int(headers["x-kvplane-room"])
        assert 0 < room < 2**63
        first, second = house.engines["p1"].requests[0], house.engines["d1"].requests[0]
        assert sent(first) == sent(second)
        assert sent(first)["bootstrap_room"] == room
        assert sent(first)["bootstrap_host"] == "127.0.0.1"
        assert b"x-request-id: mine-1" in first
        assert b"authorization: Bearer k" in first
        await until(lambda: house.idle)
        _, found = await house.get(f"/rooms/{room}")
        assert found["outcome"] == "ok"
        assert found["cached_tokens"] == {"predicted": 0, "actual": 48}
        assert found["why"]["prefill_policy"] == "prefix"
        _, request = await house.get("/requests/mine-1")
        assert request["attempts"][0]["rooms"] == [str(room)]


async def test_the_prefill_that_holds_the_prefix_is_taken_and_its_depth_is_told() -> None:
    facts = {name: {"events": ("tcp://x:1",)} for name in ("p1", "p2", "p3")}
    scripts: dict[str, Script] = {"p1": PREFILLED, "p2": PREFILLED, "p3": PREFILLED, "d1": DECODED}
    async with gatehouse(scripts, KNOWING, facts=facts) as house:
        teach(house, "p2", 4)
        for _ in range(3):
            _, _, headers = await house.post("/v1/chat/completions", CHAT)
            assert headers["x-kvplane-prefill"] == "p2"
            held, _, asked = headers["x-kvplane-depth"].partition("/")
            assert (int(held), int(asked) > 4) == (4, True)
            assert headers["x-kvplane-knowledge"] == "exact"
            assert "x-kvplane-reason" not in headers
        await until(lambda: house.idle)
        assert house.count("predicted_cached_tokens_total", worker="p2") == 3 * 64
        assert house.count("actual_cached_tokens_total", worker="p2") == 3 * 48


async def test_partial_knowledge_and_no_tokens_are_never_silent() -> None:
    facts = {"p1": {"events": ("tcp://x:1",)}}
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING, facts=facts) as house:
        teach(house, "p1", 1, Knowledge.PARTIAL)
        _, _, headers = await house.post("/v1/chat/completions", CHAT)
        assert headers["x-kvplane-knowledge"] == "partial"
        assert headers["x-kvplane-reason"] == "as told"
        parts = [{"type": "image_url", "image_url": {"url": "x"}}]
        picture = {"model": "tiny", "messages": [{"role": "user", "content": parts}]}
        status, _, headers = await house.post("/v1/chat/completions", picture)
        assert status == 200
        assert headers["x-kvplane-knowledge"] == "dark"
        assert headers["x-kvplane-reason"] == "prompt holds more than text"
        assert house.count("knowledge_total", state="dark", reason="multimodal") == 1


async def test_each_prompt_and_sample_has_a_room_of_its_own() -> None:
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING) as house:
        body = {"model": "tiny", "prompt": ["a", "b"], "n": 2}
        _, _, headers = await house.post("/v1/completions", body)
        rooms = [int(room) for room in headers["x-kvplane-room"].split(",")]
        assert len(set(rooms)) == 4
        assert sent(house.engines["p1"].requests[0])["bootstrap_room"] == rooms


async def test_rooms_follow_the_dp_rank_of_the_prefill() -> None:
    facts = {"p1": {"dp_size": 4}}
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING, facts=facts) as house:
        ranks = set()
        for _ in range(8):
            _, _, headers = await house.post("/generate", {"text": "x"})
            rank = int(headers["x-kvplane-room"]) % 4
            body = sent(house.engines["p1"].requests[-1])
            assert body["routed_dp_rank"] == body["disagg_prefill_dp_rank"] == rank
            ranks.add(rank)
        assert len(ranks) > 1


async def test_a_unified_worker_serves_alone() -> None:
    async with gatehouse({"u1": DECODED}, KNOWING) as house:
        status, _, headers = await house.post("/v1/chat/completions", CHAT)
        assert status == 200
        assert "x-kvplane-room" not in headers
        assert headers["x-kvplane-prefill"] == headers["x-kvplane-decode"] == "u1"
        assert house.count("not_disaggregated_total", reason="unified worker") == 1
        assert "bootstrap_room" not in sent(house.engines["u1"].requests[0])


EVENTS = (b'{"choices":[]}', json.dumps(USED).encode(), b"[DONE]")
LINES = [b"data: " + event + b"\n\n" for event in EVENTS]
STREAMED = SSE + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in LINES) + b"0\r\n\r\n"


@pytest.mark.parametrize("reply", [answer(json.dumps(USED).encode()), STREAMED])
async def test_a_unified_worker_tells_its_cached_tokens_itself(reply: bytes) -> None:
    facts = {"u1": {"events": ("tcp://x:1",)}}
    async with gatehouse({"u1": replies(reply)}, KNOWING, facts=facts) as house:
        teach(house, "u1", 3)
        status, body, headers = await house.post("/v1/chat/completions", CHAT)
        assert status == 200 and b"cached_tokens" in body
        await until(lambda: house.idle)
        _, request = await house.get(f"/requests/{headers['x-request-id']}")
        told = request["attempts"][0]["cached_tokens"]
        assert told == {"predicted": 48, "actual": 48}
        assert house.count("comparisons_total", worker="u1", outcome="equal") == 1


async def test_a_worker_that_never_holds_what_was_foretold_is_doubted_and_served() -> None:
    facts = {"p1": {"events": ("tcp://x:1",)}}
    settings = replace(KNOWING, drift=DriftSettings(settle_s=0.01, tick_s=0.01))
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, settings, facts=facts) as house:
        teach(house, "p1", 6)
        for _ in range(6):
            status, _, headers = await house.post("/v1/chat/completions", CHAT)
            assert (status, headers["x-kvplane-knowledge"]) == (200, "exact")
        await until(lambda: house.gateway.loop.verdict(Worker(Pod("p1"))), what="an alarm")
        assert house.count("comparisons_total", worker="p1", outcome="over") >= 5
        assert house.count("prediction_error_ratio", worker="p1") == 0.5
        assert house.count("drift", worker="p1", cause="unknown") == 1
        status, _, headers = await house.post("/v1/chat/completions", CHAT)
        assert (status, headers["x-kvplane-knowledge"]) == (200, "partial")
        assert "index says 96 tokens, p1 found 48" in headers["x-kvplane-reason"]
        _, found = await house.get("/diagnosis")
        assert [one["culprit"] for one in found["findings"]] == ["p1"]
        house.gateway.forget(Pod("p1"))
        _, _, headers = await house.post("/v1/chat/completions", CHAT)
        assert headers["x-kvplane-knowledge"] == "exact"


async def test_its_check_of_the_index_hears_of_the_followers_trouble_and_when_a_request_began() -> (
    None
):
    class Away:
        ready = asyncio.Event()

        def down_s(self) -> float:
            return 4.2

        def in_touch_at(self) -> float:
            return 7.0

    facts = {"p1": {"events": ("tcp://x:1",)}}
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING, facts=facts) as house:
        told: list[Any] = []
        begun = time.monotonic()
        house.gateway.loop.answered = lambda *each: told.append(each)  # type: ignore[method-assign]
        teach(house, "p1", 6)
        await house.post("/v1/chat/completions", CHAT)
        await until(lambda: told)
        ((foretold, actual, routed),) = told
        assert (foretold.predicted, actual) == (96, 48) and begun <= routed <= time.monotonic()
        parts = house.legs, house.ledger, RouterMetrics(CollectorRegistry())
        loop = Gateway(View(), Fleet(), Prompts(), *parts, follower=Away()).loop
        assert (loop.store_down_s(), loop._in_touch_at()) == (4.2, 7.0)
        assert loop._blind() == "the index is still being read"


async def test_a_stream_reaches_the_client_event_by_event() -> None:
    gate = asyncio.Event()

    async def decode(call: Call) -> None:
        await call.request()
        await call.send(SSE + b"8\r\ndata: 1\n\r\n")
        await gate.wait()
        await call.send(b"2\r\n\n\n\r\n0\r\n\r\n")

    async with gatehouse({"p1": PREFILLED, "d1": decode}, KNOWING) as house:
        body = CHAT | {"stream": True}
        async with house.session.post(house.url + "/v1/chat/completions", json=body) as found:
            assert found.content_type == "text/event-stream"
            assert await found.content.readany() == b"data: 1\n"
            gate.set()
            assert await found.content.read() == b"\n\n"
        await until(lambda: house.idle)


async def test_a_stream_that_breaks_ends_with_an_error_event() -> None:
    async def decode(call: Call) -> None:
        await call.request()
        await call.send(SSE + b"9\r\ndata: 1\n\n\r\n")

    async with gatehouse({"p1": PREFILLED, "d1": decode}, KNOWING) as house:
        status, body, headers = await house.post("/generate", {"text": "x", "stream": True})
        assert status == 200
        events = [event for event in body.split(b"\n\n") if event.strip()]
        error = json.loads(events[-1].strip().removeprefix(b"data: "))["error"]
        assert events[0] == b"data: 1"
        assert error["code"] == "decode_failed"
        assert error["room"] == headers["x-kvplane-room"]
        assert b"[DONE]" not in body
        assert len(house.engines["d1"].requests) == 1
        _, found = await house.get("/rooms?failed=true")
        assert found["rooms"][0]["room"] == error["room"]


async def test_a_failed_prefill_is_a_502_with_the_room_and_decode_is_closed() -> None:
    failing = replies(answer(b'{"error":{"message":"boom"}}', 500))
    async with gatehouse({"p1": failing, "d1": hang}, ONCE) as house:
        status, body, headers = await house.post("/v1/chat/completions", CHAT)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (502, "prefill_failed")
        assert error["room"] == headers["x-kvplane-room"]
        assert "boom" in error["message"]
        assert headers["x-kvplane-prefill"] == "p1"
        await until(lambda: house.engines["d1"].seen_closed == 1, timeout_s=1)
        await until(lambda: house.idle)


async def test_another_attempt_takes_a_fresh_room_and_leaves_out_the_guilty() -> None:
    failing = replies(answer(b"{}", 500))
    scripts: dict[str, Script] = {"p1": failing, "p2": PREFILLED, "d1": DECODED}
    settings = RouterSettings(prefill_policy="round_robin", retry=RetrySettings(first_wait_s=0.01))

    async def decode(call: Call) -> None:
        while await call.request():
            await asyncio.sleep(0.02)
            await call.send(answer(b"good"))

    scripts["d1"] = decode
    async with gatehouse(scripts, settings) as house:
        for number in range(4):
            status, body, headers = await house.post(
                "/generate", {"text": "x"}, {"x-request-id": f"r{number}"}
            )
            assert (status, body) == (200, b"good")
            assert headers["x-kvplane-prefill"] == "p2"
        bodies = [sent(r) for name in ("p1", "p2") for r in house.engines[name].requests]
        rooms = [body["bootstrap_room"] for body in bodies]
        assert len(set(rooms)) == len(rooms) > 4
        attempts = [(await house.get(f"/requests/r{n}"))[1]["attempts"] for n in range(4)]
        assert any(len(one) == 2 and one[0]["outcome"] == "failed" for one in attempts)
        assert house.count("retries_total", reason="prefill_failed") >= 1
        await until(lambda: house.idle)


async def test_a_4xx_is_neither_tried_again_nor_held_against_anybody() -> None:
    body = b'{"object":"error","message":"too hot"}'
    async with gatehouse({"p1": replies(answer(body, 422)), "d1": hang}, KNOWING) as house:
        for _ in range(12):
            status, found, _ = await house.post("/generate", {"text": "x"})
            assert (status, found) == (422, body)
        assert len(house.engines["p1"].requests) == 12
        states = house.gateway.breakers.states(house.gateway.clock.now())
        assert set(map(str, states.values())) == {"closed"}


async def test_a_connection_that_died_while_kept_is_tried_again_unseen_and_blames_nobody() -> None:
    async def decode(call: Call) -> None:
        await call.request()
        await call.send(answer(b"good"))
        await call.request()  # the second on this connection is never answered

    async with gatehouse({"p1": PREFILLED, "d1": decode}, KNOWING) as house:
        for _ in range(4):
            status, body, _ = await house.post("/generate", {"text": "x"})
            assert (status, body) == (200, b"good")
        rooms = [sent(request)["bootstrap_room"] for request in house.engines["d1"].requests]
        assert len(set(rooms)) == len(rooms) > 4
        await until(lambda: house.idle)
        assert house.count("legs_total", side="decode", worker="d1", outcome="fault") == 0
        assert house.count("legs_total", side="decode", worker="d1", outcome="success") == 4


@pytest.mark.parametrize("retries", [0, 2])
async def test_where_all_kept_connections_died_one_further_attempt_is_on_new_ones(
    retries: int,
) -> None:
    """Both engines' at once, as when something on the way lost its state; it is none of the
    attempts that the settings allow, and happens once."""
    opened = asyncio.Event()

    async def once(call: Call) -> None:
        await call.request()
        await opened.wait()
        await call.send(answer(b"good"))
        await call.request()
        call.reset()

    settings = RouterSettings(retry=RetrySettings(retries=retries, first_wait_s=0.01))
    async with gatehouse({"p1": once, "d1": once}, settings) as house:
        first = [asyncio.create_task(house.post("/generate", {"text": "x"})) for _ in range(5)]
        await until(lambda: all(len(one.requests) == 5 for one in house.engines.values()))
        opened.set()
        assert {status for status, _, _ in await asyncio.gather(*first)} == {200}
        await until(lambda: house.legs.idling == 10)
        _, _, headers = found = await house.post("/generate", {"text": "x"})
        assert found[:2] == (200, b"good")
        _, told = await house.get(f"/requests/{headers['x-request-id']}")
        assert [one["outcome"] for one in told["attempts"]] == ["failed", "ok"]
        await until(lambda: house.idle)
        assert house.count("legs_total", side="decode", worker="d1", outcome="fault") == 0
        await until(lambda: house.legs.sockets == 2)


async def test_an_engine_that_dies_over_a_request_on_a_kept_connection_is_to_blame() -> None:
    """It had the request for longer than it takes to learn that a connection is dead: what it died
    of is not sent again where nothing may be, nor without a word against it."""

    async def dies(call: Call) -> None:
        await call.request()
        await call.send(answer(b"good"))
        await call.request()
        await asyncio.sleep(1.1 * STALE_S)
        call.reset()

    settings = RouterSettings(retry=RetrySettings(retries=0))
    async with gatehouse({"p1": PREFILLED, "d1": dies}, settings) as house:
        assert (await house.post("/generate", {"text": "x"}))[0] == 200
        status, body, _ = await house.post("/generate", {"text": "x"})
        assert (status, json.loads(body)["error"]["code"]) == (502, "decode_failed")
        assert len(house.engines["d1"].requests) == 2
        await until(lambda: house.idle)
        assert house.count("legs_total", side="decode", worker="d1", outcome="fault") == 1


async def test_only_the_circuit_of_the_guilty_opens() -> None:
    failing = replies(answer(b"{}", 500))
    settings = RouterSettings(
        retry=RetrySettings(retries=0), breaker=BreakerSettings(faults=3, pause_s=30)
    )
    async with gatehouse({"p1": failing, "d1": hang}, settings) as house:
        for _ in range(3):
            assert (await house.post("/generate", {"text": "x"}))[0] == 502
        status, body, headers = await house.post("/generate", {"text": "x"})
        assert status == 503
        assert json.loads(body)["error"]["code"] == "no_prefill_available"
        assert int(headers["retry-after"]) >= 1  # the last of its kind is tried again soon
        now = house.gateway.clock.now()
        states = {str(w): str(s) for w, s in house.gateway.breakers.states(now).items()}
        assert states == {"p1": "open", "d1": "closed"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
async def test_an_engine_that_is_down_is_told_at_once(path: str) -> None:
    async with gatehouse({"p1": hang, "d1": hang}, ONCE) as house:
        down = house.fleet.target(Worker(Pod("p1")))
        assert down is not None
        down.url = f"http://127.0.0.1:{free_port()}"
        begun = time.monotonic()
        status, body, _ = await house.post(path, CHAT | {"text": "x"})
        assert time.monotonic() - begun < 3
        assert (status, json.loads(body)["error"]["code"]) == (503, "prefill_failed")


@pytest.mark.parametrize("moment", ["before", "in stream"])
async def test_a_client_that_leaves_closes_both_engines_and_frees_all(moment: str) -> None:
    async def talk(call: Call) -> None:
        await call.asked()
        await call.send(SSE + b"9\r\ndata: 1\n\n\r\n")
        await call.closed()

    scripts = {"p1": hang, "d1": hang if moment == "before" else talk}
    async with gatehouse(scripts, KNOWING) as house:
        for number in range(5):
            reader, writer = await asyncio.open_connection(*house.url[7:].split(":"))
            body = b'{"text":"x","stream":true}'
            head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
            writer.write(head + body)
            if moment == "in stream":
                await reader.readuntil(b"data: 1")
            else:
                await until(lambda n=number: len(house.engines["d1"].requests) == n + 1)  # type: ignore[misc]
            writer.close()
            await until(lambda: house.engines["d1"].open == 0, timeout_s=2)
        await until(lambda: house.idle and house.engines["p1"].open == 0, timeout_s=5)
        _, found = await house.get("/rooms")
        assert {room["outcome"] for room in found["rooms"]} == {"client_gone"}


async def test_stages_of_both_engines_are_collected_after_the_answer() -> None:
    def engine(stages: list[str], by: str) -> Script:
        async def script(call: Call) -> None:
            while request := await call.request():
                if request.startswith(b"GET /rooms/"):
                    told = [
                        {"stage": s, "outcome": "ok", "duration_s": 0.1, "by": by} for s in stages
                    ]
                    await call.send(answer(json.dumps({"stages": told}).encode()))
                else:
                    await call.send(answer(b"{}"))

        return script

    scripts = {
        "p1": engine(["register"], "p1"),
        "d1": engine(["consume", "verify", "connect", "resolve-rank", "resolve-topology"], "d1"),
    }
    facts = {name: {"engine": "kvplane"} for name in scripts}
    async with gatehouse(scripts, KNOWING, facts=facts) as house:
        _, _, headers = await house.post("/v1/chat/completions", CHAT)
        _, found = await house.get(f"/rooms/{headers['x-kvplane-room']}")
        told = [stage for stage in found["stages"] if stage["by"] != "gateway"]
        assert [stage["stage"] for stage in told] == [
            "register",
            "resolve-topology",
            "resolve-rank",
            "connect",
            "verify",
            "consume",
        ]
        assert found["collected"]
        assert {stage["by"] for stage in told} == {"p1", "d1"}
        own = [stage for stage in found["stages"] if stage["by"] == "gateway"]
        assert sum(stage["duration_s"] for stage in own) == pytest.approx(
            found["duration_s"], abs=1e-4
        )


async def test_a_worker_added_at_runtime_serves() -> None:
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING) as house:
        house.fleet.down(Pod("d1"))
        status, body, _ = await house.post("/generate", {"text": "x"})
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_decode_available")
        house.fleet.up(worker("d9", house.engines["d1"].url, Role.DECODE))
        status, _, headers = await house.post("/generate", {"text": "x"})
        assert (status, headers["x-kvplane-decode"]) == (200, "d9")


async def test_two_hundred_random_aborts_leave_nothing_behind() -> None:
    """Streams and plain answers, cut at any moment; FR-RT-02, FR-RT-13."""
    chance = random.Random(11)

    async def talk(call: Call) -> None:
        while request := await call.request():
            await asyncio.sleep(chance.random() / 100)
            if b'"stream":true' not in request:
                await call.send(answer(b"{}"))
                continue
            await call.send(SSE)
            for _ in range(3):
                await call.send(b"9\r\ndata: 1\n\n\r\n")
                await asyncio.sleep(chance.random() / 200)
            await call.send(b"0\r\n\r\n")

    async with gatehouse({"p1": talk, "p2": talk, "d1": talk, "d2": talk}, KNOWING) as house:

        async def client() -> None:
            for _ in range(20):
                _, writer = await asyncio.open_connection(*house.url[7:].split(":"))
                stream = b"true" if chance.random() < 0.5 else b"false"
                body = b'{"text":"x","stream":%s}' % stream
                head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
                writer.write((head % len(body) + body)[: chance.randrange(20, 200)])
                await asyncio.sleep(chance.random() / 30)
                writer.close()

        await asyncio.gather(*(client() for _ in range(10)))
        await until(lambda: house.idle, timeout_s=5, what="all given back")
        status, _, _ = await house.post("/generate", {"text": "x"})
        assert status == 200
        await until(lambda: house.idle)
        # Never more than were needed at once: two legs of each, and a word to both engines that
        # they were cut, while the next two are under way already.
        assert house.legs.sockets <= 4 * 10


async def test_evidence_that_is_dropped_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.router.aftermath.MOST_TASKS", 0)
    facts = {name: {"engine": "kvplane"} for name in ("p1", "d1")}  # they tell their stages
    async with gatehouse({"p1": PREFILLED, "d1": DECODED}, KNOWING, facts=facts) as house:
        status, _, _ = await house.post("/generate", {"text": "x"})
        assert status == 200
        await until(lambda: house.count("evidence_dropped_total") == 1)
        await until(lambda: house.idle)

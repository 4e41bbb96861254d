"""API of a unified engine, through a real server on a real port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from kit.wait import until

from kvplane.vocabulary import Role

Start = Callable[..., Awaitable[Any]]
PROMPT = list(range(40, 90))


async def events(answer: aiohttp.ClientResponse) -> list[Any]:
    """Data of a server-sent stream; DONE as a text."""
    lines = [line async for line in answer.content if line.strip()]
    data = [line.removeprefix(b"data: ").strip() for line in lines]
    return ["DONE" if item == b"[DONE]" else json.loads(item) for item in data]


def limit(tokens: int) -> dict[str, Any]:
    return {"max_new_tokens": tokens, "ignore_eos": True}


async def test_generate_answers_in_sglangs_form_and_the_second_time_from_its_cache(
    start: Start,
) -> None:
    both = await start()
    status, first = await both.post("/generate", input_ids=PROMPT, sampling_params=limit(6))
    assert status == 200
    assert len(first["output_ids"]) == 6 == len(first["text"])
    assert first["meta_info"]["finish_reason"] == {"type": "length", "length": 6}
    assert first["meta_info"]["prompt_tokens"] == 50
    assert first["meta_info"]["cached_tokens"] == 0
    _, second = await both.post("/generate", input_ids=PROMPT, sampling_params=limit(6))
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"]["cached_tokens"] == 48


async def test_a_prompt_of_whole_blocks_computes_its_last_block_again(start: Start) -> None:
    both = await start()
    for cached in (0, 32):
        _, answer = await both.post("/v1/completions", prompt=PROMPT[:48], max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_an_answers_blocks_are_found_by_the_next_turn(start: Start) -> None:
    both = await start()
    made = await both.tokens(input_ids=PROMPT, sampling_params=limit(40))
    longer = [*PROMPT, *made, 1, 2, 3]
    _, answer = await both.post("/generate", input_ids=longer, sampling_params=limit(20))
    assert answer["meta_info"]["cached_tokens"] == 80
    fresh = await start()
    assert answer["output_ids"] == await fresh.tokens(input_ids=longer, sampling_params=limit(20))


async def test_completions_and_chat_answer_in_openais_form(start: Start) -> None:
    both = await start()
    _, text = await both.post("/v1/completions", prompt="Hallo", max_tokens=5, ignore_eos=True)
    assert text["object"] == "text_completion"
    assert text["id"].startswith("cmpl-")
    assert (text["model"], text["choices"][0]["finish_reason"]) == ("tiny", "length")
    assert len(text["choices"][0]["text"]) == 5
    assert text["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    messages = [{"role": "user", "content": "Hello"}]
    _, chat = await both.post(
        "/v1/chat/completions", messages=messages, max_tokens=5, ignore_eos=True
    )
    assert chat["object"] == "chat.completion"
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert len(chat["choices"][0]["message"]["content"]) == 5


async def test_batches_and_samples_come_back_in_their_order(start: Start) -> None:
    both = await start()
    _, answer = await both.post(
        "/v1/completions", prompt=["one", "two"], n=2, max_tokens=4, ignore_eos=True
    )
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer["usage"]["prompt_tokens"] == 8
    _, several = await both.post("/generate", text=["one", "two"], sampling_params=limit(4))
    assert [item["text"] for item in several] == [texts[0], texts[2]]


async def test_a_stream_says_the_same_as_a_whole_answer(start: Start) -> None:
    both = await start()
    body = {"prompt": "Hello", "max_tokens": 12, "ignore_eos": True}
    _, whole = await both.post("/v1/completions", **body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with both.http.post("/v1/completions", json=body | options) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = await events(answer)
    assert done == "DONE"
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert ("".join(texts), len(texts)) == (whole["choices"][0]["text"], 12)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 12)


async def test_a_chat_stream_begins_with_the_role_and_ends_with_a_reason(start: Start) -> None:
    both = await start()
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "stream": True,
            "ignore_eos": True}  # fmt: skip
    async with both.http.post("/v1/chat/completions", json=body) as answer:
        *chunks, done = await events(answer)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert len("".join(delta.get("content", "") for delta in deltas)) == 4
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (done, "usage" in chunks[0]) == ("DONE", False)


async def test_a_generate_stream_grows_and_is_sent_token_by_token(start: Start) -> None:
    both = await start(blocks=512)
    body = {"input_ids": PROMPT, "sampling_params": limit(2000), "stream": True}
    async with both.http.post("/generate", json=body) as answer:
        line = await answer.content.readline()
        first = json.loads(line.removeprefix(b"data: "))
        assert len(first["output_ids"]) < 2000  # it came before the answer was complete
        assert both.engine.units[0].cache.at_work == 1


async def test_a_client_that_leaves_gives_back_its_pages(start: Start) -> None:
    both = await start(blocks=512)
    cache = both.engine.units[0].cache
    for stream in (True, False):
        body = {"input_ids": PROMPT, "sampling_params": limit(3000), "stream": stream}
        asking = asyncio.create_task(both.http.post("/generate", json=body))
        await until(lambda: cache.at_work == 1)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: cache.at_work == 0)
    pages = cache.pages()
    assert pages.used == len(cache.blocks())
    assert pages.free + pages.used == cache.total


async def test_who_finds_no_pages_waits_its_turn(start: Start) -> None:
    both = await start(blocks=8)
    asks = [
        both.tokens(input_ids=[*PROMPT, number], sampling_params=limit(60)) for number in range(6)
    ]
    answers = await asyncio.gather(*asks)
    assert [len(answer) for answer in answers] == [60] * 6


async def test_too_many_or_too_long_waiting_is_overload(start: Start) -> None:
    both = await start(blocks=8, most_waiting=1, queue_s=0.3)
    cache = both.engine.units[0].cache
    lease = cache.lease([1] * 100, 28)
    assert lease is not None
    first = asyncio.create_task(both.post("/generate", text="a", sampling_params=limit(4)))
    await until(lambda: both.engine.units[0]._line)
    status, refused = await both.post("/generate", text="b", sampling_params=limit(4))
    assert (status, refused["error"]["code"]) == (503, "overloaded")
    assert "wait for pages already" in refused["error"]["message"]
    status, late = await first
    assert (status, late["error"]["message"]) == (503, "no pages within 0.3 s")
    cache.give_back(lease)


async def test_more_than_all_pages_is_a_bad_request(start: Start) -> None:
    both = await start(blocks=8)
    status, answer = await both.post("/generate", input_ids=[1] * 200)
    assert status == 400
    assert "200 + 128 tokens need 21 pages; 8 pages" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "raw", "status", "param"),
    [
        ("/v1/completions", b"{", 400, "body"),
        ("/v1/completions", b"[]", 400, "body"),
        ("/v1/completions", b'{"prompt": "\xff"}', 400, "body"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user"}], "model": "x"}', 404, None),
        ("/generate", b'{"text": "a", "sampling_params": {"n": 1.5}}', 400, "sampling_params.n"),
        ("/nothing", b"{}", 404, None),
    ],
)
async def test_bad_input_is_answered_in_openais_shape(
    start: Start, path: str, raw: bytes, status: int, param: str | None
) -> None:
    both = await start()
    async with both.http.post(path, data=raw) as answer:
        assert answer.status == status
        error = (await answer.json())["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


async def test_a_body_that_is_too_large_is_refused(start: Start) -> None:
    both = await start(most_body_bytes=1000)
    status, answer = await both.post("/v1/completions", prompt="a" * 2000)
    assert (status, answer["error"]["message"]) == (400, "more than 1000 bytes")


async def test_an_aborted_request_ends_and_its_pages_come_back(start: Start) -> None:
    both = await start(blocks=512)
    body = {"input_ids": PROMPT, "sampling_params": limit(3000), "rid": "r-1"}
    asking = asyncio.create_task(both.post("/generate", **body))
    cache = both.engine.units[0].cache
    await until(lambda: cache.at_work == 1)
    assert await both.post("/abort_request", rid="other") == (200, {"aborted": 0})
    assert await both.post("/abort_request", rid="r-1") == (200, {"aborted": 1})
    status, answer = await asking
    assert (status, answer["meta_info"]["finish_reason"]["type"]) == (200, "abort")
    await until(lambda: cache.at_work == 0)
    assert (await both.post("/abort_request"))[0] == 400


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        *(("/generate", name) for name in ("model", "rid", "cache_salt")),
        *(("/generate", f"bootstrap_{name}") for name in ("room", "host", "port")),
        *(("/fault", name) for name in ("stage", "kind", "count", "rank")),
    ],
)
async def test_an_error_does_not_send_back_all_that_was_wrong(
    start: Start, path: str, wrong: str
) -> None:
    both = await start()
    right = {"input_ids": [1], "stage": "consume", "kind": "delay", "count": 1}
    value = "x" * 500_000 if wrong in ("model", "rid", "stage", "kind") else {"x": "x" * 500_000}
    status, answer = await both.post(path, **(right | {wrong: value}))
    assert status in (400, 404)
    assert len(answer["error"]["message"]) < 5000


async def test_a_request_id_is_taken_over(start: Start) -> None:
    both = await start()
    headers = {"x-request-id": "abc"}
    async with both.http.post("/v1/completions", json={"prompt": "a"}, headers=headers) as answer:
        assert answer.headers["x-request-id"] == "abc"
        assert (await answer.json())["id"] == "cmpl-abc"


async def test_flush_empties_the_cache_unless_somebody_works(start: Start) -> None:
    both = await start()
    await both.tokens(input_ids=PROMPT, sampling_params=limit(2))
    cache = both.engine.units[0].cache
    lease = cache.lease([1], 0)
    assert (await both.post("/flush_cache"))[0] == 400
    assert len(cache.blocks()) == 3
    cache.give_back(lease)
    assert (await both.post("/flush_cache"))[0] == 200
    assert cache.blocks() == []


async def test_the_engine_tells_its_facts(start: Start) -> None:
    both = await start(event_form="sglang", dp=2)
    _, info = await both.get("/server_info")
    base = both.engine.units[0].publisher.port
    assert both.engine.units[1].publisher.port == base + 1
    assert info["kv_events"]["endpoint_port_base"] == base
    assert info["kv_events"]["replay_endpoint_port_base"] > 0
    assert (info["page_size"], info["dp_size"], info["disaggregation_mode"]) == (16, 2, "null")
    assert info["kvplane"]["event_form"] == "sglang"
    assert info["kvplane"]["generation"] == both.engine.generation
    _, models = await both.get("/v1/models")
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 4096)
    assert await both.get("/health") == (200, "OK")
    _, tokens = await both.post("/tokenize", prompt="Hi")
    assert tokens == {"count": 3, "max_model_len": 4096, "tokens": [256, 72, 105]}
    _, metrics = await both.get("/metrics")
    assert 'kvplane_engine_pages{dp_rank="1",state="free"} 128.0' in metrics


async def test_truth_shows_blocks_and_an_account_of_pages(start: Start) -> None:
    both = await start()
    await both.tokens(input_ids=PROMPT, sampling_params=limit(2))
    _, truth = await both.get("/truth")
    rank = truth["ranks"][0]
    assert rank["pages"] == {"free": 125, "used": 3, "quarantined": 0, "all": 128}
    assert [block["position"] for block in rank["blocks"]] == [0, 1, 2]
    assert rank["blocks"][1]["parent"] == rank["blocks"][0]["hash"]
    assert [token for block in rank["blocks"] for token in block["tokens"]] == PROMPT[:48]
    assert truth["rooms"] == {"open": [], "remembered": 0}


async def test_switches_are_not_served_unless_allowed(start: Start) -> None:
    both = await start(faults=False)
    assert (await both.get("/truth"))[0] == 404
    assert (await both.post("/fault", stage="consume", kind="error"))[0] == 404


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"stage": "verify", "kind": "error"}, "must be one of policy-input, consume"),
        ({"stage": "consume", "kind": "flip-byte"}, "must be one of delay, hang, error, reset"),
        ({"stage": "consume", "kind": "error", "count": 0}, "count = 0"),
        ({"stage": "consume", "kind": "delay", "seconds": "1"}, "seconds = '1'"),
    ],
)
async def test_a_switch_that_makes_no_sense_is_refused(
    start: Start, body: dict[str, Any], names: str
) -> None:
    both = await start()
    status, answer = await both.post("/fault", **body)
    assert status == 400
    assert names in answer["error"]["message"]


async def test_a_unified_engine_can_be_broken_for_so_many_requests(start: Start) -> None:
    both = await start()
    await both.post("/fault", stage="consume", kind="error", count=1)
    status, answer = await both.post("/generate", text="a", sampling_params=limit(2))
    assert (status, answer["error"]["code"]) == (500, "injected_fault")
    await both.post("/fault", stage="consume", kind="reset")
    with pytest.raises(aiohttp.ClientError):
        await both.post("/generate", text="a", sampling_params=limit(2))
    await both.post("/fault", stage="consume", kind="delay", seconds=0.05)
    assert (await both.post("/generate", text="a", sampling_params=limit(2)))[0] == 200
    assert await both.get("/fault") == (200, {"armed": []})


async def test_dp_ranks_have_caches_of_their_own(start: Start) -> None:
    both = await start(dp=2)
    for rank in (0, 1, 1):
        await both.tokens(input_ids=PROMPT, sampling_params=limit(2), routed_dp_rank=rank)
    hits = [unit.cache.hits_tokens for unit in both.engine.units]
    assert hits == [0, 48]
    status, answer = await both.post("/generate", text="a", data_parallel_rank=2)
    assert status == 400
    assert "must be 0 to 1" in answer["error"]["message"]


async def test_an_engine_that_stops_tells_its_clients(start: Start) -> None:
    both = await start(blocks=512)
    body = {"input_ids": PROMPT, "sampling_params": limit(3000)}
    asking = asyncio.create_task(both.post("/generate", **body))
    await until(lambda: both.engine.units[0].cache.at_work == 1)
    await both.engine.stop()
    status, answer = await asking
    assert (status, answer["error"]["message"]) == (503, "the engine stops")
    assert (await both.get("/ready"))[0] == 503
    assert both.engine.settings.role is Role.BOTH


@pytest.mark.parametrize("room", ["1" * 5000, "0" * 30 + "1", "x", "%D9%A3", "-1", "%00"])
async def test_a_room_that_cannot_be_is_not_known_here(start: Start, room: str) -> None:
    both = await start()
    status, found = await both.get(f"/rooms/{room}")
    assert (status, found["error"]["code"]) == (404, "invalid_request")


async def test_a_body_that_says_it_is_too_long_is_refused_before_it_comes(start: Start) -> None:
    both = await start()
    reader, writer = await asyncio.open_connection("127.0.0.1", both.engine.settings.port)
    writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000000\r\n\r\n")
    assert b" 400 " in await reader.readuntil(b"\r\n")
    writer.close()


async def test_what_breaks_inside_is_a_500_in_the_shape_of_every_error(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = await start()
    monkeypatch.setattr(both.engine.evidence, "room", lambda room: 1 / 0)
    status, found = await both.get("/rooms/1")
    assert (status, found["error"]["code"]) == (500, "internal_error")

"""How likely each token was: the same whole, streamed, over a room, and when it is read again."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kit.pair import ROOMS, pair, prompt

Start = Callable[..., Awaitable[Any]]
TOKENS = prompt(50, 3)
TOLD = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}


def asked(tokens: list[int], **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 8, "ignore_eos": True}
    return {"input_ids": tokens, "sampling_params": sampling, **more}


async def chunks(two: Any, path: str, **body: Any) -> list[Any]:
    """What a stream said, without its end."""
    async with two.http.post(path, json=body | {"stream": True}) as answer:
        lines = (await answer.text()).split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_a_greedy_answer_is_the_likeliest_and_reads_the_same_as_a_prompt(
    start: Start,
) -> None:
    both = await start()
    _, answer = await both.post("/generate", **asked(TOKENS, **TOLD))
    told = answer["meta_info"]
    made = [[token for _, token, _ in told["output_token_logprobs"]]]
    made.append([tops[0][1] for tops in told["output_top_logprobs"]])
    assert made == [answer["output_ids"]] * 2
    assert all(logprob < 0 for logprob, _, _ in told["output_token_logprobs"])
    first, *others = told["input_token_logprobs"]
    assert first == [None, TOKENS[0], None] and told["input_top_logprobs"][0] is None
    assert [token for _, token, _ in others] == TOKENS[1:]
    longer = asked([*TOKENS, *answer["output_ids"]], **TOLD | {"logprob_start_len": len(TOKENS)})
    _, again = await both.post("/generate", **longer)
    assert again["meta_info"]["cached_tokens"] > 0, "what is cached is told of all the same"
    assert again["meta_info"]["input_token_logprobs"] == told["output_token_logprobs"]
    assert again["meta_info"]["input_top_logprobs"] == told["output_top_logprobs"]


@pytest.mark.parametrize("tokens", [1, 15, 16, 50])
async def test_over_a_room_prefill_tells_the_prompts_and_decode_the_answers(
    start: Start, tokens: int
) -> None:
    two, one = await pair(start), await start()
    body = asked(prompt(tokens, 3), **TOLD)
    _, alone = await one.post("/generate", **body)
    for _ in range(2):  # the second time both sides have it cached
        (_, prefill), (_, decode) = await two.post("/generate", **body)
        for side, name in ((prefill, "input"), (decode, "output")):
            for kind in ("token", "top"):
                member = f"{name}_{kind}_logprobs"
                assert side["meta_info"][member] == alone["meta_info"][member]
        assert decode["meta_info"]["input_token_logprobs"] == []
        assert decode["output_ids"] == alone["output_ids"], "the pages are as they were"
    await two.idle()


async def test_a_stream_tells_each_token_once_also_those_a_stop_text_hid(start: Start) -> None:
    both = await start()
    _, plain = await both.post("/v1/completions", prompt=TOKENS, max_tokens=12, ignore_eos=True)
    stop = plain["choices"][0]["text"][6:9]
    limits = {"max_tokens": 12, "ignore_eos": True, "stop": stop}
    body = {"prompt": TOKENS, "logprobs": 2, **limits}
    _, whole = await both.post("/v1/completions", **body)
    parts = [c["choices"][0]["logprobs"] for c in await chunks(both, "/v1/completions", **body)]
    for member, value in whole["choices"][0]["logprobs"].items():
        assert [item for part in parts for item in part[member]] == value
    assert whole["choices"][0]["logprobs"]["text_offset"] == list(range(9))
    body = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True, **limits}
    _, whole = await both.post("/v1/chat/completions", **body | {"top_logprobs": 2})
    parts = await chunks(both, "/v1/chat/completions", **body | {"top_logprobs": 2})
    told = [part["choices"][0]["logprobs"] for part in parts]
    content = [entry for part in told if part for entry in part["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)


async def test_who_asks_for_none_gets_none(start: Start) -> None:
    both = await start()
    _, chat = await both.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}])
    assert chat["choices"][0]["logprobs"] is None
    _, answer = await both.post("/generate", **asked(TOKENS, return_logprob=False))
    assert not [name for name in answer["meta_info"] if "logprobs" in name]


async def test_over_rooms_each_sample_tells_its_own(start: Start) -> None:
    two = await pair(start)
    rooms = [next(ROOMS) for _ in range(2)]
    body = {"prompt": ["one", "another"], "logprobs": 0, "max_tokens": 3, "ignore_eos": True}
    _, (_, decode) = await two.post("/v1/completions", **body, **two.triple(rooms))
    tokens = ["".join(choice["logprobs"]["tokens"]) for choice in decode["choices"]]
    assert tokens == [choice["text"] for choice in decode["choices"]]
    await two.idle()


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/completions", {"logprobs": True}, "logprobs"),
        ("/v1/completions", {"logprobs": -1}, "logprobs"),
        ("/generate", {"return_logprob": [True]}, "return_logprob"),
        ("/generate", {"return_logprob": True, "logprob_start_len": 99}, "logprob_start_len"),
    ],
)
async def test_a_wrong_wish_is_named(
    start: Start, path: str, wrong: dict[str, Any], param: str
) -> None:
    both = await start()
    name = {"/generate": "text", "/v1/completions": "prompt"}.get(path, "messages")
    given = [{"role": "user", "content": "a"}] if name == "messages" else "a"
    status, answer = await both.post(path, **{name: given}, **wrong)
    assert (status, answer["error"]["param"]) == (400, param)

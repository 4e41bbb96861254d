"""OpenAI's own Python package talks to the gateway, as its users make it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from kit.site import KEY, Site
from kit.wait import until

MESSAGES: list[Any] = [
    {"role": "system", "content": "You are small but exact, and you always say the same."},
    {"role": "user", "content": "Tell me who keeps the blocks of this conversation."},
]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "How it is outside",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]
ALL = {"ignore_eos": True}  # of the engine's own: the answer is as long as it may be


@pytest.fixture
def client(place: Site) -> Iterator[openai.OpenAI]:
    """No retries, so that what we see is what happened."""
    url = f"{place.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as found:
        yield found
    place.idle()  # whatever a test does, all is given back


def test_a_chat_answers_and_its_usage_adds_up(client: openai.OpenAI, llama: str) -> None:
    answer = client.chat.completions.create(model=llama, messages=MESSAGES, max_tokens=16)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("samples", [1, 3])
def test_a_stream_says_what_the_whole_answer_says(
    client: openai.OpenAI, llama: str, samples: int
) -> None:
    asked: Any = {"model": llama, "messages": MESSAGES, "max_tokens": 16, "n": samples}
    whole = client.chat.completions.create(**asked)
    texts, pieces, usages, reasons = [""] * samples, [0] * samples, [], {}
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options=options):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            assert not usages, "usage comes behind all choices"
            texts[choice.index] += choice.delta.content or ""
            pieces[choice.index] += bool(choice.delta.content)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert list(map(reasons.get, range(samples))) == [c.finish_reason for c in whole.choices]
    assert min(pieces) > 1, "one lump is no stream"
    assert whole.usage is not None and len(usages) == 1
    assert usages[0].completion_tokens == whole.usage.completion_tokens


def test_usage_comes_only_where_it_is_wanted(client: openai.OpenAI, llama: str) -> None:
    stream = client.chat.completions.create(
        model=llama, messages=MESSAGES, max_tokens=4, stream=True
    )
    assert [chunk.usage for chunk in stream if chunk.usage] == []


def test_completions_take_text_and_token_ids_alike(client: openai.OpenAI, llama: str) -> None:
    text = client.completions.create(model=llama, prompt="hello there", max_tokens=8)
    ids = [256, *b"hello there"]
    tokens = client.completions.create(model=llama, prompt=ids, max_tokens=8)
    assert text.choices[0].text == tokens.choices[0].text
    lists = client.completions.create(model=llama, prompt=[ids, ids[:5]], max_tokens=4)
    batch = client.completions.create(model=llama, prompt=["hello there", "hell"], max_tokens=4)
    assert [choice.text for choice in lists.choices] == [choice.text for choice in batch.choices]
    assert [choice.index for choice in batch.choices] == [0, 1]


def test_samples_and_prompts_come_from_rooms_of_their_own(
    client: openai.OpenAI, llama: str
) -> None:
    chat = client.chat.completions.with_raw_response.create(
        model=llama, messages=MESSAGES, max_tokens=4, n=3
    )
    assert [choice.index for choice in chat.parse().choices] == [0, 1, 2]
    assert len(set(chat.headers["x-kvplane-room"].split(","))) == 3
    texts = client.completions.with_raw_response.create(
        model=llama, prompt=["a", "b"], n=2, max_tokens=4
    )
    assert [choice.index for choice in texts.parse().choices] == [0, 1, 2, 3]
    assert len(set(texts.headers["x-kvplane-room"].split(","))) == 4


def test_tools_and_their_answers_are_part_of_the_prompt_and_known_exactly(
    client: openai.OpenAI, llama: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain, as in the last 40 days"},
        {"role": "user", "content": [{"type": "text", "text": "and tomorrow?"}]},
    ]
    asked: Any = {"model": llama, "messages": messages, "max_tokens": 4}
    bare = client.chat.completions.create(**asked)
    asked |= {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}
    first = client.chat.completions.create(**asked)
    assert bare.usage and first.usage
    assert first.usage.prompt_tokens > bare.usage.prompt_tokens + len(json.dumps(TOOLS)) / 2
    second = client.chat.completions.with_raw_response.create(**asked)
    held, asked_blocks = map(int, second.headers["x-kvplane-depth"].split("/"))
    assert second.headers["x-kvplane-knowledge"] == "exact"
    assert held == asked_blocks > 10, "the gateway renders tools as the engine does"
    usage = second.parse().usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens in (16 * held, 16 * (held - 1))


def test_logprobs_are_those_of_the_tokens_that_came(client: openai.OpenAI, llama: str) -> None:
    asked: Any = {"model": llama, "messages": MESSAGES, "max_tokens": 6, "extra_body": ALL}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    told = whole.choices[0].logprobs
    assert told is not None and told.content is not None and len(told.content) == 6
    assert "".join(one.token for one in told.content) == whole.choices[0].message.content
    for one in told.content:
        assert one.top_logprobs[0].token == one.token, "a greedy answer is the likeliest"
        assert 0 > one.logprob >= one.top_logprobs[1].logprob
    stream = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    parts = [c.choices[0].logprobs for c in stream if c.choices]
    assert [one for part in parts if part for one in part.content or []] == told.content
    text = client.completions.create(
        model=llama, prompt="hello", max_tokens=5, logprobs=3, extra_body=ALL
    )
    listed = text.choices[0].logprobs
    assert listed is not None and listed.tokens is not None and listed.top_logprobs is not None
    assert ("".join(listed.tokens), len(listed.tokens)) == (text.choices[0].text, 5)
    assert [len(tops) for tops in listed.top_logprobs] == [3] * 5


def test_members_we_do_not_know_pass_and_the_id_of_a_request_comes_back(
    client: openai.OpenAI, llama: str
) -> None:
    answer = client.chat.completions.create(
        model=llama, messages=MESSAGES, max_completion_tokens=3, temperature=0.5, seed=7,
        user="u-1", metadata={"a": "b"}, stop=["never said so"],
        extra_body=ALL | {"top_k": 4, "of_nobody": {"deep": [1.0]}},
        extra_headers={"x-request-id": "mine-42"},
    )  # fmt: skip
    assert answer.usage and answer.usage.completion_tokens == 3
    assert answer._request_id == "mine-42"


def test_models_are_listed_and_found_by_names_with_slashes(
    client: openai.OpenAI, llama: str
) -> None:
    assert llama in [model.id for model in client.models.list()]
    assert client.models.retrieve(llama).id == llama
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("huge")


def test_errors_are_those_the_client_knows(client: openai.OpenAI, llama: str) -> None:
    with pytest.raises(openai.NotFoundError, match="model") as unknown:
        client.chat.completions.create(model="huge", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as empty:
        client.chat.completions.create(model=llama, messages=[])
    assert (empty.value.param, empty.value.type) == ("messages", "invalid_request_error")
    long: list[Any] = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model=llama, messages=long)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.completions.create(model=llama, prompt="a", max_tokens=0)
    with pytest.raises(openai.NotFoundError):
        client.get("/nothing", cast_to=object)


def test_a_gateway_with_a_key_wants_it(place: Site, llama: str) -> None:
    for key, good in ((KEY, True), (KEY + "x", False)):
        with openai.OpenAI(base_url=f"{place.keyed_url}/v1", api_key=key, max_retries=0) as client:
            asked: Any = {"model": llama, "messages": MESSAGES, "max_tokens": 2}
            if good:
                assert client.chat.completions.create(**asked).choices
                continue
            with pytest.raises(openai.AuthenticationError) as refused:
                client.chat.completions.create(**asked)
            assert refused.value.code == "invalid_api_key"


def test_a_stream_that_breaks_is_an_error_and_no_end(place: Site, client: openai.OpenAI) -> None:
    pair = place.run(place.newcomer("brittle"))
    asked: Any = {"model": "brittle", "messages": MESSAGES, "max_tokens": 1500}
    stream = client.chat.completions.create(**asked, stream=True, extra_body=ALL)
    next(stream)
    place.run(place.house.end(pair[1].engine))
    with pytest.raises(openai.APIError) as broken:
        for _ in stream:
            pass
    assert broken.value.body is not None
    place.run(place.depart(*pair))


def test_a_stream_that_is_closed_early_stops_both_engines(
    place: Site, client: openai.OpenAI, llama: str
) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=llama, messages=MESSAGES, max_tokens=1500, stream=True, extra_body=ALL
    )
    stream = raw.parse()
    next(stream)
    stream.close()
    place.idle()
    found = place.run(place.house.get(f"/requests/{raw.headers['x-request-id']}"))
    assert found["outcome"] == "client_gone", "1500 tokens were not waited for"


async def test_a_call_that_is_cancelled_stops_both_engines(place: Site, llama: str) -> None:
    asked: Any = {"model": llama, "messages": MESSAGES, "max_tokens": 1500, "extra_body": ALL}
    headers = {"x-request-id": "cancelled-1"}
    async with openai.AsyncOpenAI(
        base_url=f"{place.url}/v1", api_key="none", max_retries=0
    ) as client:
        call = asyncio.create_task(client.chat.completions.create(**asked, extra_headers=headers))
        await until(lambda: place.at_work() > 0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await asyncio.to_thread(place.idle)
    found = await asyncio.to_thread(place.run, place.house.get("/requests/cancelled-1"))
    assert found["outcome"] == "client_gone"

"""The view of a real client: OpenAI's own Python package talks to the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from kit.plane import EngineSeat, Plane, plane

pytestmark = pytest.mark.asyncio(loop_scope="module")
MESSAGES = [
    {"role": "system", "content": "You are small but exact, and you always say the same."},
    {"role": "user", "content": "Tell me who keeps the blocks of this conversation."},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def whole() -> AsyncIterator[Plane]:
    """One prefill and one decode behind a gateway."""
    seats = [EngineSeat("prefill", "prefill"), EngineSeat("decode", "decode")]
    async with plane(seats) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(whole: Plane) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client as its users make it; no retries, so that what we see is what happened."""
    async with openai.AsyncOpenAI(
        base_url=f"{whole.url}/v1", api_key="none", max_retries=0
    ) as found:
        yield found


async def test_a_chat_answers_and_its_usage_adds_up(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=16)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    usage = answer.usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


async def test_a_stream_says_what_the_whole_answer_says(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=16)
    stream = await client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=16,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage, pieces = "", None, 0
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and chunk.choices[0].delta.content:
            text, pieces = text + chunk.choices[0].delta.content, pieces + 1
    assert text == whole.choices[0].message.content
    assert pieces > 1, "one lump is no stream"
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_completions_take_text_and_token_ids_alike(client: openai.AsyncOpenAI) -> None:
    text = await client.completions.create(model="tiny", prompt="hello there", max_tokens=8)
    ids = [256, *b"hello there"]
    tokens = await client.completions.create(model="tiny", prompt=ids, max_tokens=8)
    assert text.choices[0].text == tokens.choices[0].text
    batch = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4)
    assert [choice.index for choice in batch.choices] == [0, 1]


async def test_n_samples_come_from_rooms_of_their_own(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="tiny", messages=MESSAGES, max_tokens=4, n=3
    )
    assert len({choice.index for choice in raw.parse().choices}) == 3
    assert len(set(raw.headers["x-kvplane-room"].split(","))) == 3


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_errors_are_those_the_client_knows(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="model"):
        await client.chat.completions.create(model="huge", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as empty:
        await client.chat.completions.create(model="tiny", messages=[])
    assert empty.value.param == "messages"
    long = [{"role": "user", "content": "x" * 5000}]
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(model="tiny", messages=long)
    assert too_long.value.code == "context_length_exceeded"

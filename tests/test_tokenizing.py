"""What POST /index/rank takes a text for is what the gateway takes it for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from kvplane.parts import tokenizing
from kvplane.router.plans import Plan
from kvplane.router.prompts import Prompts, Result

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PARTS}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest_asyncio.fixture(params=["kvplane", "sglang", "vllm"])
async def prompts(request: pytest.FixtureRequest) -> AsyncIterator[Prompts]:
    made = Prompts()
    await made.start()
    made.learn("tiny", "builtin", request.param, "p1", ("sql",))
    yield made
    await made.stop()


@pytest.mark.parametrize("model", ["tiny", "sql", ""])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a b"}),
        (TEXT, {"prompt": "a b", "add_special_tokens": False}),
        (CHAT, {"messages": MESSAGES}),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS}),
        (CHAT, {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}),
        (CHAT, {"messages": MESSAGES, "add_generation_prompt": False}),
    ],
)
async def test_a_text_has_the_same_tokens_at_both_doors(
    prompts: Prompts, model: str, path: str, body: dict[str, Any]
) -> None:
    named = {"model": model, **body}
    found = await prompts.tokenise(path, named, model)
    assert found.tokens is not None
    assert list(await tokenizing(prompts)(named)) == list(found.tokens[0])


class Elsewhere:
    """An engine that tells tokens."""

    def tells(self, model: str) -> bool:
        """It is always of use to ask."""
        return True

    async def tokenise(self, found: Plan, body: dict[str, Any], model: str) -> Result:
        return ([ord(model[0]), 8],), None


async def test_where_engines_are_asked_both_doors_ask_them() -> None:
    prompts = Prompts()
    prompts.source = Elsewhere()
    prompts.learn("tiny", "", "sglang", "p1", ("sql",))
    for name in ("tiny", "sql"):
        told = await tokenizing(prompts)({"model": name, "prompt": "a"})
        found = await prompts.tokenise(TEXT, {"prompt": "a"}, "tiny")
        assert found.tokens is not None and list(told) == list(found.tokens[0])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            {"model": "x", "prompt": "a"},
            "no tokenizer for this model at the gateway, and no engine to ask: name its",
        ),
        ({"model": "tiny", "messages": []}, "'messages' is []"),
        (
            {"model": "tiny", "messages": [{"role": "boss", "content": "secret"}]},
            "the chat template refused",
        ),
    ],
)
async def test_where_there_are_no_tokens_it_says_why_and_never_the_prompt(
    prompts: Prompts, body: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError) as caught:
        await tokenizing(prompts)(body)
    assert said in str(caught.value) and "secret" not in str(caught.value)

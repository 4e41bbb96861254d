"""Tenants: equal prompts of two of them never share a block, and what is foretold is found."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from kit.house import House, Reply, house
from kit.wait import until

KEYS = [
    {"name": "a", "key": "key-of-acme", "tenant": "acme"},
    {"name": "b", "key": "other-key-of-acme", "tenant": "acme"},
    {"name": "c", "key": "key-of-umbrella", "tenant": "umbrella"},
    {"name": "d", "key": "key-of-nobody"},
]
PROMPT = list(range(40, 105))  # four whole blocks and one token
SAMPLING = {"max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture
async def home() -> AsyncIterator[House]:
    async with house() as built:
        prefill, decode = await built.pair()
        await built.gateway(*prefill.words, *decode.words, keys=KEYS)
        yield built


async def ask(home: House, key: str, **more: Any) -> Reply:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING} | more
    found = await home.post("/generate", body, authorization=f"Bearer {key}")
    assert found.status == 200, found.body
    return found


async def depth_of(home: House, found: Reply) -> tuple[int, int]:
    """Blocks that were foretold, and tokens that the prefill then found in its cache."""

    async def told() -> Any:
        attempt = (await home.get(f"/requests/{found.headers['x-request-id']}"))["attempts"][-1]
        cached = attempt["cached_tokens"]
        return cached if cached["actual"] is not None else None

    cached = await until(told)
    blocks = int(found.headers["x-kvplane-depth"].partition("/")[0])
    assert cached["predicted"] == 16 * blocks
    return blocks, cached["actual"]


async def test_blocks_are_shared_within_a_tenant_and_with_nobody_else(home: House) -> None:
    assert await depth_of(home, await ask(home, "key-of-acme")) == (0, 0)

    async def indexed() -> bool:
        found = await ask(home, "other-key-of-acme")
        return found.headers["x-kvplane-depth"] == "4/4"

    await until(indexed)  # also by another key of the tenant
    assert await depth_of(home, await ask(home, "key-of-acme")) == (4, 64)
    for key, more in (
        ("key-of-umbrella", {}),
        ("key-of-nobody", {}),
        ("key-of-acme", {"cache_salt": "mine"}),
        ("key-of-nobody", {"cache_salt": "mine"}),
    ):
        found = await ask(home, key, **more)
        assert found.headers["x-kvplane-depth"] == "0/4", (key, more)
        assert await depth_of(home, found) == (0, 0)
    findings = (await home.get("/diagnosis"))["findings"]
    assert not [one for one in findings if "salt" in one["sentence"]], findings
    stolen = {"text": "x", "cache_salt": "kvplane:0123456789abcdef0123456789abcdef"}
    refused = await home.post("/generate", stolen, authorization="Bearer key-of-nobody")
    assert (refused.status, refused.error["param"]) == (400, "cache_salt")


WORDS = "the same words over and over, long enough for some blocks"


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": WORDS}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    ],
)
async def test_chats_and_completions_too(home: House, path: str, prompt: dict[str, Any]) -> None:
    async def depth(key: str) -> int:
        body = {"model": "tiny", "max_tokens": 4} | prompt
        found = await home.post(path, body, authorization=f"Bearer {key}")
        assert found.status == 200, found.body
        return int(found.headers["x-kvplane-depth"].partition("/")[0])

    assert await depth("key-of-acme") == 0

    async def known() -> bool:
        return await depth("key-of-acme") > 0

    await until(known)
    assert await depth("key-of-umbrella") == 0
    assert await depth("key-of-nobody") == 0

"""A prompt is known by its tokens: however it is sent, the gateway ranks what the engine computes;
and where their tokenizers part ways, everybody who asks is told."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from kit.house import House, house
from kit.wait import until

from kvplane import plane
from kvplane.engine.body import Reader
from kvplane.router import SelfCheck
from kvplane.router.settings import SelfCheckSettings
from kvplane.tokens import Tokenizer

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BUILT = Tokenizer.load("builtin")
QUICK = SelfCheckSettings(interval_s=0.05, again_s=0.05, tick_s=0.02, deadline_s=20.0)
WORDS = "What was said before is said again, and a little more each time. "
TURNS = [
    {"role": "system", "content": "Be brief. " * 5},
    {"role": "user", "content": WORDS * 2},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": [{"type": "text", "text": WORDS}, {"type": "text", "text": "So?"}]},
    {"role": "assistant", "content": "No."},
    {"role": "user", "content": WORDS * 3},
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": TURNS}),
    "text": (TEXT, {"prompt": BUILT.render(TURNS), "add_special_tokens": False}),
    "ids": (TEXT, {"prompt": BUILT.chat(TURNS)}),
    "a list": (TEXT, {"prompt": [BUILT.chat(TURNS)]}),
    "native ids": (NATIVE, {"input_ids": BUILT.chat(TURNS)}),
}


def quick(*parts: Any) -> SelfCheck:
    return SelfCheck(*parts[:4], QUICK)


@pytest_asyncio.fixture
async def home(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """A pair of engines and a gateway that knows exactly what they hold."""
    monkeypatch.setattr(plane, "SelfCheck", quick)
    async with house() as made:
        pair = await made.pair()
        await made.gateway(*(word for one in pair for word in one.words))
        await until(lambda: knowledge(made, "exact"), what="both to be known exactly")
        yield made


async def knowledge(home: House, state: str) -> bool:
    workers = (await home.get("/index/workers"))["workers"]
    return all(one["knowledge"] == state for one in workers if one["role"] == "prefill")


async def ask(home: House, path: str, body: dict[str, Any]) -> tuple[str, dict[str, int]]:
    """Depth as the answer has it, and what the index foretold and the engine found, in tokens."""
    short = {"sampling_params": {"max_new_tokens": 2}} if path == NATIVE else {"max_tokens": 2}
    reply = await home.post(path, {**body, **short})
    assert (reply.status, reply.headers["x-kvplane-knowledge"]) == (200, "exact"), reply
    room = reply.headers["x-kvplane-room"]
    found: dict[str, Any] = {}

    async def settled() -> bool:
        found.update(await home.get(f"/rooms/{room}"))
        return None not in found["cached_tokens"].values()

    await until(settled, what="the engine's own count")
    return reply.headers["x-kvplane-depth"], found["cached_tokens"]


@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_a_chat_is_as_deep_as_the_engine_finds_it_in_every_form(
    home: House, tools: list[Any]
) -> None:
    more = {"tools": tools} if tools else {}
    for end in (2, 4, 6):  # turn by turn, as clients do
        _, cached = await ask(home, CHAT, {"messages": TURNS[:end], **more})
        assert cached["predicted"] == cached["actual"]
        assert (cached["actual"] > 0) == (end > 2)
        held = len(BUILT.chat(TURNS[:end], tools or None)) // 16
        await until(functools.partial(has, home, TURNS[:end], tools, held))
    forms = FORMS
    if tools:
        ids = BUILT.chat(TURNS, tools)
        text = BUILT.render(TURNS, tools)
        forms = {
            "chat": (CHAT, {"messages": TURNS, "tools": tools}),
            "text": (TEXT, {"prompt": text, "add_special_tokens": False}),
            "ids": (TEXT, {"prompt": ids}),
        }
    for form, (path, body) in forms.items():
        depth, cached = await ask(home, path, body)
        assert depth == f"{held}/{held}", form
        assert cached["predicted"] == cached["actual"] > 0, form


async def has(home: House, turns: list[Any], tools: list[Any], blocks: int) -> bool:
    """Does the index say that the prefill has all blocks of this chat?"""
    asked = {"model": "tiny", "messages": turns, **({"tools": tools} if tools else {})}
    found = (await home.post("/index/rank", asked)).body
    return bool(found["workers"][0]["depth_blocks"] >= blocks)


async def test_the_index_takes_a_prompt_for_what_the_gateway_does(home: House) -> None:
    await ask(home, CHAT, {"messages": TURNS})
    blocks = len(BUILT.chat(TURNS)) // 16
    await until(lambda: has(home, TURNS, [], blocks))
    for body in (
        {"messages": TURNS},
        {"prompt": BUILT.render(TURNS), "add_special_tokens": False},
        {"token_ids": BUILT.chat(TURNS)},
    ):
        found = (await home.post("/index/rank", {"model": "tiny", **body})).body
        assert found["blocks"] == blocks
        assert found["workers"][0]["depth_blocks"] == blocks


async def test_tokens_that_differ_are_told_everywhere_until_they_do_not(
    home: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Reader.ids
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "ids", lambda self, body: [0, *right(self, body)])
        await until(lambda: knowledge(home, "dark"), what="the difference to be seen")
        workers = (await home.get("/index/workers"))["workers"]
        (shown,) = [one for one in workers if one["role"] == "prefill"]
        assert shown["reason"].startswith("tokens of the gateway are not those of ")
        assert shown["reason"].endswith(": token 0 is 0 there, 256 here")
        one = await home.get(f"/index/workers/{shown['worker']}")
        assert one["knowledge"] == "dark"
        reply = await home.post(TEXT, {"prompt": WORDS, "max_tokens": 2})
        assert reply.headers["x-kvplane-knowledge"] == "dark"
        assert reply.headers["x-kvplane-reason"] == shown["reason"]
        ranked = (await home.post("/index/rank", {"model": "tiny", "prompt": WORDS})).body
        told = {one["worker"]: one["knowledge"] for one in ranked["workers"]}
        assert told[shown["worker"]] == "dark"
        found = (await home.get("/diagnosis"))["findings"]
        assert any(one["sentence"] == shown["reason"] for one in found), found
    await until(lambda: knowledge(home, "exact"), what="it to be believed again")

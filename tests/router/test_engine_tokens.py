"""Engine tokens: engines asked for the tokens of a prompt, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from kit.clock import FakeClock
from kit.engine import HANG, FakeEngine, fake_engine
from kit.gatehouse import worker
from kit.wait import until

from kvplane.router.engine_tokens import LOOK_AGAIN_S, EngineTokens, Untold
from kvplane.router.fleet import Fleet
from kvplane.router.legs import Legs
from kvplane.router.plans import plan
from kvplane.router.settings import SourceSettings
from kvplane.runtime import SystemClock
from kvplane.vocabulary import Pod, Role

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUICK = SourceSettings(attempt_s=20.0, deadline_s=20.0)
TOLD = {"count": 3, "max_model_len": 99, "tokens": [5, 6, 7]}


@dataclass
class Desk:
    """Engines that tell tokens, and who asks them."""

    source: EngineTokens
    fleet: Fleet
    legs: Legs
    clock: FakeClock
    engines: dict[str, FakeEngine] = field(default_factory=dict)

    async def ask(self, body: dict[str, Any], path: str = TEXT, model: str = "tiny") -> Any:
        """Ids as lists, or the reason."""
        ids, reason = await self.source.tokenise(plan(path, body), body, model)
        return reason if ids is None else [list(one) for one in ids]

    def sent(self, name: str) -> list[dict[str, Any]]:
        requests = self.engines[name].peer.requests
        return [json.loads(request.partition(b"\r\n\r\n")[2]) for request in requests]


@contextlib.asynccontextmanager
async def desk(
    settings: SourceSettings = QUICK, facts: dict[str, Any] | None = None, **engines: Any
) -> AsyncIterator[Desk]:
    """Prefills by name, each with what it says to POST /tokenize."""
    clock, fleet = FakeClock(), Fleet()
    legs = Legs(clock=SystemClock())
    async with contextlib.AsyncExitStack() as stack:
        await legs.start()
        stack.push_async_callback(legs.stop)
        made = Desk(EngineTokens(fleet, legs, clock, settings), fleet, legs, clock)
        for name, said in engines.items():
            engine = await stack.enter_async_context(fake_engine(tokenize=said))
            made.engines[name] = engine
            known = {"events": ("tcp://x:1",)} | (facts or {})
            fleet.up(worker(name, engine.url, Role.PREFILL, **known))
        yield made
        await until(lambda: legs.live == 0)


async def test_a_text_and_a_chat_are_asked_with_all_that_decides_their_tokens() -> None:
    async with desk(p1=TOLD) as made:
        assert await made.ask({"prompt": "a", "temperature": 1}) == [[5, 6, 7]]
        assert (
            await made.ask({"prompt": ["b", "c"], "add_special_tokens": False}) == [[5, 6, 7]] * 2
        )
        assert await made.ask({"text": "d"}, "/generate") == [[5, 6, 7]]
        chat = {
            "messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}],
            "tool_choice": "none", "chat_template_kwargs": {"a": 1}, "add_generation_prompt": False,
            "documents": [], "reasoning_effort": "low",
        }  # fmt: skip
        assert await made.ask({**chat, "stream": True, "n": 2}, CHAT) == [[5, 6, 7]]
        named = {"model": "tiny"}
        assert made.sent("p1") == [
            {**named, "prompt": "a", "add_special_tokens": True},
            {**named, "prompt": "b", "add_special_tokens": False},
            {**named, "prompt": "c", "add_special_tokens": False},
            {**named, "prompt": "d", "add_special_tokens": True},
            {**named, **chat},
        ]
        assert made.source.counted == {"told": 5}


async def test_the_same_prompt_is_asked_for_once_in_the_life_of_an_engine() -> None:
    async with desk(p1=TOLD) as made:
        for _ in range(3):
            assert await made.ask({"prompt": "a"}) == [[5, 6, 7]]
        assert made.source.counted == {"told": 1, "remembered": 2}
        made.engines["p1"].answers["/tokenize"] = {"tokens": [8]}
        made.fleet.up(
            worker(
                "p1", made.engines["p1"].url, Role.PREFILL, events=("tcp://x:1",), generation="2"
            )
        )
        assert await made.ask({"prompt": "a"}) == [[8]]


async def test_what_is_remembered_is_bounded() -> None:
    async with desk(SourceSettings(remembered_bytes=2000), p1=TOLD) as made:
        for number in range(50):
            await made.ask({"prompt": f"{number}"})
        assert made.source._told.bytes <= 2000 and len(made.source._told) < 5
        assert await made.ask({"prompt": "x" * 3000}) == [[5, 6, 7]]  # and what never fits


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (404, "no_route"), (405, "no_route"), (401, "no_route"), (400, "engine_refused"),
        (422, "engine_refused"), (500, "engine_silent"), (503, "engine_silent"),
        ({"tokens": [-1]}, "engine_refused"), ({"tokens": [2**32]}, "engine_refused"),
        ({"tokens": "abc"}, "engine_refused"), ({"tokens": [[1]]}, "engine_refused"),
        ({"tokens": [True]}, "engine_refused"), ([], "engine_refused"), (b"{", "engine_refused"),
        ({}, "engine_refused"),
    ],
)  # fmt: skip
async def test_whatever_an_engine_says_instead_is_a_reason(said: Any, reason: str) -> None:
    async with desk(p1=said) as made:
        assert await made.ask({"prompt": "a"}) == reason
        assert made.source.counted == {reason: 1}


async def test_an_engine_that_says_nothing_is_waited_for_once_and_then_left_alone() -> None:
    async with desk(SourceSettings(attempt_s=0.5), p1=HANG) as made:
        assert await made.ask({"prompt": "a"}) == "engine_silent"
        assert await made.ask({"prompt": "b"}) == "engine_silent"
        assert made.engines["p1"].asked == ["/tokenize"]
        made.engines["p1"].answers["/tokenize"] = TOLD
        made.clock.advance(SourceSettings().aside_s)
        assert await made.ask({"prompt": "c"}) == [[5, 6, 7]]


async def test_one_without_the_route_is_left_alone_for_longer() -> None:
    async with desk(p1=404) as made:
        assert [await made.ask({"prompt": "a"}) for _ in range(3)] == ["no_route"] * 3
        made.clock.advance(QUICK.aside_s)
        assert await made.ask({"prompt": "b"}) == "no_route"
        assert made.engines["p1"].asked == ["/tokenize"]
        made.clock.advance(QUICK.without_s)
        await made.ask({"prompt": "c"})
        assert made.engines["p1"].asked == ["/tokenize"] * 2


async def test_where_one_fails_the_next_is_asked() -> None:
    async with desk(p1=500, p2=TOLD, p3=TOLD) as made:
        for number in range(30):
            assert await made.ask({"prompt": f"{number}"}) == [[5, 6, 7]]
        assert made.source.counted["engine_silent"] <= 1  # then it is known to fail
        asked = [len(made.engines[name].asked) for name in ("p2", "p3")]
        assert min(asked) > 3, "prompts are spread over the engines"


async def test_the_same_prompt_goes_to_the_same_engine() -> None:
    async with desk(SourceSettings(remembered_bytes=0), p1=TOLD, p2=TOLD) as made:
        for _ in range(8):
            await made.ask({"prompt": "a"})
        assert sorted(len(one.asked) for one in made.engines.values()) == [0, 8]


async def test_nobody_is_asked_where_nobody_tells_what_he_holds() -> None:
    async with desk(facts={"events": ()}, p1=TOLD) as made:
        assert await made.ask({"prompt": "a"}) == "no_tokenizer"
        assert made.engines["p1"].asked == []
        made.fleet.up(worker("p1", made.engines["p1"].url, Role.PREFILL, events=("tcp://x:1",)))
        made.clock.advance(LOOK_AGAIN_S)
        assert await made.ask({"prompt": "a"}) == [[5, 6, 7]]
        many = [f"m{number}" for number in range(1000)]
        for name in many:
            await made.ask({"prompt": "a"}, model=name)
            made.clock.advance(LOOK_AGAIN_S / 10)
        assert len(made.source._useless) <= 11


async def test_nobody_is_asked_for_another_model_nor_one_that_is_drained() -> None:
    async with desk(p1=TOLD) as made:
        assert await made.ask({"prompt": "a"}, model="other") == "no_tokenizer"
        made.fleet.drain(Pod("p1"))
        assert await made.ask({"prompt": "a"}) == "engine_silent"
        assert made.engines["p1"].asked == []


@pytest.mark.parametrize(
    ("settings", "body", "reason"),
    [
        (SourceSettings(most_texts=2), {"prompt": ["a", "b", "c"]}, "too_large"),
        (SourceSettings(most_chars=3), {"prompt": "abcd"}, "too_large"),
        (SourceSettings(together=0), {"prompt": "a"}, "busy"),
        (SourceSettings(most_bytes=4), {"prompt": "a"}, "engine_silent"),
        (SourceSettings(), {"prompt": "\ud800"}, "not_unicode"),
    ],
)
async def test_what_is_too_much_is_a_reason(
    settings: SourceSettings, body: dict[str, Any], reason: str
) -> None:
    async with desk(settings, p1=TOLD) as made:
        assert await made.ask(body) == reason


async def test_all_questions_of_one_request_have_one_deadline_and_all_is_given_back() -> None:
    async with desk(SourceSettings(attempt_s=20, deadline_s=0.05), p1=HANG) as made:
        assert await made.ask({"prompt": ["a", "b"]}) == "slow"
        assert made.source._running == 0
        await until(lambda: made.legs.live == 0)
        work = asyncio.create_task(made.ask({"prompt": "c"}))
        await until(lambda: made.legs.live == 1)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert (made.legs.live, made.source._running) == (0, 0)


async def test_a_long_prompt_is_asked_for_too() -> None:
    many = list(range(300_000))
    async with desk(p1={"tokens": many}) as made:
        assert await made.ask({"prompt": "x" * 1_000_000}) == [many]


async def test_who_compares_hears_which_engine_said_what() -> None:
    async with desk(p1=503) as made:
        with pytest.raises(Untold, match=r"POST http://127.0.0.1:\d+/tokenize answered 503"):
            await made.source.ask(made.engines["p1"].url, b"{}")

"""Whatever keeps a request from being routed by what is known: the client is told, it is counted,
and the status pages name the broken precondition. Nothing is ever quietly routed by load."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call, answer
from kit.wait import until

from kvplane.index import chain
from kvplane.router.closed_loop import Watched
from kvplane.router.drift import Compared, Stream, Window
from kvplane.router.engine_tokens import EngineTokens
from kvplane.router.prompt_metrics import TokensState
from kvplane.router.self_check import SelfCheck
from kvplane.router.settings import (
    DriftSettings,
    PromptSettings,
    RetrySettings,
    RouterSettings,
    SelfCheckSettings,
)
from kvplane.router.suspicions import Cause, Suspicion
from kvplane.router.verdicts import drifted
from kvplane.runtime import SystemClock, running
from kvplane.tokens import Tokenizer
from kvplane.vocabulary import (
    Cleared,
    ClearReason,
    Epoch,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Stored,
    Tier,
    Worker,
)

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
BUILT = Tokenizer.load("builtin")
SAID = "The same words, said in every way there is. " * 5
MESSAGES = [{"role": "user", "content": SAID}]
U1 = Worker(Pod("u1"))
SETTINGS = RouterSettings(retry=RetrySettings(retries=0))
QUICK = SelfCheckSettings(interval_s=0.02, again_s=0.02, tick_s=0.01, deadline_s=20.0)
REQUESTS = 50


@dataclass
class Engine:
    """Answers everything; `shift` makes its tokens others than those of the folder."""

    shift: int = 0
    tells: bool = True

    async def serve(self, call: Call) -> None:
        while request := await call.request():
            head, _, body = request.partition(b"\r\n\r\n")
            if b" /tokenize " not in head:
                await call.send(answer(b'{"usage":{"prompt_tokens":9}}'))
                continue
            asked = json.loads(body)
            ids = (
                BUILT.chat(asked["messages"], asked.get("tools"))
                if "messages" in asked
                else BUILT.encode(asked["prompt"])
            )
            told = json.dumps({"tokens": [one + self.shift for one in ids]}).encode()
            await call.send(answer(told if self.tells else b"", 200 if self.tells else 404))


@contextlib.asynccontextmanager
async def house_of(
    engine: Engine, folder: str = "builtin", settings: RouterSettings = SETTINGS
) -> AsyncIterator[Gatehouse]:
    """A unified worker that the index knows exactly and that holds the chat; its tokens checked."""
    facts = {"u1": {"events": ("tcp://x:1",), "engine": "kvplane"}}
    async with gatehouse({"u1": engine.serve}, settings, facts=facts) as house:
        prompts = house.gateway._prompts
        source = EngineTokens(house.fleet, house.legs, SystemClock())
        checks = SelfCheck(house.fleet, prompts, source, SystemClock(), QUICK)
        prompts.source, house.gateway.doubts.tokens = source, checks
        prompts.learn("tiny", folder, "kvplane", "u1")
        house.registry.register(TokensState(source, checks))
        teach(house, BUILT.chat(MESSAGES))
        async with running([checks]):
            await until(lambda: checks.counted.total() > 0)
            yield house


def teach(house: Gatehouse, tokens: list[int]) -> None:
    hashes = chain(tokens, Namespace("tiny", 16)).blocks
    house.view.apply(Stored(U1, Epoch(1), Tier.GPU, None, hashes, 16))
    believe(house, Knowledge.EXACT, "")


def believe(house: Gatehouse, state: Knowledge, reason: str) -> None:
    house.view.apply(Known(U1, Epoch(1), state, reason, 0.0))


async def ask(house: Gatehouse, path: str = CHAT, **body: Any) -> dict[str, str]:
    """The headers of an answer that went well."""
    sent = {"messages": MESSAGES} if path == CHAT and not body else body
    status, said, headers = await house.post(path, {"model": "tiny", **sent})
    assert status == 200, said
    return headers


# What breaks ------------------------------------------------------------------------------------


def version_mismatch(house: Gatehouse, engine: Engine) -> None:
    """What ingest writes where it does not understand the stream."""
    believe(house, Knowledge.DARK, "tcp://x:1 does not speak the event protocol")


def event_port(house: Gatehouse, engine: Engine) -> None:
    """Nothing is ever heard of a worker."""
    house.view.apply(Cleared(U1, Epoch(1), ClearReason.GONE))


def tokenizer(house: Gatehouse, engine: Engine) -> None:
    engine.shift = 1


def mistaken(cause: Cause, about: str) -> Callable[[Gatehouse, Engine], None]:
    """What the closed loop finds of a broken hash or a mixed-up worker; how it does that is shown
    in stories/test_drift.py."""

    def breaks(house: Gatehouse, engine: Engine) -> None:
        wrong = [Compared(0.0, 96, 0, 96, suspicions=frozenset([Suspicion(cause, about)]))] * 3
        settings = DriftSettings()
        verdict = drifted(U1, wrong, wrong)
        house.gateway.loop._watched[U1] = Watched(
            Epoch(1), Window(settings), Stream(settings), verdict
        )
        house.gateway.loop._decide = lambda *_: None  # type: ignore[method-assign]

    return breaks


@pytest.mark.parametrize(
    ("breaks", "state", "label", "reason", "finding"),
    [
        (version_mismatch, "dark", "stream", "does not speak the event", "the KV events of u1"),
        (event_port, "dark", "never_heard", "u1 was never heard of", "the KV events of u1 are not"),
        (tokenizer, "dark", "tokens", "tokens of the gateway are not", "tokens of the gateway"),
        (
            mistaken(Cause.BLOCK_SIZE, "32 tokens"), "partial", "block size",
            "block size: index says 96", "block size",
        ),
        (
            mistaken(Cause.IDENTITY, "u2"), "partial", "wrong worker identity",
            "wrong worker identity: index says 96", "wrong worker identity",
        ),
    ],
)  # fmt: skip
async def test_each_broken_precondition_is_told_with_every_answer_counted_and_named(
    breaks: Callable[[Gatehouse, Engine], None],
    state: str,
    label: str,
    reason: str,
    finding: str,
) -> None:
    engine = Engine()
    async with house_of(engine) as house:
        before = await ask(house)
        assert before["x-kvplane-knowledge"] == "exact" and "x-kvplane-reason" not in before
        breaks(house, engine)
        await until(lambda: _is(house, state), what="the gateway to see it")
        counted = house.count("knowledge_total", state=state, reason=label)
        for _ in range(REQUESTS):
            headers = await ask(house)
            assert headers["x-kvplane-knowledge"] == state
            assert reason in headers["x-kvplane-reason"]
        assert house.count("knowledge_total", state=state, reason=label) == counted + REQUESTS
        _, found = await house.get("/diagnosis")
        assert any(one["sentence"].startswith(finding) for one in found["findings"]), found
        assert all("u1" in one["about"] for one in found["findings"])


async def _is(house: Gatehouse, state: str) -> bool:
    return (await ask(house))["x-kvplane-knowledge"] == state


async def test_no_depth_is_claimed_from_tokens_the_engine_does_not_make() -> None:
    engine = Engine()
    async with house_of(engine) as house:
        assert not (await ask(house))["x-kvplane-depth"].startswith("0/")
        engine.shift = 1
        await until(lambda: _is(house, "dark"))
        assert (await ask(house))["x-kvplane-depth"].startswith("0/")
        shown = house.registry.get_sample_value(
            "kvplane_router_self_check", {"pod": "u1", "outcome": "differs"}
        )
        assert shown == 1
        engine.shift = 0
        await until(lambda: _is(house, "exact"))


# No tokenizer here ------------------------------------------------------------------------------


async def test_where_the_gateway_has_no_tokenizer_the_engines_own_words_are_as_good() -> None:
    async with house_of(Engine(), folder="") as house:
        headers = await ask(house)
        held, _, asked = headers["x-kvplane-depth"].partition("/")
        assert headers["x-kvplane-knowledge"] == "exact" and held == asked != "0"
        assert house.count("knowledge_total", state="exact", reason="") == 1


async def test_where_nobody_has_tokens_that_is_told_and_counted() -> None:
    async with house_of(Engine(tells=False), folder="") as house:
        for _ in range(REQUESTS):
            headers = await ask(house)
            assert headers["x-kvplane-knowledge"] == "dark"
            assert headers["x-kvplane-reason"].startswith("no tokenizer for this model")
            assert headers["x-kvplane-depth"] == "0/0"
        assert house.count("knowledge_total", state="dark", reason="no_route") == REQUESTS
        told = await ask(house, TEXT, prompt=BUILT.chat(MESSAGES))  # ids need no tokenizer
        assert told["x-kvplane-knowledge"] == "exact" and told["x-kvplane-depth"][0] != "0"


@pytest.mark.parametrize(
    ("body", "label"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        ({"messages": MESSAGES, "chat_template": "x"}, "unsupported_member"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "template"),
        ({"messages": [{"role": "user", "content": "x" * 3000}]}, "too_large"),
    ],
)
async def test_each_prompt_that_has_no_tokens_says_why(body: dict[str, Any], label: str) -> None:
    few = RouterSettings(retry=RetrySettings(retries=0), prompts=PromptSettings(most_chars=2000))
    async with house_of(Engine(), settings=few) as house:
        headers = await ask(house, CHAT, **body)
        assert headers["x-kvplane-knowledge"] == "dark" and headers["x-kvplane-reason"]
        assert house.count("knowledge_total", state="dark", reason=label) == 1


# Other kinds of requests ------------------------------------------------------------------------


async def test_the_same_content_is_as_deep_in_every_kind_that_is_tokenised() -> None:
    async with house_of(Engine()) as house:
        text = BUILT.render(MESSAGES)
        ids = BUILT.chat(MESSAGES)
        part = [{"role": "user", "content": [{"type": "text", "text": SAID}]}]
        kinds: list[tuple[str, dict[str, Any]]] = [
            (CHAT, {"messages": MESSAGES}),
            (CHAT, {"messages": part}),
            (TEXT, {"prompt": text, "add_special_tokens": False}),
            (TEXT, {"prompt": ids}),
            (TEXT, {"prompt": [ids]}),
            (NATIVE, {"input_ids": ids}),
        ]
        told = [(await ask(house, path, **body))["x-kvplane-depth"] for path, body in kinds]
        assert told == [f"{len(ids) // 16}/{len(ids) // 16}"] * len(kinds)
        assert house.count("knowledge_total", state="exact", reason="") == len(kinds)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}),
        ("/v1/responses", {"input": SAID}),
    ],
)
async def test_kinds_that_are_passed_on_unread_say_so_and_are_counted(
    path: str, body: dict[str, Any]
) -> None:
    async with house_of(Engine()) as house:
        for number in range(1, 4):
            headers = await ask(house, path, **body)
            assert headers["x-kvplane-knowledge"] == "dark"
            assert headers["x-kvplane-reason"] == "prompts of this route are not tokenised"
            found = house.count("knowledge_total", state="dark", reason="unsupported_route")
            assert found == number

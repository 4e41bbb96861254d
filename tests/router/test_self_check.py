"""Self-check: our tokens against those of engines that are right, wrong, or do not say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from kit.engine import HANG
from kit.gatehouse import worker
from kit.peer import Call, answer, peer
from kit.wait import until

from kvplane.router.engine_tokens import EngineTokens
from kvplane.router.fleet import Fleet
from kvplane.router.legs import Legs
from kvplane.router.plans import plan
from kvplane.router.prompts import Prompts
from kvplane.router.samples import SPECIAL, difference, samples
from kvplane.router.self_check import SelfCheck
from kvplane.router.settings import SelfCheckSettings, SourceSettings
from kvplane.router.suspicions import Cause
from kvplane.runtime import SystemClock, running
from kvplane.tokens import Tokenizer
from kvplane.vocabulary import Knowledge, Pod, Role, Worker

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUICK = SelfCheckSettings(interval_s=0.02, again_s=0.02, tick_s=0.01, deadline_s=20.0)
P1 = Pod("p1")
BUILT = Tokenizer.load("builtin")
TOOLS = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"function": {"name": "f"}}]}


def right(body: dict[str, Any]) -> Any:
    """An engine with the builtin tokenizer, whose way with chats is ours."""
    if "messages" in body:
        return BUILT.chat(body["messages"], body.get("tools"))
    return BUILT.encode(body["prompt"])


def off_by_one(body: dict[str, Any]) -> Any:
    return [token + 1 for token in right(body)]


def other_template(body: dict[str, Any]) -> Any:
    return [*right(body), 7] if "messages" in body else right(body)


def other_tools(body: dict[str, Any]) -> Any:
    return [*right(body), 7] if "tools" in body else right(body)


def no_chats(body: dict[str, Any]) -> Any:
    """As SGLang was before its /tokenize knew messages."""
    return 422 if "messages" in body else right(body)


@dataclass
class Desk:
    """One engine that tells tokens as `says` does, and who compares."""

    checks: SelfCheck
    prompts: Prompts
    fleet: Fleet
    says: Callable[[dict[str, Any]], Any]
    url: str = ""
    asked: int = 0

    async def serve(self, call: Call) -> None:
        while request := await call.request():
            self.asked += 1
            said = self.says(json.loads(request.partition(b"\r\n\r\n")[2]))
            if said is HANG:
                await asyncio.Event().wait()
            body = json.dumps({"tokens": said}).encode() if isinstance(said, list) else b"{}"
            await call.send(answer(body, said if isinstance(said, int) else 200))

    def up(self, role: Role = Role.PREFILL, tokenizer: str = "builtin", **facts: Any) -> None:
        known = {"events": ("tcp://x:1",), "engine": "kvplane"} | facts
        one = worker("p1", self.url, role, tokenizer=tokenizer, **known)
        self.prompts.learn(one.model, one.tokenizer, one.engine, one.pod)
        self.fleet.up(one)

    async def checked(self, times: int = 1) -> str:
        """The outcome after so many more comparisons."""
        before = self.checks.counted.total()
        await until(lambda: self.checks.counted.total() >= before + times)
        return self.checks.states()[P1].outcome

    @property
    def doubt(self) -> tuple[Knowledge, str] | None:
        return self.checks.doubt(Worker(P1))


@contextlib.asynccontextmanager
async def desk(
    says: Callable[[dict[str, Any]], Any],
    settings: SelfCheckSettings = QUICK,
    source: SourceSettings | None = None,
) -> AsyncIterator[Desk]:
    fleet, prompts, clock = Fleet(), Prompts(), SystemClock()
    legs = Legs()
    engines = EngineTokens(fleet, legs, clock, source or SourceSettings(attempt_s=20.0))
    prompts.source = engines
    checks = SelfCheck(fleet, prompts, engines, clock, settings)
    made = Desk(checks, prompts, fleet, says)
    async with peer(made.serve) as state:
        made.url = state.url
        async with running([prompts, legs, checks]):
            yield made
        assert legs.live == 0 and not checks._running


async def test_an_engine_that_makes_the_same_tokens_is_believed_and_asked_again_and_again() -> None:
    async with desk(right) as made:
        made.up()
        assert await made.checked(3) == "equal"
        assert made.doubt is None and made.checks.verdict(Worker(P1)) is None
        assert made.checks.states()[P1].reason == "the same tokens of chat, parts, text, tools"


@pytest.mark.parametrize("says", [off_by_one, other_template])
async def test_one_that_makes_others_is_dark_with_the_first_difference_until_it_does_not(
    says: Callable[[dict[str, Any]], Any],
) -> None:
    async with desk(says) as made:
        made.up()
        assert await made.checked() == "differs"
        state, reason = made.doubt or (None, "")
        assert state is Knowledge.DARK
        kind = "text: token 0 is 257 there, 256 here" if says is off_by_one else "chat of "
        assert reason.startswith(f"tokens of the gateway are not those of p1: {kind}")
        verdict = made.checks.verdict(Worker(P1, 1))
        assert verdict is not None and verdict.cause is Cause.TOKENS
        assert "p1" in verdict.culprit and "tokenizer folder" in verdict.next_step
        assert made.checks.differing == {P1}
        made.says = right
        await until(lambda: made.doubt is None)
        assert made.checks.differing == frozenset()


async def test_a_single_difference_is_looked_at_again_before_it_counts() -> None:
    """As where an engine is just being replaced."""
    wrong = iter([True])
    async with desk(lambda body: off_by_one(body) if next(wrong, False) else right(body)) as made:
        made.up()
        assert await made.checked() == "equal"
        assert made.asked == len(samples(1)) + 1


async def test_where_only_chats_with_tools_differ_engines_are_asked_for_those() -> None:
    async with desk(other_tools) as made:
        made.up()
        assert await made.checked() == "equal" and made.doubt is None
        assert "such prompts are asked of engines: tools" in made.checks.states()[P1].reason
        found = await made.prompts.tokenise(CHAT, TOOLS, "tiny")
        assert [list(ids) for ids in found.tokens or ()] == [other_tools(TOOLS)]
        plain = {"messages": TOOLS["messages"]}
        asked = made.prompts.source.counted.copy()  # type: ignore[union-attr]
        found = await made.prompts.tokenise(CHAT, plain, "tiny")
        assert [list(ids) for ids in found.tokens or ()] == [right(plain)]
        made.says = right
        await until(lambda: not made.checks.states()[P1].wrong)
        assert asked["told"] > 0
        made.prompts.source = None
        found = await made.prompts.tokenise(CHAT, TOOLS, "tiny")
        assert found.reason is None


async def test_a_kind_that_differs_and_that_no_engine_tells_is_a_reason() -> None:
    async with desk(other_tools) as made:
        made.up()
        await made.checked()
        made.prompts.source = None
        assert (await made.prompts.tokenise(CHAT, TOOLS, "tiny")).reason == "self_check"
        made.prompts.forget("p1")
        assert (await made.prompts.tokenise(CHAT, TOOLS, "tiny")).reason is None


@pytest.mark.parametrize(
    ("says", "why"),
    [
        (lambda body: 404, "/tokenize answered 404"),
        (lambda body: 401, "/tokenize answered 401"),
        (lambda body: {}, "no list of token ids"),
        (lambda body: HANG, "no answer within 0.3 s"),
    ],
)
async def test_an_engine_that_cannot_be_asked_is_said_to_be_and_not_held_against_it(
    says: Callable[[dict[str, Any]], Any], why: str
) -> None:
    async with desk(says, source=SourceSettings(attempt_s=0.3)) as made:
        made.up()
        assert await made.checked() == "unable"
        assert made.doubt is None
        assert made.checks.states()[P1].reason.startswith("tokens of p1 cannot be compared: ")
        assert why in made.checks.states()[P1].reason


async def test_an_engine_that_takes_too_long_over_all_is_unable() -> None:
    slow = SelfCheckSettings(again_s=0.01, tick_s=0.01, deadline_s=0.05)
    async with desk(lambda body: HANG, slow) as made:
        made.up()
        assert await made.checked() == "unable"
        assert "comparing took longer than 0.05 s" in made.checks.states()[P1].reason


async def test_an_engine_that_tells_texts_only_is_compared_by_them() -> None:
    async with desk(no_chats) as made:
        made.up()
        assert await made.checked() == "equal"
        assert made.checks.states()[P1].reason == "the same tokens of text"
        made.says = lambda body: 422 if "messages" in body else off_by_one(body)
        assert await made.checked(2) == "differs"


async def test_what_differed_differs_until_it_is_seen_to_be_equal() -> None:
    async with desk(off_by_one) as made:
        made.up()
        assert await made.checked() == "differs"
        made.says = lambda body: 503
        assert await made.checked(2) == "differs"


async def test_another_life_of_the_engine_is_compared_afresh() -> None:
    async with desk(off_by_one, SelfCheckSettings(tick_s=0.01, again_s=1e6)) as made:
        made.up(generation="1")
        assert await made.checked() == "differs"
        made.says = right
        made.up(generation="2")
        await until(lambda: made.checks.states()[P1].outcome == "equal")
        made.fleet.down(P1)
        await until(lambda: not made.checks.states())
        assert made.doubt is None


@pytest.mark.parametrize("facts", [{"events": ()}, {"role": Role.DECODE}])
async def test_who_is_chosen_by_load_is_not_compared(facts: dict[str, Any]) -> None:
    async with desk(off_by_one) as made:
        made.up(**facts)
        turns = made.checks._fleet.pods()
        await asyncio.sleep(0.1)  # ten looks
        assert turns and not made.checks.states() and not made.asked


async def test_without_a_folder_engines_are_compared_with_each_other() -> None:
    async with desk(right) as made:
        made.up(tokenizer="", engine="vllm")
        assert await made.checked() == "equal"
        made.says = lambda body: 404
        assert await made.checked(2) == "unable"


async def test_however_many_there_are_few_are_compared_at_once() -> None:
    few = SelfCheckSettings(together=3, tick_s=0.01, deadline_s=20.0)
    async with desk(lambda body: HANG, few) as made:
        for number in range(9):
            made.fleet.up(worker(f"p{number}", made.url, Role.PREFILL, events=("tcp://x:1",)))
        await until(lambda: made.asked == 3)
        await asyncio.sleep(0.1)
        assert made.asked == 3 == len(made.checks._running)


# Pure -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], "text: token 1 is 3 there, 2 here"),
        ([1, 2], [1], "text of 1 tokens there, 2 here, alike until one ends"),
        ([], [1], "text of 1 tokens there, 0 here, alike until one ends"),
    ],
)
def test_a_difference_is_named_by_its_first_token(
    ours: list[int], theirs: list[int], said: str | None
) -> None:
    assert difference("text", ours, theirs) == said


def test_samples_are_of_every_kind_and_new_each_time() -> None:
    first, second = samples(1), samples(2)
    kinds = [plan(one.path, one.body).kind for one in first]
    assert kinds == [one.kind for one in first] == ["text", "chat", "parts", "tools"]
    assert set(SPECIAL) < set(kinds)
    assert not any(one.body == other.body for one, other in zip(first, second, strict=True))

"""Plain chats: what is taken in with one look is taken as it is member by member."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvplane.router import request as module
from kvplane.router.api import read_ask
from kvplane.router.errors import GatewayError
from kvplane.router.handoffs import HANDOFFS, SINGLE, Handoff, Seats, reserved
from kvplane.router.handoffs.base import RESERVED
from kvplane.router.handoffs.sglang import Sglang
from kvplane.router.handoffs.sglang_samples import EACH
from kvplane.router.plans import MEDIA, SELDOM
from kvplane.router.prompts import NAMED, Plan, Prompts
from kvplane.router.request import CHAT, USUAL, Ask, parse
from kvplane.router.tenants import SALTED, tenant_salt
from kvplane.vocabulary import Binding, BootstrapTriple, Pod, Room, Worker

HI = [{"role": "user", "content": "hi"}]
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**31 + 1, 2**63, 2**70, 1.0, 0.5, "", "x", "true", "5",
    "é" * 1024, "é" * 1025, [], [1], ["x"], {}, {"x": 1}, HI, [{}], [[]], [None], [{"role": "u"}],
    [*HI, {"role": "assistant", "content": None}], [*HI, {"role": 5, "content": "x"}],
    [{"content": "x"}], [{"role": "u", "content": 5}], [{"role": "u", "content": ["x", {}]}],
    [{"role": "u", "content": "x", "name": "n", "tool_calls": [{}]}], HI * 50,
]  # fmt: skip
BODIES = [
    {"messages": HI},
    {"messages": HI, "model": "m", "stream": True, "max_tokens": 16, "temperature": 0.1},
    {"messages": HI, "stream": True, "stream_options": {"include_usage": True}, "user": "u"},
]
TELLERS = [how for how in HANDOFFS.values() if isinstance(how, Sglang)]


def read(body: dict[str, Any], looks: Any) -> Ask | tuple[Any, ...]:
    try:
        ask: Ask = looks(json.dumps(body).encode())
    except GatewayError as error:
        return error.status, error.code, error.message, error.param
    return msgspec.structs.replace(ask, plain=False)


def slowly(raw: bytes) -> Ask:
    return module._parsed(CHAT, raw, json.loads(raw), "id", ())


@pytest.mark.parametrize(
    "name",
    ["messages", "model", "stream", "max_tokens", "max_completion_tokens", "n", "temperature"],
)
def test_any_value_of_a_member_is_read_alike(name: str) -> None:
    for value in ODD:
        body = {"messages": HI, name: value}
        assert read(body, lambda raw: parse(CHAT, raw, "id")) == read(body, slowly), body


def test_a_usual_chat_is_plain_and_no_other() -> None:
    for body in BODIES:
        assert parse(CHAT, json.dumps(body).encode(), "id").plain
    for more in (
        {"n": 1},
        {"tools": []},
        {"whatever": 1},
        {"rid": "x"},
        {"messages": HI * 2, "a": 1},
    ):
        assert not parse(CHAT, json.dumps({"messages": HI} | more).encode(), "id").plain
    assert not parse("/v1/completions", b'{"prompt":"x"}', "id").plain


def test_no_member_that_somebody_reads_is_usual() -> None:
    looked_at = {*SELDOM, *MEDIA, *NAMED, *RESERVED, *EACH, *SALTED, "n", "rid", "return_logprob"}
    assert USUAL.isdisjoint(looked_at)
    assert not any(map(reserved, USUAL))


@pytest.mark.parametrize("how", TELLERS, ids=lambda how: type(how).__name__)
def test_engines_are_sent_the_same(how: Handoff) -> None:
    triple = BootstrapTriple("10.0.0.1", 8998, Room(71))
    pair = Binding(Room(71), Worker(Pod("p")), Worker(Pod("d")), triple)
    for body in BODIES:
        raw = json.dumps(body, indent=1).encode() + b" \n"
        ask = parse(CHAT, raw, "id")
        other = msgspec.structs.replace(ask, plain=False)
        assert how.write(ask, [pair], SINGLE) == how.write(other, [pair], Seats())


class Tells:
    """An engine that tells tokens, or none that does."""

    def __init__(self, yes: bool) -> None:
        self._yes = yes

    def tells(self, model: str) -> bool:
        return self._yes

    async def tokenise(self, found: Plan, body: Any, model: str) -> Any:
        return ([7],), None


@pytest.mark.parametrize("folder", ["", "builtin"])
@pytest.mark.parametrize("source", [None, Tells(False), Tells(True)])
async def test_only_where_nobody_tells_tokens_a_prompt_is_not_looked_at(
    folder: str, source: Tells | None
) -> None:
    prompts = Prompts()
    await prompts.start()
    prompts.source = source
    prompts.learn("m", folder, pod="p1")
    untold = prompts.untold("m")
    assert (untold is None) == bool(folder or (source is not None and source.tells("m")))
    if untold is not None:
        assert untold == prompts.look(CHAT, {"messages": HI}, "m")
    await prompts.stop()


def test_a_tenants_chat_is_plain_no_longer() -> None:
    raw = json.dumps(BODIES[0]).encode()
    assert read_ask(CHAT, raw, "id", [], "").plain
    ask = read_ask(CHAT, raw, "id", [], tenant_salt("acme", "s"))
    assert ask.body["cache_salt"] and not ask.plain

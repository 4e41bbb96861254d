"""Ways: what engines make of a chat before their template sees it."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.router.plans import Plan, plan
from kvplane.router.ways import flat, joiner, seen

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"parameters": {"a": 1}, "name": "f", "x": 2}}
OTHER = {"type": "function", "function": {"name": "g", "description": "d", "strict": True}}
SGLANG = {
    "type": "function",
    "function": {"description": None, "name": "f", "parameters": {"a": 1}, "strict": False},
}
SGLANG_OTHER = {
    "type": "function",
    "function": {"description": "d", "name": "g", "parameters": None, "strict": True},
}
VLLM = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {"a": 1}, "x": 2},
}


def chat(**body: Any) -> Plan:
    return plan("/v1/chat/completions", {"messages": HI, **body})


@pytest.mark.parametrize(
    ("engine", "body", "tools"),
    [
        ("kvplane", {"tools": [TOOL]}, [TOOL]),
        ("kvplane", {"tools": [TOOL], "tool_choice": "none"}, [TOOL]),
        ("sglang", {"tools": [TOOL, OTHER]}, [SGLANG, SGLANG_OTHER]),
        ("sglang", {"tools": [TOOL], "tool_choice": "none"}, None),
        ("sglang", {"tools": [TOOL], "tool_choice": "required"}, [SGLANG]),
        (
            "sglang",
            {
                "tools": [TOOL, OTHER],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
            [SGLANG_OTHER],
        ),
        ("sglang", {}, None),
        ("vllm", {"tools": [TOOL], "tool_choice": "none"}, [VLLM]),
        ("vllm", {}, None),
    ],
)
def test_tools_are_shown_the_way_of_the_engine(
    engine: str, body: dict[str, Any], tools: list[Any] | None
) -> None:
    found = seen(engine, chat(**body)).tools
    assert found == tools
    orders = [list(tool["function"]) for tool in found or ()]  # as the template writes them
    assert orders == [list(tool["function"]) for tool in tools or ()]


@pytest.mark.parametrize("wrong", ["f", {"function": "f"}, {"type": "function"}, 7])
def test_a_tool_that_is_none_is_left_to_the_engine_to_refuse(wrong: Any) -> None:
    for engine in ("sglang", "vllm", "kvplane"):
        made = seen(engine, chat(tools=[wrong]))
        assert made.tools == [wrong]
        assert flat(engine, made).tools in ([wrong], ["f"])


def test_sglang_takes_an_answer_that_comes_last_for_a_question_and_opens_the_next_turn() -> None:
    last = {"role": "assistant", "content": "yes", "name": "x"}
    made = seen("sglang", chat(messages=[*HI, last], add_generation_prompt=False))
    assert made.messages == [*HI, {"role": "user", "content": "yes"}] and made.open_turn
    parts = {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
    assert seen("sglang", chat(messages=[*HI, parts])).messages == [*HI, parts]
    made = seen("vllm", chat(messages=[*HI, last], add_generation_prompt=False))
    assert made.messages == [*HI, last] and not made.open_turn


@pytest.mark.parametrize(
    ("engine", "body", "extra"),
    [
        ("kvplane", {"reasoning_effort": "low"}, None),
        ("sglang", {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            "sglang",
            {"reasoning_effort": "none", "chat_template_kwargs": {"thinking": True}},
            {"reasoning_effort": "none", "thinking": True, "enable_thinking": False},
        ),
        ("sglang", {"documents": [{}]}, None),
        ("vllm", {"reasoning_effort": "low", "documents": [{}]},
         {"reasoning_effort": "low", "documents": [{}]}),
        ("vllm", {"chat_template_kwargs": {"a": 1}}, {"a": 1}),
    ],
)  # fmt: skip
def test_members_that_reach_the_template_are_variables(
    engine: str, body: dict[str, Any], extra: dict[str, Any] | None
) -> None:
    assert seen(engine, chat(**body)).extra == extra


def test_parts_are_joined_by_a_blank_in_sglang_alone() -> None:
    assert [joiner(engine) for engine in ("sglang", "vllm", "kvplane", "?")] == [" ", *"\n\n\n"]


def test_sglang_shows_a_template_that_refused_tools_without_their_wrappers() -> None:
    made = seen("sglang", chat(tools=[TOOL]))
    assert flat("sglang", made).tools == [SGLANG["function"]]
    assert flat("vllm", made) == flat("kvplane", made) == made
    assert flat("sglang", chat()) == chat()

"""Plans: what in a body is a prompt."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.plans import PLANS, REASONS, BadPrompt, Plan, Reason, plan

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "made"),
    [
        (TEXT, {"prompt": "a"}, Plan(texts=("a",))),
        (TEXT, {"prompt": ["a"]}, Plan(texts=("a",), batched=True)),
        (TEXT, {"prompt": ["a", "b"]}, Plan(texts=("a", "b"), batched=True)),
        (TEXT, {"prompt": [1, 2]}, Plan(ids=([1, 2],))),
        (TEXT, {"prompt": [[1, 2], [3]]}, Plan(ids=([1, 2], [3]), batched=True)),
        (TEXT, {"prompt": "a", "add_special_tokens": False}, Plan(texts=("a",), special=False)),
        (TEXT, {"prompt_embeds": "x"}, Plan(reason="embeddings")),
        (TEXT, {"prompt": "a", "suffix": "b"}, Plan(reason="unsupported_member")),
        (NATIVE, {"text": "a"}, Plan(texts=("a",))),
        (NATIVE, {"text": ["a", "b"]}, Plan(texts=("a", "b"), batched=True)),
        (NATIVE, {"input_ids": [1]}, Plan(ids=([1],))),
        (NATIVE, {"input_ids": [[1], [2]]}, Plan(ids=([1], [2]), batched=True)),
        (NATIVE, {"input_embeds": [[0.1]]}, Plan(reason="embeddings")),
        (NATIVE, {"text": "a", "image_data": ["x"]}, Plan(reason="multimodal")),
        (CHAT, {"messages": HI}, Plan(messages=HI)),
        (CHAT, {"messages": HI, "tools": []}, Plan(messages=HI)),
        (CHAT, {"messages": HI, "tools": [{}]}, Plan(messages=HI, tools=[{}])),
        (
            CHAT,
            {"messages": HI, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}},
            Plan(messages=HI, open_turn=False, extra={"a": 1}),
        ),
        (CHAT, {"messages": IMAGE}, Plan(reason="multimodal")),
        (CHAT, {"messages": HI, "chat_template": "x"}, Plan(reason="unsupported_member")),
        (CHAT, {"messages": HI, "continue_final_message": True}, Plan(reason="unsupported_member")),
        (CHAT, {"messages": HI, "input_ids": [1]}, Plan(reason="unsupported_member")),
        (CHAT, {"messages": HI, "tool_choice": "none"}, Plan(messages=HI, choice="none")),
        (
            CHAT,
            {"messages": HI, "reasoning_effort": "low", "documents": None},
            Plan(messages=HI, more={"reasoning_effort": "low"}),
        ),
        ("/v1/responses", {"input": "a"}, Plan(reason="unsupported_route")),
    ],
)
def test_a_body_becomes_a_plan(path: str, body: dict[str, Any], made: Plan) -> None:
    assert plan(path, body) == made


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": 7}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": [[1, "a"]]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [2**32]}, "prompt"),
        (NATIVE, {}, "text"),
        (NATIVE, {"input_ids": "a,b", "text": None}, None),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": ["hi"]}, "messages"),
        (CHAT, {"messages": HI, "tools": "x"}, "tools"),
        (CHAT, {"messages": HI, "chat_template_kwargs": []}, "chat_template_kwargs"),
    ],
)
def test_a_wrong_member_is_named(path: str, body: dict[str, Any], field: str | None) -> None:
    if field is None:  # text where ids belong is still text to tokenise; the door refuses it
        assert plan(path, body).texts
        return
    with pytest.raises(BadPrompt) as caught:
        plan(path, body)
    assert (caught.value.param, caught.value.status) == (field, 400)


def test_an_error_shows_little_of_a_long_value() -> None:
    with pytest.raises(BadPrompt) as caught:
        plan(TEXT, {"prompt": ["secret " * 100_000, 1]})
    assert len(str(caught.value)) < 300


def test_text_parts_of_all_names_are_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "bc"}, {"text": "d"}]
    made = plan(CHAT, {"messages": [{"role": "user", "content": parts}]})
    assert made.reason is None and made.size == 4


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        (TEXT, {"prompt": "a"}, "text"),
        (CHAT, {"messages": HI}, "chat"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "chat"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"text": "a"}, {"text": "b"}]}]},
            "parts",
        ),
        (CHAT, {"messages": HI, "tools": [{}]}, "tools"),
    ],
)
def test_what_engines_render_each_their_own_way_is_told_apart(
    path: str, body: dict[str, Any], kind: str
) -> None:
    assert plan(path, body).kind == kind


def test_every_reason_has_a_sentence() -> None:
    assert set(REASONS) == set(get_args(Reason))


json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)
members = st.sampled_from(["prompt", "text", "input_ids", "messages", "tools", "suffix"])


@given(st.sampled_from(sorted(PLANS)), st.dictionaries(members, json))
def test_any_body_is_a_plan_or_a_named_mistake(path: str, body: dict[str, Any]) -> None:
    try:
        made = plan(path, body)
    except BadPrompt as error:
        assert error.param
        return
    given = [bool(made.ids), bool(made.texts), bool(made.messages), made.reason is not None]
    assert sum(given) == 1 and made.size >= 0

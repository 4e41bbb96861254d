"""Body: every wrong value is refused by its name, every good one becomes an Ask."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvplane.engine import EngineSettings
from kvplane.engine.body import Reader
from kvplane.engine.errors import BadRequest, UnknownModel
from kvplane.tokens import Tokenizer

TOKENIZER = Tokenizer.load("builtin")
READER = Reader(EngineSettings(context_length=64, most_samples=4, default_new_tokens=8), TOKENIZER)
BOS = 256


def test_a_text_gets_its_bos_and_ids_are_taken_as_they_are() -> None:
    assert READER.read("generate", {"text": "Hi"}).asks[0].ids == (BOS, 72, 105)
    assert READER.read("completions", {"prompt": "Hi"}).asks[0].ids == (BOS, 72, 105)
    assert READER.read("generate", {"input_ids": [1, 2]}).asks[0].ids == (1, 2)


def test_a_completion_may_ask_for_no_special_tokens() -> None:
    body = {"prompt": ["Hi", "H"], "add_special_tokens": False}
    assert [ask.ids for ask in READER.read("completions", body).asks] == [(72, 105), (72,)]


def test_a_chat_becomes_what_its_template_says() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    call = READER.read("chat", {"messages": messages, "model": "tiny"})
    assert list(call.asks[0].ids) == TOKENIZER.chat(messages)


def test_samples_of_one_prompt_lie_together_and_each_has_its_room() -> None:
    body = {"prompt": ["a", "b"], "n": 2, "bootstrap_room": [7, 8, 9, 10], "max_tokens": 3,
            "bootstrap_host": "h", "bootstrap_port": [1, 2, 3, 4]}  # fmt: skip
    call = READER.read("completions", body)
    assert [(a.index, a.prompt, a.sample, a.room) for a in call.asks] == [
        (0, 0, 0, 7), (1, 0, 1, 8), (2, 1, 0, 9), (3, 1, 1, 10),
    ]  # fmt: skip
    assert [(a.host, a.port, a.ids[1]) for a in call.asks] == [
        ("h", 1, 97), ("h", 2, 97), ("h", 3, 98), ("h", 4, 98),
    ]  # fmt: skip


def test_one_room_for_a_batch_counts_up() -> None:
    call = READER.read("generate", {"text": ["a", "b", "c"], "bootstrap_room": 70})
    assert [ask.room for ask in call.asks] == [70, 71, 72]
    assert call.batched


def test_limits_come_from_where_each_route_has_them() -> None:
    told = {"text": "a", "sampling_params": {"max_new_tokens": 5, "stop": "x", "ignore_eos": True}}
    ask = READER.read("generate", told).asks[0]
    assert (ask.max_new, ask.stops, ask.ignore_eos) == (5, ("x",), True)
    chat = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 4}
    assert READER.read("chat", chat).asks[0].max_new == 4
    assert READER.read("completions", {"prompt": "a"}).asks[0].max_new == 16
    assert READER.read("generate", {"text": "a"}).asks[0].max_new == 8
    assert READER.read("generate", {"input_ids": [1] * 60}).asks[0].max_new == 4


BAD: list[tuple[str, Any, str]] = [
    ("generate", [], "object"),
    ("generate", {}, "text or input_ids"),
    ("generate", {"text": "a", "input_ids": [1]}, "exactly one"),
    ("generate", {"text": 5}, "text: must be"),
    ("generate", {"text": ["a", 5.0]}, r"text\[1\]"),
    ("generate", {"input_ids": []}, "at least one token"),
    ("generate", {"input_ids": [1, 264]}, r"input_ids\[1\] = 264"),
    ("generate", {"input_ids": [1, -1]}, r"input_ids\[1\] = -1"),
    ("generate", {"input_ids": [True]}, r"input_ids\[0\]: must be"),
    ("generate", {"input_ids": [1] * 64}, "64 tokens: this model takes 63"),
    ("generate", {"text": "a", "sampling_params": []}, "sampling_params"),
    ("generate", {"text": "a", "sampling_params": {"max_new_tokens": "3"}}, "max_new_tokens"),
    ("generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "1 or more"),
    ("generate", {"text": "a", "stream": "yes"}, "stream = 'yes'"),
    ("generate", {"text": ["a"] * 5}, "5 prompts"),
    ("completions", {"prompt": "a", "max_tokens": 63}, "2 prompt tokens . 63: the context is 64"),
    ("completions", {"prompt": "a", "n": 5}, "n = 5"),
    ("completions", {"prompt": ["a", "b"], "n": 3}, "must be 4 or fewer"),
    ("completions", {"prompt": "a", "stop": [1]}, "stop"),
    ("completions", {"prompt": "a", "bootstrap_room": 0}, "bootstrap_room = 0"),
    ("completions", {"prompt": "a", "bootstrap_room": 2**63}, "bootstrap_room"),
    ("completions", {"prompt": ["a", "b"], "bootstrap_room": [1]}, "1 values, must be 2"),
    ("completions", {"prompt": ["a", "b"], "bootstrap_room": [1, 1]}, "a room of its own"),
    ("completions", {"prompt": "a", "bootstrap_host": 7}, "bootstrap_host"),
    ("completions", {"prompt": "a", "bootstrap_host": "2.2.2.2"}, "fake"),
    ("completions", {"prompt": "a", "bootstrap_port": 70000}, "bootstrap_port = 70000"),
    ("completions", {"prompt": "a", "rid": "a\r\nx: y"}, "rid"),
    ("completions", {"prompt": "a", "routed_dp_rank": -1}, "routed_dp_rank"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": [{"content": "hi"}]}, r"messages\[0\].role"),
    ("chat", {"messages": [{"role": "poet", "content": "hi"}]}, "role must be"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("route", "body", "names"), BAD)
def test_a_wrong_value_is_named(route: str, body: Any, names: str) -> None:
    with pytest.raises(BadRequest, match=names):
        READER.read(route, body)


def test_another_model_is_not_served() -> None:
    with pytest.raises(UnknownModel, match="'gpt' is not served here"):
        READER.read("completions", {"prompt": "a", "model": "gpt"})


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("generate", {"text": "x" * 5_000_000}, "text"),
        ("completions", {"prompt": ["a", "<|user|>" * 1_000_000]}, "prompt[1]"),
        ("chat", {"messages": [{"role": "user", "content": "x" * 5_000_000}]}, "messages"),
    ],
)
def test_a_text_that_cannot_fit_is_refused_without_being_tokenised(
    route: str, body: dict[str, Any], field: str
) -> None:
    begun = time.process_time()
    with pytest.raises(BadRequest) as caught:
        READER.read(route, body)
    assert caught.value.field == field and "characters" in str(caught.value)
    assert time.process_time() - begun < 1.5  # tokenising takes several seconds


HI = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("chat", {"messages": HI, "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "x", "top_p": 2}, "top_p"),
        (
            "generate",
            {"text": "x", "sampling_params": {"temperature": -1}},
            "sampling_params.temperature",
        ),
        ("chat", {"messages": HI, "frequency_penalty": True}, "frequency_penalty"),
    ],
)
def test_a_sampling_member_that_is_not_used_must_still_be_right(
    route: str, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        READER.read(route, body)
    assert caught.value.field == field

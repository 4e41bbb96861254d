"""Tokens: ids of texts and chats, and what a template may not do."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.tokens import BUILTIN, Tokenizer, TokensError

BUILT = Tokenizer.load("builtin")
BOS, EOS, SYSTEM, USER, ASSISTANT, END, TOOL = 256, 257, 259, 260, 261, 262, 263
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": st.text()}
    ),
    min_size=1,
    max_size=6,
)


def with_template(folder: Path, template: Any, **config: Any) -> Tokenizer:
    shutil.copy(BUILTIN / "tokenizer.json", folder)
    told = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return Tokenizer.load(folder, now=lambda: datetime(2026, 11, 29))


USERS_HI = [{"role": "user", "content": "hi"}]


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert BUILT.decode(BUILT.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_characters="<", codec="utf-8")))
def test_the_id_of_a_byte_is_the_byte(text: str) -> None:
    assert BUILT.encode(text, add_special_tokens=False) == list(text.encode())


def test_a_text_begins_with_bos_unless_asked_otherwise() -> None:
    assert BUILT.encode("ab") == [BOS, 97, 98]
    assert BUILT.encode("", add_special_tokens=False) == []


def test_the_ids_are_256_bytes_and_8_specials() -> None:
    assert BUILT.vocab_size == 264
    assert BUILT.eos_ids == {EOS}


def test_special_tokens_are_single_ids_and_do_not_show_in_text() -> None:
    assert BUILT.encode("a<eos>b", add_special_tokens=False) == [97, EOS, 98]
    assert BUILT.decode([BOS, 97, EOS, 98]) == "ab"


def test_bytes_that_are_no_text_show_as_replacement() -> None:
    assert BUILT.decode([0xC3]) == "�"


def test_many_texts_are_encoded_like_one_by_one() -> None:
    assert BUILT.encode_many(["ab", "é"]) == [BUILT.encode("ab"), BUILT.encode("é")]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(TokensError, match="cannot be encoded"):
        BUILT.encode("\ud800")


@pytest.mark.parametrize("ids", [[-1], ["a"]])
def test_ids_that_are_no_ids_are_refused(ids: list[Any]) -> None:
    with pytest.raises(TokensError, match="whole numbers"):
        BUILT.decode(ids)


# Chat -------------------------------------------------------------------------------------------


def test_a_chat_is_written_with_its_role_tokens() -> None:
    assert BUILT.chat([{"role": "system", "content": "s"}, *USERS_HI]) == [
        *(BOS, SYSTEM, 115, END, USER, 104, 105, END, ASSISTANT)
    ]
    assert BUILT.chat(USERS_HI, add_generation_prompt=False)[-1] == END


def test_a_tool_turn_has_its_own_role() -> None:
    assert BUILT.chat([{"role": "tool", "content": ""}])[1] == TOOL


@given(messages, messages)
def test_earlier_turns_are_a_prefix_of_later_ones(first: Any, more: Any) -> None:
    early = BUILT.render(first, add_generation_prompt=False)
    assert BUILT.render(first + more, add_generation_prompt=False).startswith(early)


def test_an_answer_given_back_continues_the_prompt_it_came_from() -> None:
    answered = [*USERS_HI, {"role": "assistant", "content": "yes"}, *USERS_HI]
    assert BUILT.render(answered).startswith(BUILT.render(USERS_HI) + "yes<|end|>")


def test_tools_are_part_of_the_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "größe"}}]
    assert '"größe"' in BUILT.render(USERS_HI, tools=tools)


def test_text_parts_are_joined_as_the_engine_joins_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|user|>a b<|end|>" in BUILT.render([{"role": "user", "content": parts}], joiner=" ")


def test_a_message_without_content_is_empty() -> None:
    assert BUILT.render([{"role": "assistant", "content": None}]).count("None") == 0


def test_an_unknown_role_is_refused_by_the_template() -> None:
    with pytest.raises(TokensError, match="role must be system"):
        BUILT.render([{"role": "boss", "content": "x"}])


@pytest.mark.parametrize("bad", [{}, {"role": 3}, {"role": "user", "content": [{"a": 1}]}])
def test_a_broken_message_is_a_named_error(bad: dict[str, Any]) -> None:
    with pytest.raises(TokensError):
        BUILT.render([bad])


# Folders of other models ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trick",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{{ ('%s' | format('x') | attr('__class__')).__mro__.x }}",
    ],
)
def test_the_sandbox_refuses_tricks(trick: str, tmp_path: Path) -> None:
    with pytest.raises(TokensError, match="chat template"):
        with_template(tmp_path, trick).render(USERS_HI)


def test_a_template_cannot_reach_attributes_of_python(tmp_path: Path) -> None:
    trick = "{% if messages.__class__ %}in{% else %}out{% endif %}"
    with pytest.raises(TokensError):
        with_template(tmp_path, "{{ messages.__class__.__name__ }}").render(USERS_HI)
    assert with_template(tmp_path, trick).render(USERS_HI) == "out"


def test_templates_have_the_variables_of_huggingface(tmp_path: Path) -> None:
    text = (
        "{{ bos_token }}{{ eos_token }}{{ strftime_now('%Y') }}{{ thinking }}{{ tools | tojson }}"
    )
    found = with_template(tmp_path, text).render(USERS_HI, extra={"thinking": "on"})
    assert found == "<bos><eos>2026onnull"


def test_tojson_does_not_escape_html(tmp_path: Path) -> None:
    assert with_template(tmp_path, "{{ '<é>' | tojson }}").render(USERS_HI) == '"<é>"'


def test_a_template_that_walks_over_parts_gets_them(tmp_path: Path) -> None:
    text = (
        "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert with_template(tmp_path, text).render([{"role": "user", "content": parts}]) == "[a][b]"


def test_arguments_of_a_call_arrive_as_an_object(tmp_path: Path) -> None:
    text = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    call = {"function": {"name": "w", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert with_template(tmp_path, text).render([message]) == "Ulm"


def test_the_template_for_tools_is_used_where_there_is_one(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    tokenizer = with_template(tmp_path, named)
    assert (tokenizer.render(USERS_HI), tokenizer.render(USERS_HI, tools=[{}])) == ("d", "t")


def test_a_template_file_of_its_own_wins(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own")
    assert with_template(tmp_path, "config").render(USERS_HI) == "own"


def test_special_tokens_may_be_objects_and_end_ids_a_list(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    tokenizer = with_template(tmp_path, "{{ eos_token }}", eos_token={"content": "<eos>"})
    assert tokenizer.eos_ids == {7, 8, EOS}
    assert tokenizer.render(USERS_HI) == "<eos>"


def test_a_folder_without_a_template_says_so_when_asked(tmp_path: Path) -> None:
    with pytest.raises(TokensError, match="no chat template"):
        with_template(tmp_path, None).render(USERS_HI)


def test_limits_of_training_do_not_cut_prompts(tmp_path: Path) -> None:
    told = json.loads((BUILTIN / "tokenizer.json").read_text())
    told["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    assert len(Tokenizer.load(tmp_path).encode("abcdef")) == 7


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}'),
    ],
)
def test_a_broken_folder_is_named(name: str, text: str, tmp_path: Path) -> None:
    shutil.copy(BUILTIN / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(TokensError):
        Tokenizer.load(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokensError, match=r"holds no tokenizer.json"):
        Tokenizer.load(tmp_path / "nothing")

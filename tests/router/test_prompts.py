"""Prompts: ids as the engine sees them, off the event loop, and reasons where there are none."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kit.wait import until
from tokenizers import AddedToken, models, normalizers
from tokenizers import Tokenizer as Encoder

from kvplane.router import prompts as module
from kvplane.router import tokenisers
from kvplane.router.plans import Plan
from kvplane.router.prompts import BadPrompt, Prompt, Prompts, Reason
from kvplane.router.settings import PromptSettings
from kvplane.seams import Seams
from kvplane.tokens import BUILTIN, Tokenizer

CHAT, TEXT, NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
HI = [{"role": "user", "content": "hi"}]


def listed(found: Prompt) -> list[list[int]]:
    assert found.tokens is not None, found.reason
    return [list(ids) for ids in found.tokens]


@pytest.fixture
async def prompts() -> AsyncIterator[Prompts]:
    found = Prompts()
    await found.start()
    found.learn("tiny", "builtin")
    yield found
    await found.stop()


@pytest.mark.parametrize(
    ("path", "body", "ids"),
    [
        (TEXT, {"prompt": "ab"}, [[256, 97, 98]]),
        (TEXT, {"prompt": ["a", "b"]}, [[256, 97], [256, 98]]),
        (TEXT, {"prompt": [5, 6]}, [[5, 6]]),
        (NATIVE, {"text": "ab"}, [[256, 97, 98]]),
        (NATIVE, {"input_ids": [[5], [6]]}, [[5], [6]]),
        (CHAT, {"messages": HI}, [[256, 260, 104, 105, 262, 261]]),
    ],
)
async def test_a_body_becomes_the_ids_the_engine_sees(
    prompts: Prompts, path: str, body: dict[str, Any], ids: list[list[int]]
) -> None:
    found = await prompts.tokenise(path, body, "tiny")
    assert listed(found) == ids and found.reason is None
    assert (found.total, found.longest) == (sum(map(len, ids)), max(map(len, ids)))


async def test_three_turns_of_a_chat_share_their_beginning(prompts: Prompts) -> None:
    answered = [*HI, {"role": "assistant", "content": "yes"}, *HI]
    first = (await prompts.tokenise(CHAT, {"messages": HI}, "tiny")).tokens
    second = (await prompts.tokenise(CHAT, {"messages": answered}, "tiny")).tokens
    assert first and second and second[0][: len(first[0])] == first[0]


async def test_parts_are_joined_the_way_of_the_models_engine(prompts: Prompts) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"messages": [{"role": "user", "content": parts}]}
    found = {}
    for engine in ("vllm", "sglang", "kvplane"):
        prompts.learn(engine, "builtin", engine)
        tokens = (await prompts.tokenise(CHAT, body, engine)).tokens
        assert tokens is not None
        found[engine] = bytes(list(tokens[0][2:5]))
    assert found == {"vllm": b"a\nb", "sglang": b"a b", "kvplane": b"a\nb"}


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "template"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        (TEXT, {"prompt": "\ud800"}, "not_unicode"),
        ("/v1/embeddings", {"input": "x"}, "unsupported_route"),
    ],
)
async def test_what_cannot_be_known_has_a_reason(
    prompts: Prompts, path: str, body: dict[str, Any], reason: str
) -> None:
    found = await prompts.tokenise(path, body, "tiny")
    assert (found.tokens, found.reason, found.total) == (None, reason, 0)


async def test_a_callers_mistake_is_an_error(prompts: Prompts) -> None:
    with pytest.raises(BadPrompt, match="'messages' is \\[\\]: must be"):
        await prompts.tokenise(CHAT, {"messages": []}, "tiny")


async def test_a_model_without_a_tokenizer_has_a_reason_but_its_ids_pass(prompts: Prompts) -> None:
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "other")).reason == "no_tokenizer"
    assert (await prompts.tokenise(TEXT, {"prompt": [1]}, "other")).tokens == ([1],)


async def test_the_only_model_is_meant_where_none_is_named(prompts: Prompts) -> None:
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"})) == [[256, 97]]


async def test_the_gateways_own_tokenizer_stands_in() -> None:
    prompts = Prompts(default="builtin")
    await prompts.start()
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "any")) == [[256, 97]]
    await prompts.stop()


async def test_a_broken_folder_is_a_reason(prompts: Prompts, tmp_path: Path) -> None:
    prompts.learn("bad", str(tmp_path))
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")).reason == "broken_tokenizer"


async def test_a_folder_that_was_repaired_is_read_again(prompts: Prompts, tmp_path: Path) -> None:
    prompts.learn("bad", str(tmp_path))
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")).reason == "broken_tokenizer"
    shutil.copytree(BUILTIN, tmp_path, dirs_exist_ok=True)
    prompts.learn("bad", str(tmp_path))
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")) == [[256, 97]]


async def test_an_adapter_has_the_tokens_of_its_base_as_long_as_a_pod_serves_it(
    prompts: Prompts,
) -> None:
    prompts.learn("other", "", "vllm", "p2")
    prompts.learn("tiny", "builtin", "kvplane", "p1", ("sql",))
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "sql")) == [[256, 97]]
    prompts.learn("tiny", "builtin", "kvplane", "p1")
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "sql")).reason == "no_tokenizer"
    prompts.learn("tiny", "builtin", "kvplane", "p1", ("sql",))
    prompts.forget("p1")
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "sql")).reason == "no_tokenizer"
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "tiny")) == [[256, 97]]


async def test_models_that_nobody_serves_any_more_are_forgotten_when_there_are_many() -> None:
    prompts = Prompts()
    for number in range(2000):
        prompts.learn(f"m{number}", "", "vllm", "p1")
    assert len(prompts._homes) == module.MOST_MODELS
    assert prompts._homes["m1999"].engines == {"p1": "vllm"}


PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


async def test_where_engines_of_two_kinds_would_differ_that_is_a_reason(prompts: Prompts) -> None:
    prompts.learn("both", "builtin", "vllm", "p1")
    prompts.learn("both", "builtin", "sglang", "p2")
    parts = {"messages": [{"role": "user", "content": PARTS}]}
    assert (await prompts.tokenise(CHAT, parts, "both")).reason == "mixed_engines"
    assert (await prompts.tokenise(CHAT, {"messages": HI}, "both")).tokens is not None
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "both")).tokens is not None
    prompts.forget("p2")
    assert (await prompts.tokenise(CHAT, parts, "both")).tokens is not None


class Elsewhere:
    """Another source of tokens."""

    def __init__(self, reason: Reason | None = None) -> None:
        self.asked: list[tuple[Plan, Any, str]] = []
        self.reason, self.knows = reason, True

    def tells(self, model: str) -> bool:
        return self.knows

    async def tokenise(self, found: Plan, body: Any, model: str) -> module.Result:
        self.asked.append((found, body, model))
        return (None, self.reason) if self.reason else (([7, 8],), None)


async def test_without_a_folder_an_engine_is_asked(prompts: Prompts) -> None:
    prompts.source = source = Elsewhere()
    prompts.learn("other", "", "vllm", "p1")
    body = {"prompt": "a", "cache_salt": "s"}
    found = await prompts.tokenise(TEXT, body, "other")
    assert (listed(found), found.reason, found.salt) == ([[7, 8]], None, "s")
    assert [(body, model) for _, body, model in source.asked] == [(body, "other")]
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "tiny")) == [[256, 97]]
    assert listed(await prompts.tokenise(TEXT, {"prompt": [1]}, "other")) == [[1]]
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "nobody's")).reason == "no_tokenizer"
    assert len(source.asked) == 1, "where the ids are here nobody is asked, nor of other models"


async def test_with_a_broken_folder_an_engine_is_asked(prompts: Prompts, tmp_path: Path) -> None:
    prompts.source = Elsewhere()
    prompts.learn("bad", str(tmp_path))
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")) == [[7, 8]]


@pytest.mark.parametrize(
    ("told", "reason"), [("no_tokenizer", "broken_tokenizer"), ("engine_silent", "engine_silent")]
)
async def test_where_no_engine_tells_the_reason_is_the_nearest(
    prompts: Prompts, tmp_path: Path, told: Reason, reason: Reason
) -> None:
    prompts.source = Elsewhere(told)
    prompts.learn("bad", str(tmp_path))
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")).reason == reason


async def test_a_kind_that_the_engines_make_otherwise_is_asked_of_them(prompts: Prompts) -> None:
    prompts.source = Elsewhere()
    prompts.distrust("tiny", "parts", "p1")
    parts = {"messages": [{"role": "user", "content": PARTS}]}
    assert listed(await prompts.tokenise(CHAT, parts, "tiny")) == [[7, 8]]
    own = listed(await prompts.tokenise(CHAT, parts, "tiny", own=True))
    assert own == [Tokenizer.load("builtin").chat(parts["messages"])]
    prompts.distrust("tiny", "parts", "p1", wrong=False)
    assert listed(await prompts.tokenise(CHAT, parts, "tiny")) == own


async def test_a_template_that_refuses_tools_gets_them_as_sglang_gives_them_then(
    prompts: Prompts, tmp_path: Path
) -> None:
    shutil.copytree(BUILTIN, tmp_path, dirs_exist_ok=True)
    template = "{{ tools[0]['name'] if 'name' in tools[0] else raise_exception('no wrapper') }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    body = {"messages": HI, "tools": [{"type": "function", "function": {"name": "ab"}}]}
    prompts.learn("flat", str(tmp_path), "sglang", "p1")
    assert listed(await prompts.tokenise(CHAT, body, "flat")) == [[97, 98]]
    prompts.learn("flat", str(tmp_path), "vllm", "p1")
    assert (await prompts.tokenise(CHAT, body, "flat")).reason == "template"


async def test_a_later_word_without_a_folder_keeps_the_one_known(prompts: Prompts) -> None:
    prompts.learn("tiny", "", "sglang")
    assert (await prompts.tokenise(TEXT, {"prompt": "a"}, "tiny")).tokens is not None


@pytest.mark.parametrize(
    ("body", "adapter", "salt"),
    [
        ({"lora_path": "fr", "cache_salt": "s"}, "fr", "s"),
        ({"extra_key": "e"}, "", "e"),
        ({"lora_path": ["a"], "cache_salt": 7}, "", ""),
    ],
)
async def test_what_keeps_equal_prompts_apart_comes_along(
    prompts: Prompts, body: dict[str, Any], adapter: str, salt: str
) -> None:
    found = await prompts.tokenise(NATIVE, {"text": "a", **body}, "tiny")
    assert (found.adapter, found.salt) == (adapter, salt)


async def test_too_long_a_text_is_routed_by_load() -> None:
    prompts = Prompts(PromptSettings(most_chars=3), "builtin")
    await prompts.start()
    assert (await prompts.tokenise(TEXT, {"prompt": "abcd"})).reason == "too_large"
    await prompts.stop()


# Off the loop -----------------------------------------------------------------------------------


class Held:
    """A tokenizer that works when it is let go."""

    def __init__(self) -> None:
        self.seams, self.timeless = Seams(), True
        self.go = threading.Event()
        self.threads: set[str] = set()
        self.longest = 0  # texts up to this are done at once

    def encode_many(self, texts: list[str], special: bool) -> list[list[int]]:
        self.threads.add(threading.current_thread().name)
        assert len(texts[0]) <= self.longest or self.go.wait(10)
        return [[1] for _ in texts]


async def held(monkeypatch: pytest.MonkeyPatch, settings: PromptSettings) -> tuple[Held, Prompts]:
    tokenizer = Held()
    monkeypatch.setattr(tokenisers.Tokenizer, "load", lambda folder: tokenizer)
    prompts = Prompts(settings, "builtin")
    await prompts.start()
    return tokenizer, prompts


async def test_tokenising_never_stands_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, prompts = await held(monkeypatch, PromptSettings())
    work = asyncio.create_task(prompts.tokenise(TEXT, {"prompt": "a"}))
    await until(lambda: bool(tokenizer.threads), timeout_s=5)
    assert all(name.startswith("prompts") for name in tokenizer.threads)
    tokenizer.go.set()
    assert listed(await work) == [[1]]
    await prompts.stop()


async def test_beyond_its_places_a_request_goes_on_without_knowledge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, prompts = await held(monkeypatch, PromptSettings(threads=1, waiting=2))
    work = [asyncio.create_task(prompts.tokenise(TEXT, {"prompt": "a"})) for _ in range(3)]
    await until(work[2].done, timeout_s=5)
    assert work[2].result().reason == "busy"
    tokenizer.go.set()
    assert [listed(await one) for one in work[:2]] == [[[1]], [[1]]]
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"})) == [[1]]
    await prompts.stop()


async def test_a_short_prompt_never_waits_behind_long_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, prompts = await held(monkeypatch, PromptSettings(threads=2, waiting=9))
    tokenizer.longest = 100
    long = [asyncio.create_task(prompts.tokenise(TEXT, {"prompt": "a" * 99_999})) for _ in range(9)]
    await until(lambda: len(tokenizer.threads) == 2, timeout_s=5)
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"})) == [[1]]
    assert not any(one.done() for one in long)
    tokenizer.go.set()
    assert [listed(await one) for one in long] == [[[1]]] * 9
    await prompts.stop()


async def test_of_a_conversations_next_turn_only_the_end_is_tokenised(prompts: Prompts) -> None:
    turns = [{"role": "user", "content": "word " * 2000}]
    first = listed(await prompts.tokenise(CHAT, {"messages": turns}, "tiny"))
    turns += [{"role": "assistant", "content": "yes"}, *HI]
    before = prompts.recall.tokens["tokenised"]
    second = listed(await prompts.tokenise(CHAT, {"messages": turns}, "tiny"))
    assert second[0][: len(first[0])] == first[0]
    assert second[0] == Tokenizer.load("builtin").chat(turns)
    assert prompts.recall.tokens["tokenised"] - before < 2100 < prompts.recall.tokens["reused"]
    assert prompts.recall.prompts == {"miss": 1, "hit": 1}


async def test_what_was_asked_before_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, prompts = await held(monkeypatch, PromptSettings())
    tokenizer.longest = 100
    await prompts.tokenise(TEXT, {"prompt": "a"})
    tokenizer.longest = 0
    for _ in range(3):
        assert listed(await prompts.tokenise(TEXT, {"prompt": "a"})) == [[1]]
    assert prompts.recall.prompts["same"] == 3
    tokenizer.go.set()
    others: list[tuple[str, dict[str, Any]]] = [
        (TEXT, {"prompt": "a", "add_special_tokens": False}),
        (TEXT, {"prompt": ["a", "a"]}),
        (TEXT, {"prompt": "b"}),
    ]
    for path, body in others:
        await prompts.tokenise(path, body)
    assert prompts.recall.prompts["same"] == 3, "whatever decides the ids makes it another prompt"
    await prompts.stop()


async def test_all_that_a_template_sees_makes_it_another_prompt(
    prompts: Prompts, tmp_path: Path
) -> None:
    shutil.copytree(BUILTIN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ [messages, tools, x | default(0)] | tojson }}"
    )
    prompts.learn("all", str(tmp_path), "vllm", "p1")
    bodies: list[dict[str, Any]] = [
        {"messages": HI},
        {"messages": [*HI, *HI]},
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": HI, "chat_template_kwargs": {"x": 1}},
        {"messages": HI, "chat_template_kwargs": {"x": 2}},
        {"messages": HI, "documents": [{}]},
        {"messages": HI, "add_generation_prompt": False},
    ]
    first = [listed(await prompts.tokenise(CHAT, body, "all")) for body in bodies]
    again = [listed(await prompts.tokenise(CHAT, body, "all")) for body in bodies]
    assert first == again and prompts.recall.prompts["same"] == len(bodies)
    prompts.learn("all", str(tmp_path), "sglang", "p1")
    await prompts.tokenise(CHAT, bodies[0], "all")
    assert prompts.recall.prompts["same"] == len(bodies), "another engine has ways of its own"


async def test_a_template_that_tells_the_time_is_asked_each_time(
    prompts: Prompts, tmp_path: Path
) -> None:
    shutil.copytree(BUILTIN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d') }}")
    prompts.learn("dated", str(tmp_path))
    for _ in range(3):
        await prompts.tokenise(CHAT, {"messages": HI}, "dated")
    assert not prompts.recall.prompts["same"]


async def test_what_is_remembered_as_a_whole_is_bounded() -> None:
    prompts = Prompts(PromptSettings(recall_bytes=8 * 4000), "builtin")
    await prompts.start()
    for number in range(50):
        await prompts.tokenise(TEXT, {"prompt": f"{number}"})
    assert 0 < prompts._tokenisers._same.bytes <= 4000
    await prompts.stop()
    prompts = Prompts(PromptSettings(recall_bytes=0), "builtin")
    await prompts.start()
    for _ in range(2):
        assert listed(await prompts.tokenise(TEXT, {"prompt": "a"})) == [[256, 97]]
    assert not prompts.recall.prompts["same"]
    await prompts.stop()


async def test_a_slow_prompt_is_routed_by_load(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, prompts = await held(monkeypatch, PromptSettings(deadline_s=0.01))
    assert (await prompts.tokenise(TEXT, {"prompt": "a"})).reason == "slow"
    tokenizer.go.set()
    await prompts.stop()


async def test_clients_that_leave_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, prompts = await held(monkeypatch, PromptSettings(threads=1, waiting=4))
    for _ in range(3):
        work = [asyncio.create_task(prompts.tokenise(TEXT, {"prompt": "a"})) for _ in range(4)]
        await asyncio.sleep(0)
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    tokenizer.go.set()

    await until(lambda: prompts._tokenisers._lanes[0].places._value == 4, timeout_s=5)
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"})) == [[1]]
    await prompts.stop()


async def test_after_the_end_nothing_is_tokenised() -> None:
    prompts = Prompts(default="builtin")
    await prompts.start()
    await prompts.stop()
    assert (await prompts.tokenise(TEXT, {"prompt": "a"})).reason == "busy"


def test_the_real_tokenizer_is_what_prompts_load() -> None:
    assert tokenisers.Tokenizer is Tokenizer


@pytest.mark.parametrize(
    "model",
    [
        models.BPE({"a": 0}, [], unk_token="<unk>"),
        models.Unigram([("a", 0.0)], None),
        models.WordLevel({"a": 0}, unk_token="<unk>"),
        models.WordPiece({"a": 0}, unk_token="<unk>"),
    ],
    ids=["bpe", "unigram", "word-level", "word-piece"],
)
@pytest.mark.parametrize("text", ["z", "z" * 5000])
async def test_a_tokenizer_that_lacks_a_token_for_what_it_lacks_is_a_reason(
    prompts: Prompts, model: Any, text: str, tmp_path: Path
) -> None:
    Encoder(model).save(str(tmp_path / "tokenizer.json"))
    prompts.learn("bad", str(tmp_path))
    assert (await prompts.tokenise(TEXT, {"prompt": text}, "bad")).reason == "broken_tokenizer"
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")) == [[0]]


async def test_a_tokenizer_that_panics_is_a_reason(prompts: Prompts, tmp_path: Path) -> None:
    """Seen with blanks that are a token of their own and cut off as well."""
    encoder = Encoder(models.BPE({"a": 0, "é": 1}, []))
    encoder.normalizer = normalizers.Strip()
    encoder.add_tokens([AddedToken("  ", normalized=True)])
    encoder.save(str(tmp_path / "tokenizer.json"))
    prompts.learn("bad", str(tmp_path))
    assert (await prompts.tokenise(TEXT, {"prompt": "é  a"}, "bad")).reason == "broken_tokenizer"
    assert listed(await prompts.tokenise(TEXT, {"prompt": "a"}, "bad")) == [[0]]

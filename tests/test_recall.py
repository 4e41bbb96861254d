"""Recall: tokens of a text with a remembered beginning are those of the whole text, always."""

from __future__ import annotations

import logging
import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.encoders import CORPUS, ENCODERS, MARKS, WORDS, tokenizer
from kit.memory import bytes_in

from kvplane.recall import ENTRY_BYTES, Recall, Shelf
from kvplane.seams import LETTERS, Seams
from kvplane.tokens import Tokenizer, TokensError

MANY = 2**30
NAMES = [*ENCODERS, "builtin"]
ODD = [
    "e\u0301", "\u0301", "\u200d", "👩‍👩‍👧", "🏳️‍🌈", "ﬁ", "ſ", "Å", "가", "\u1100\u1161", "が",
    "か\u3099", "，", "。", "、", "世", "界", "й", "Σ", "İ", "\u2028", "\u0085", "\u00a0", "\u3000",
    "▁", "Ġ", "Ċ", "\ufeff", "\x00", "\r", "\r\n", "\n", "\n\n", "  ", " ", "\t", "'", "'s", "'LL",
    "’s", "a", "Z", "1", "1234", "٣", "<|im_", "_end|>", "<|", "|>", "<", ">", "<|im_end|>!", "s><",
    "[<s>]", "<a b>", "<a，>", "-=im>",
    "<mask>", "<|end|>", "<think>", "Token", "Token ", "end", "word", "it", "the ", " the", "are",
    "Привет", "слово", "你好", "안녕", "</", "\\", "{", "}", "[", ".", ",", "!", "-", "_", "=",
]  # fmt: skip
bits = st.one_of(
    st.sampled_from([*ODD, *MARKS, "<|end|>", "<eos>"]),
    st.sampled_from(WORDS.split(" ")),
    st.text(max_size=3),
    st.text(alphabet="aA bе\n，的'1<|>", max_size=8),
)
texts = st.lists(bits, max_size=24).map("".join)
seams_of_every = pytest.mark.parametrize("name", NAMES)


def whole(made: Tokenizer, text: str, special: bool) -> list[int]:
    return made.encode_many([text], special)[0]


def test_every_kind_of_tokenizer_is_cut_where_that_is_safe_and_nowhere_else() -> None:
    found = {name: tokenizer(name).seams for name in NAMES}
    assert {name for name, one in found.items() if set(one.gaps) == set(" \n，。、")} == {
        *("gpt2", "llama3", "qwen2", "o200k", "deepseek", "tricky", "overlapping", "builtin")
    }
    assert {name for name, one in found.items() if not one.gaps} == {
        *("ends_in_letters", "single_words", "crossing", "unigram_whole", "unigram_nmt"),
        *("unknown_pattern", "bytes_first", "bert_bytes"),
    }
    markless = {name for name, one in found.items() if not one.marks}
    assert markless == {"single_words", "overlapping"}
    assert "<|im_end|>" not in found["tricky"].marks  # another added token holds it
    assert "<mask>" not in found["tricky"].marks and "<|end|>" in found["tricky"].marks


@seams_of_every
@settings(max_examples=40)
@given(text=texts, least=st.integers(1, 7), special=st.booleans())
def test_parts_of_a_text_have_the_tokens_of_the_whole(
    name: str, text: str, least: int, special: bool
) -> None:
    made = tokenizer(name)
    recall = Recall(MANY, check_every=0, least_chars=least)
    assert "".join(made.seams.pieces(text, least)) == text
    for _ in range(2):  # what is remembered is the same again
        (found,) = recall.encode_many(made, [text], special)
        assert found.tolist() == whole(made, text, special)
    assert not recall.wrong


@seams_of_every
@settings(max_examples=15)
@given(turns=st.lists(texts, min_size=1, max_size=4), edit=texts, at=st.integers(0, 40))
def test_so_have_the_turns_of_a_conversation_and_texts_that_were_edited(
    name: str, turns: list[str], edit: str, at: int
) -> None:
    made, recall = tokenizer(name), Recall(MANY, check_every=0, least_chars=2)
    asked = ["".join(turns[: end + 1]) for end in range(len(turns))]
    asked += [asked[-1][:at] + edit + asked[-1][at:], asked[-1][at:], asked[-1][:at]]
    for text in asked:
        (found,) = recall.encode_many(made, [text], False)
        assert found.tolist() == whole(made, text, False)


@settings(max_examples=100)
@given(letter=st.sampled_from("azAZАЯая一龥가힣"), gap=st.sampled_from(" \n，。、"), rest=texts)
def test_before_a_gap_behind_a_letter_a_text_may_be_cut(letter: str, gap: str, rest: str) -> None:
    for name in NAMES:
        made = tokenizer(name)
        if gap in made.seams.gaps:
            guard = whole(made, "a", False)
            behind = whole(made, "a" + gap + rest, False)[len(guard) :]
            left = rest + letter
            together = whole(made, left + gap + rest, False)
            assert together == whole(made, left, False) + behind, name


def test_letters_are_letters_that_stay_letters() -> None:
    import re
    import unicodedata

    every = re.findall(f"[{LETTERS}]", "".join(map(chr, range(0x11000))))
    assert len(every) > 30_000
    for form in ("NFC", "NFKC"):
        assert all(unicodedata.normalize(form, one) == one for one in every)
    for one in every:
        apart = unicodedata.normalize("NFKD", one)
        assert all(unicodedata.category(part).startswith("L") for part in apart)


# Long texts, as the gateway asks -----------------------------------------------------------------

LONG = "".join(CORPUS)


@seams_of_every
def test_of_a_longer_text_only_what_is_new_is_tokenised(name: str) -> None:
    made, recall = tokenizer(name), Recall(MANY)
    text = LONG + "<s>" + LONG
    for more in ("", "<s>and then some", " more", "\n"):
        text += more
        (found,) = recall.encode_many(made, [text], True)
        assert found.tolist() == whole(made, text, True)
    if made.seams.reason:
        assert recall.prompts == {"unsafe": 4}
    else:
        assert recall.prompts == {"miss": 1, "hit": 3}
        assert recall.tokens["reused"] > recall.tokens["tokenised"]


def test_short_texts_are_left_alone_and_lists_keep_their_order() -> None:
    made, recall = tokenizer("llama3"), Recall(MANY)
    asked = ["a", LONG, "", "b c", LONG + " d"]
    found = recall.encode_many(made, asked, True)
    assert [one.tolist() for one in found] == made.encode_many(asked, True)
    assert recall.prompts == {"short": 3, "miss": 1, "hit": 1}


def test_conversations_share_what_they_begin_with() -> None:
    made, recall = tokenizer("qwen2"), Recall(MANY)
    recall.encode_many(made, [LONG], False)
    held = recall.held_bytes
    for number in range(50):
        recall.encode_many(made, [f"{LONG} and {number}"], False)
    assert recall.held_bytes < held + 10_000


def test_two_tokenizers_do_not_share() -> None:
    recall = Recall(MANY)
    for name in ("llama3", "qwen2", "gpt2"):
        (found,) = recall.encode_many(tokenizer(name), [LONG], False)
        assert found.tolist() == whole(tokenizer(name), LONG, False)


def test_no_bytes_no_memory() -> None:
    made, recall = tokenizer("llama3"), Recall(0)
    for _ in range(2):
        assert recall.encode_many(made, [LONG], True)[0].tolist() == whole(made, LONG, True)
    assert (recall.held_bytes, recall.prompts) == (0, {})


def test_a_text_that_is_no_unicode_is_refused_as_ever() -> None:
    with pytest.raises(TokensError, match="cannot be encoded"):
        Recall(MANY).encode_many(tokenizer("llama3"), [LONG + "\ud800" + LONG], False)


class Wrong:
    """A tokenizer whose seams are not true."""

    def __init__(self) -> None:
        self.seams, self._made = Seams(gaps="e", frame=((), ())), tokenizer("llama3")

    def encode_many(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return self._made.encode_many(texts, False)


def test_seams_that_are_wrong_are_found_and_never_used_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, recall = Wrong(), Recall(MANY)
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert (
                recall.encode_many(made, [LONG], False)[0].tolist() == made.encode_many([LONG])[0]
            )
    assert "parts of a text are not its whole" in caplog.text
    assert recall.wrong == 1 and recall.prompts == {"miss": 1, "unsafe": 1}


def test_several_threads_use_it_at_once() -> None:
    made, recall = tokenizer("o200k"), Recall(60_000)  # so that it forgets all the time
    asked = [LONG[at:] + LONG[: at * 3] for at in range(0, 200, 7)]
    right = made.encode_many(asked, False)
    gate = threading.Barrier(4)

    def work(number: int) -> list[array[int]]:
        gate.wait(10)
        return [recall.encode_many(made, [text], False)[0] for text in asked[number:] + asked]

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(work, range(4))):
            assert [one.tolist() for one in found] == right[number:] + right
    assert recall.held_bytes <= 60_000 and sum(recall.prompts.values()) == 4 * 29 + 110


# The shelf --------------------------------------------------------------------------------------


def test_what_was_not_asked_for_longest_goes_first() -> None:
    shelf: Shelf[str, int] = Shelf(3 * (ENTRY_BYTES + 10))
    for number, key in enumerate("abc"):
        shelf.put(key, number, 10)
    assert shelf.get(["a", "x"]) == [0, None]
    shelf.put("d", 3, 10)
    assert shelf.get(list("abcd")) == [0, None, 2, 3]
    shelf.put("a", 9, 10)
    assert (shelf.get(["a"]), len(shelf), shelf.bytes) == ([9], 3, shelf.most_bytes)


def test_what_is_larger_than_the_shelf_is_not_kept() -> None:
    shelf: Shelf[str, int] = Shelf(1000)
    shelf.put("a", 1, 10)
    shelf.put("b", 2, 1000)
    assert shelf.get(["a", "b"]) == [1, None]


def test_the_bytes_told_are_the_bytes_held() -> None:
    import tracemalloc

    made, recall = tokenizer("llama3"), Recall(MANY, check_every=0)
    asked = [f"{number} {LONG}" for number in range(40)]
    recall.encode_many(made, [LONG], False)
    tracemalloc.start()
    before = recall.held_bytes
    for text in asked:
        recall.encode_many(made, [text], False)
    grown = bytes_in("*/recall.py", "*/seams.py")
    tracemalloc.stop()
    assert 0.5 < grown / (recall.held_bytes - before) < 1.1

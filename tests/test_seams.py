"""Seams: which patterns and added tokens leave a text safe to cut."""

from __future__ import annotations

from typing import Any

import pytest
from kit.encoders import DEEPSEEK, LLAMA3, O200K, QWEN2

from kvplane.seams import GAPS, Seams, seams_of

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}


def told(regex: str = LLAMA3, *added: dict[str, Any], **more: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTES]},
        "post_processor": None,
        "model": {"type": "BPE", "dropout": None, "vocab": {"a": 0, "Ġ": 1, "bĠ": 2}},
        **more,
    }


def added(content: str, **more: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": 7, "content": content, **flags, **more}


@pytest.mark.parametrize(
    ("regex", "gaps"),
    [
        *((one, GAPS) for one in (LLAMA3, QWEN2, O200K, DEEPSEEK)),
        (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", GAPS),
        (LLAMA3 + r"|(?<=a) ", ""),  # looks back
        (LLAMA3.replace(r"\p{L}+", r"\p{L}+ ?"), ""),  # a word with the blank behind it
        (LLAMA3.replace(r"[^\r\n\p{L}\p{N}]?\p{L}+|", ""), ""),  # letters in no match
        (O200K.partition("|")[2], ""),
        ("", ""),
        ("||", ""),
        (r"[", ""),
    ],
)
def test_a_pattern_is_believed_where_every_alternative_is_known(regex: str, gaps: str) -> None:
    assert set(seams_of(told(regex)).gaps) == set(gaps)


@pytest.mark.parametrize(
    ("token", "marks", "gaps"),
    [
        (added("<|end|>"), ("<|end|>",), GAPS),
        (added("<|end|>", rstrip=True), ("<|end|>",), GAPS),
        (added("<|end|>", lstrip=True), (), GAPS),
        (added("<|end|>", normalized=True), (), GAPS),
        (added(" <|end|>"), (), GAPS),
        (added("<a b>"), ("<a b>",), GAPS.replace(" ", "")),
        (added("<a\nb>"), ("<a\nb>",), GAPS.replace("\n", "")),
        (added("<end"), ("<end",), ""),
        (added("<>", single_word=True), (), ""),
        (added("<|<"), (), GAPS),  # may begin in itself
        (added("<"), (), GAPS),
    ],
)
def test_an_added_token_is_a_mark_or_forbids_gaps(
    token: dict[str, Any], marks: tuple[str, ...], gaps: str
) -> None:
    found = seams_of(told(LLAMA3, token))
    assert (found.marks, set(found.gaps)) == (marks, set(gaps))


@pytest.mark.parametrize(
    "more",
    [
        {"model": {"type": "BPE", "dropout": 0.1, "vocab": {}}},
        {"model": {"type": "Other"}},
        {"pre_tokenizer": {"type": "Other"}},
    ],
)
def test_what_is_not_known_has_no_seams_and_says_why(more: dict[str, Any]) -> None:
    found = seams_of(told(LLAMA3, added("<|end|>"), **more))
    assert found.reason and not found.marks and not found.gaps
    assert found.pieces("a b <|end|> c", 1) == ["a b <|end|> c"]


def test_a_strange_normalizer_leaves_marks_only() -> None:
    found = seams_of(told(LLAMA3, added("<|end|>"), normalizer={"type": "Strip"}))
    assert (found.marks, found.gaps, found.reason) == (("<|end|>",), "", "")


@pytest.mark.parametrize(
    ("pre", "gaps"), [("BertPreTokenizer", GAPS), ("Whitespace", GAPS), ("WhitespaceSplit", " \n")]
)
def test_blanks_beside_letters_of_asia_join_those_of_the_text(pre: str, gaps: str) -> None:
    """Unless they are thrown away as soon as they split."""
    bert = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "BertNormalizer"}]}
    assert not seams_of(told(r" ?\p{L}+|\s+", normalizer=bert)).gaps
    found = seams_of(told(normalizer=bert, pre_tokenizer={"type": pre}))
    assert set(found.gaps) == set(gaps) & set(" \n")


@pytest.mark.parametrize(
    ("post", "frame"),
    [
        (None, ((), ())),
        ({"type": "ByteLevel"}, ((), ())),
        ({"type": "BertProcessing", "sep": ["]", 2], "cls": ["[", 1]}, ((1,), (2,))),
        ({"type": "Other"}, None),
        (
            {
                "type": "TemplateProcessing",
                "single": [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "A"}}],
            },
            None,
        ),
    ],
)
def test_what_is_put_around_a_text_is_known_or_not(post: Any, frame: Any) -> None:
    assert seams_of(told(post_processor=post)).frame == frame


def test_parts_begin_alike_where_texts_do() -> None:
    seams = Seams(["<|end|>"], " ")
    assert seams.pieces("one two<|end|>three f", 3) == ["one", " two", "<|end|>three", " f"]
    assert seams.pieces("one two<|end|>three four", 3)[:3] == ["one", " two", "<|end|>three"]
    assert seams.pieces("", 3) == [""]
    assert seams.pieces("1 2 3 4", 1) == ["1 2 3 4"]  # no letter stands before the gaps

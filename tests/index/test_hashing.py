"""The public hash: exactly as written down, the same from every kind of memory, never silent."""

from __future__ import annotations

import json
import struct
from array import array
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from kvplane.index import BadValue, chain, extend, from_hex, pack, seed, to_hex
from kvplane.vocabulary import Namespace

SPACE = Namespace("m", 4)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def by_hand(ids: list[int], space: Namespace) -> list[int]:
    parent, found = xxh3_64_intdigest(space.text().encode()), []
    for start in range(0, len(ids) - space.block_size + 1, space.block_size):
        block = ids[start : start + space.block_size]
        parent = xxh3_64_intdigest(struct.pack(f"<{len(block)}I", *block), seed=parent)
        found.append(parent)
    return found


def test_the_numbers_are_those_everybody_else_computes() -> None:
    space = Namespace("qwen3", 4, adapter="sql", salt="t", extra=("img:1",))
    assert space.text() == '["kvplane-xxh3-1","qwen3","sql","t",["img:1"],4]'
    assert to_hex(seed(space)) == "7351b21e1c7f6fe7"
    blocks = chain(range(9), space).blocks
    assert list(map(to_hex, blocks)) == [
        "70c17192c8edd729",
        "063eda8f26a86844",
    ]


@given(tokens, st.integers(1, 9))
def test_a_chain_is_what_the_docstring_says(ids: list[int], size: int) -> None:
    space = Namespace("m", size)
    found = chain(ids, space)
    assert list(found.blocks) == by_hand(ids, space)
    assert found.tokens == len(ids) and len(found.blocks) == len(ids) // size


@given(tokens)
def test_every_kind_of_memory_gives_the_same(ids: list[int]) -> None:
    wanted = chain(ids, SPACE)
    many: list[Any] = [tuple(ids), array("I", ids), array("Q", ids), bytes(pack(ids))]
    many += [np.array(ids, dtype) for dtype in ("<u4", ">u4", "<u8", "<i8")]
    many += [np.repeat(np.array(ids, "<u4"), 2)[::2], bytearray(pack(ids))]
    assert all(chain(one, SPACE) == wanted for one in many)


@given(tokens, st.integers(0, 10))
def test_extending_goes_on_where_a_chain_ended(ids: list[int], cut: int) -> None:
    whole, at = chain(ids, SPACE).blocks, min(cut, len(ids) // 4)
    parent = whole[at - 1] if at else seed(SPACE)
    assert extend(parent, ids[at * 4 :], 4) == list(whole[at:])


def test_namespaces_never_meet() -> None:
    spaces = [
        Namespace("m", 4),
        Namespace("n", 4),
        Namespace("m", 4, adapter="x"),
        Namespace("m", 4, salt="x"),
        Namespace("m", 4, extra=("x",)),
        Namespace("m", 4, extra=("x", "")),
        Namespace('m","', 4),
    ]
    assert len({chain(range(4), space).blocks for space in spaces}) == len(spaces)


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ([0, -1], "tokens[1]"),
        ([2**32], "tokens[0]"),
        ([1.5], "tokens[0]"),
        (["1"], "tokens[0]"),
        ([None], "tokens[0]"),
        ("12", "tokens"),
        (None, "tokens"),
        (7, "tokens"),
        (b"abc", "tokens"),
        (np.array([-1]), "tokens[0]"),
        (np.array([0.5]), "tokens[0]"),
    ],
)
def test_what_is_no_token_is_named(wrong: Any, field: str) -> None:
    with pytest.raises(BadValue) as caught:
        chain(wrong, SPACE)
    assert caught.value.field == field


@pytest.mark.parametrize("parent", [-1, 2**64])
def test_a_parent_outside_64_bits_does_not_wrap(parent: int) -> None:
    with pytest.raises(BadValue, match="64-bit"):
        extend(parent, [1, 2, 3, 4], 4)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(BadValue, match="1 token or more"):
        chain([1], Namespace("m", 0))


@given(st.integers(0, 2**64 - 1))
def test_hex_is_16_digits_and_comes_back(number: int) -> None:
    text = to_hex(number)
    assert len(text) == 16 and from_hex(text) == number and from_hex(text.upper()) == number


@pytest.mark.parametrize("wrong", ["", "0" * 15, "0" * 17, "g" * 16, "0x" + "0" * 14, 5, None])
def test_other_texts_are_no_hash(wrong: Any) -> None:
    with pytest.raises(BadValue, match="16 hex digits"):
        from_hex(wrong)


# Extra keys: what lies under placeholder tokens (FR-EV-16)


def keyed_by_hand(ids: list[int], space: Namespace, extra: dict[int, list[str]]) -> list[int]:
    parent, found = seed(space), []
    for at in range(len(ids) // space.block_size):
        block = ids[at * space.block_size : (at + 1) * space.block_size]
        if texts := extra.get(at):
            text = json.dumps(texts, separators=(",", ":"))
            parent = xxh3_64_intdigest(text.encode(), seed=parent)
        parent = xxh3_64_intdigest(struct.pack(f"<{len(block)}I", *block), seed=parent)
        found.append(parent)
    return found


keys = st.dictionaries(st.integers(0, 12), st.lists(st.text(max_size=4), max_size=3), max_size=4)


@given(tokens, keys)
def test_a_block_with_extra_keys_is_what_the_docstring_says(
    ids: list[int], extra: dict[int, list[str]]
) -> None:
    found = chain(ids, SPACE, extra)
    assert list(found.blocks) == keyed_by_hand(ids, SPACE, extra)
    assert found.tokens == len(ids)


@given(tokens, keys, st.integers(0, 10))
def test_extending_with_extra_keys_goes_on_too(
    ids: list[int], extra: dict[int, list[str]], cut: int
) -> None:
    whole, at = chain(ids, SPACE, extra).blocks, min(cut, len(ids) // 4)
    parent = whole[at - 1] if at else seed(SPACE)
    rest = [tuple(extra.get(at + more, ())) for more in range(13)]
    assert extend(parent, ids[at * 4 :], 4, rest) == list(whole[at:])


def test_two_pictures_share_the_blocks_before_them_and_none_from_there_on() -> None:
    ids = [1, 2, 3, 4] + [99] * 8 + [5, 6, 7, 8]
    one, other = (chain(ids, SPACE, {1: [f"{name}@0"]}).blocks for name in ("imgA", "imgB"))
    moved, text = chain(ids, SPACE, {1: ["imgA@1"]}).blocks, chain(ids, SPACE).blocks
    for some, more in combinations([one, other, moved, text], 2):
        assert some[0] == more[0]
        assert not set(some[1:]) & set(more[1:])


def test_the_numbers_of_extra_keys_are_those_everybody_else_computes() -> None:
    found = chain(range(8), SPACE, {1: ["imgA@-3", "é@0"]}).blocks
    text = b'["imgA@-3","\\u00e9@0"]'
    within = xxh3_64_intdigest(text, seed=found[0])
    assert found[1] == xxh3_64_intdigest(struct.pack("<4I", 4, 5, 6, 7), seed=within)
    assert to_hex(found[1]) == "b2be7d222e50b0a8"


def test_no_keys_are_the_same_as_none() -> None:
    ids = range(12)
    assert chain(ids, SPACE, {}) == chain(ids, SPACE, {0: [], 7: ["x"]}) == chain(ids, SPACE)
    assert extend(5, ids, 4, [(), ()]) == extend(5, ids, 4)

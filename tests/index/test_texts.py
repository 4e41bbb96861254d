"""Texts: whatever was read before, token ids are what a reader of the whole text makes of them."""

from __future__ import annotations

import json
import random
import re
import sys
from array import array
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.index import BadValue, Chains, chain, numerals, question
from kvplane.index.numerals import PIECE_BYTES
from kvplane.index.texts import Texts
from kvplane.vocabulary import Namespace

MANY = 2**30
DICE = random.Random(5)
TOKENS = [DICE.randrange(10 ** DICE.randrange(1, 8)) for _ in range(40)]
LONG = [DICE.randrange(128_000) for _ in range(9000)]
SMALL = patch.object(numerals, "PIECE_BYTES", 24)
LOOKED = patch.object(numerals, "SHORT_BYTES", 0)  # nothing is read before it is asked for


@st.composite
def texts(draw: st.DrawFn) -> list[tuple[str, list[tuple[int, int]]]]:
    """Lists that begin alike, some of them hurt, and what is asked of each in turn."""
    found = []
    for _ in range(draw(st.integers(1, 6))):
        some = TOKENS[: draw(st.integers(0, 40))]
        some += draw(st.lists(st.integers(0, 9_999_999) | st.just(10**12), max_size=9))
        text = draw(st.sampled_from([", ", ", ", ","])).join(map(str, some))
        if draw(st.integers(0, 2)) == 0:
            at = draw(st.integers(0, len(text)))
            put = draw(st.sampled_from([*"0123456789, -.e", ", ", ",,", "", '"x"', "null"]))
            text = text[:at] + put + text[at + draw(st.integers(0, 2)) :]
        looks = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=3))
        found.append((text, [(min(look), max(look)) for look in looks]))
    return found


@SMALL
@pytest.mark.parametrize("short", [0, 60])
@settings(max_examples=40)
@given(told=texts())
def test_with_any_history_numbers_are_those_of_the_whole_text(told: Any, short: int) -> None:
    memory = Texts(MANY)
    for text, looks in told:
        data = f"[{text}]".encode()
        with patch.object(numerals, "SHORT_BYTES", short):
            found = numerals.numerals(data, 1, len(data) - 1, memory)
        # Those of 8 digits are taken or left, as odd blanks are of what is short.
        if not short and not re.search(r"\d{8}", text):
            with LOOKED:
                assert (found is None) == (numerals.numerals(data, 1, len(data) - 1) is None)
        if found is not None:
            wanted = array("I", json.loads(data))
            assert len(found) == len(wanted)
            for start, stop in [*looks, (0, len(wanted))]:
                assert found.packed(start, stop) == wanted[start:stop].tobytes()


def said(data: bytes, *memory: Texts) -> Any:
    try:
        asked = question.read(data, 6, *memory)
        return [list(one.blocks) for one in question.chains(asked, {1, 3}).values()]
    except BadValue as wrong:
        return wrong.field, repr(wrong.value), wrong.want


@SMALL
@patch.object(question, "AT_ONCE_BYTES", range(sys.maxsize))
@pytest.mark.parametrize("short", [0, 60])
@settings(max_examples=30)
@given(told=texts())
def test_what_is_wrong_is_refused_the_same_behind_a_beginning_that_is_known(
    told: Any, short: int
) -> None:
    memory = Texts(MANY)
    for text, _ in told:
        data = f'{{"model": "m", "token_ids": [{text}]}}'.encode()
        with patch.object(numerals, "SHORT_BYTES", short):
            found = said(data, memory)
        with patch.object(question, "AT_ONCE_BYTES", range(0)):
            assert found == said(data)


def written(tokens: list[int], mark: str = ", ") -> bytes:
    return mark.join(map(str, tokens)).encode()


@LOOKED
def test_a_next_turn_is_read_from_the_last_whole_piece_on() -> None:
    memory, first, second = Texts(MANY), written(LONG), written(LONG + LONG[:99])
    one = numerals.numerals(first, 0, len(first), memory)
    assert one is not None and one.packed(0, 9000)
    with patch.object(numerals.np, "fromstring", wraps=numerals.np.fromstring) as reads:
        two = numerals.numerals(second, 0, len(second), memory)
        known = 9000 - PIECE_BYTES // len(", 1234")
        assert two is not None
        assert two.packed(0, known) == array("I", LONG[:known]).tobytes() and not reads.called
        assert two.packed(0, 9099) == array("I", LONG + LONG[:99]).tobytes() and reads.called


def test_only_what_was_read_is_remembered_and_none_is_none() -> None:
    memory, none, text = Texts(MANY), Texts(0), written(LONG)
    for one in (memory, none, None):
        found = numerals.numerals(text, 0, len(text), one)
        assert found is not None and found.packed(0, 1)
    assert PIECE_BYTES < memory.held_bytes < 2 * PIECE_BYTES + 1000  # one of 14
    assert none.held_bytes == 0


@LOOKED
def test_pieces_of_another_hand_are_not_put_together() -> None:
    memory = Texts(MANY)
    for mark in (", ", ","):
        text = written(LONG, mark)
        found = numerals.numerals(text, 0, len(text), memory)
        assert found is not None and found.packed(0, 9000)
    for one, other in ((", ", ","), (",", ", ")):
        half = written(LONG, one)
        end = half.find(b",", PIECE_BYTES)
        tail = written(LONG, other)
        for joint in (one, other):
            mixed = half[:end] + joint.encode() + tail
            assert numerals.numerals(mixed, 0, len(mixed), memory) is None
    single = written(LONG)[: written(LONG).find(b",", PIECE_BYTES)]
    for end in (b",", b", ", b", x", b",x", b",  1", b", 01", b", -1", b" ,1"):
        assert numerals.numerals(single + end, 0, len(single + end), memory) is None


def test_a_digest_alone_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.index.texts.xxh3_64_intdigest", lambda piece: 7)
    memory = Texts(MANY)
    for at in (0, 1, 0):
        text = written(LONG[at:])
        found = numerals.numerals(text, 0, len(text), memory)
        assert found is not None and found.packed(0, 9000) == array("I", LONG[at:]).tobytes()


PROMPTS = [LONG[:at] + LONG[more : 8500 - at] for at, more in
           [(0, 0), (7000, 99), (8400, 0), (4000, 1), (4001, 1), (8400, 0)]]  # fmt: skip


def asked(tokens: list[int], chains: Chains) -> Any:
    found = question.read(json.dumps({"model": "m", "token_ids": tokens}).encode(), 9, chains.texts)
    assert isinstance(found.tokens, numerals.Numerals)
    return found.tokens


@pytest.mark.parametrize("most_bytes", [0, 60_000, MANY])
@pytest.mark.parametrize("size", [1, 3, 16, 100, 3000])
def test_names_are_right_whatever_piece_they_end_in(most_bytes: int, size: int) -> None:
    chains, dice = Chains(most_bytes), random.Random(size)
    for at, tokens in enumerate(PROMPTS):
        space = Namespace("m", size, "", "salt" * (at % 2))
        whole = list(chain(tokens, space).blocks)
        found = chains.unrolled(asked(tokens, chains), space).blocks
        assert len(found) == len(whole)
        if at % 3:
            some = dice.randrange(len(whole))  # and leave it there
            assert found[some] == whole[some]
        else:
            assert list(found) == whole
        assert chains.held_bytes <= most_bytes


@pytest.mark.parametrize("seed", range(4))
def test_names_of_several_sizes_are_right_in_whatever_turns_they_are_looked_at(seed: int) -> None:
    chains, dice = Chains(MANY), random.Random(seed)
    for tokens in PROMPTS:
        row, spaces = asked(tokens, chains), [Namespace("m", size) for size in (16, 24, 100)]
        rows = [(chains.unrolled(row, one).blocks, chain(tokens, one).blocks) for one in spaces]
        for found, whole in [dice.choice(rows) for _ in range(20)]:
            at = dice.randrange(len(whole))
            assert found[at] == whole[at]
        assert all(list(found) == list(whole) for found, whole in rows)


def test_a_next_turn_is_neither_read_nor_hashed_up_to_its_last_piece() -> None:
    chains, space = Chains(MANY), Namespace("m", 16)
    for at, most in ((8000, 500), (8400, 60)):
        chains.blocks.clear()
        names = chains.unrolled(asked(LONG[:at], chains), space).blocks
        assert list(names) == list(chain(LONG[:at], space).blocks)
        assert chains.blocks["hashed"] <= most
        assert sum(chains.blocks.values()) == at // 16


def test_chains_count_texts_among_their_bytes() -> None:
    chains = Chains(100_000)
    for tokens in PROMPTS:
        chains.unrolled(asked(tokens, chains), Namespace("m", 16)).blocks[-1]
        assert 0 < chains.texts.held_bytes <= chains.held_bytes <= 100_000
    before = chains.held_bytes
    chains.chain(LONG, Namespace("m", 16))
    assert chains.texts.held_bytes == before < chains.held_bytes <= 100_000

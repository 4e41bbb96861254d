"""Reading: long lists that are read many elements at once are what the plain way makes of them."""

from __future__ import annotations

import json
import random
import sys
from array import array
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplane.index import BadValue, numerals, question
from kvplane.index.question import read
from kvplane.index.spans import cut, hexes

MANY = [at * 7919 % 150_000 for at in range(9000)]

hexed = st.integers(0, 2**64 - 1).map("{:016x}".format)
tokens = st.lists(st.integers(0, 200_000) | st.integers(0, 2**33) | st.integers(-2, 12), max_size=9)
odd = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3) | st.integers(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=3,
)
fine = st.lists(st.integers(0, 200_000), min_size=1, max_size=9)
named = st.lists(hexed, min_size=1, max_size=4)
lists = fine | named | tokens | st.lists(hexed | odd | st.integers(0, 9), max_size=4)
LISTS = {"token_ids": fine, "block_hashes": named}
FIXED = (
    '"model": "n"', '"salt": "s"', '"adapter":"a"', '"n": 3', '"prompt": "token_ids"',
    '"prompt": "\\"token_ids\\": [1, 2]"', '"workers": ["a@1"]', '"workers": ["a b"]',
    '"items": [{"id": "x", "start": 0, "length": 1}]', '"messages": [{"token_ids": [1]}]',
    '"x": ["token_ids", [1]]', '"token_ids":null', '"block_hashes" : []', '"\\u00e9": "]"',
)  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON as programs write it, and nearly that."""
    members = ['"model": "m"', *draw(st.lists(st.sampled_from(FIXED), max_size=1))]
    for name in draw(st.lists(st.sampled_from([*LISTS]), min_size=1, max_size=2)):
        mark = draw(st.sampled_from([", ", ",", ", ", ",", " ,", ",\n"]))
        value = f"[{mark.join(map(json.dumps, draw(LISTS[name] | lists)))}]"
        colon = draw(st.sampled_from([": ", ":", " :\t"]))
        plain = f'"{name}"{colon}{value}'
        odd = plain.replace("_", "\\u005f"), f'"x": {{{plain}}}', f'"x": [{{{plain}}}]'
        members.append(draw(st.sampled_from([plain] * 9 + list(odd))))
    text = f"{{{', '.join(draw(st.permutations(members)))}}}"
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(text)))
        put = draw(st.sampled_from([*'0123456789,[]{}":.- e+\\\n', "", "true", "token_ids"]))
        text = text[:at] + put + text[at + draw(st.integers(0, 2)) :]
    return text.encode()


def said(data: bytes, at_once: range) -> Any:
    """All that is made of a body, or what is wrong with it."""
    try:
        with patch.object(question, "AT_ONCE_BYTES", at_once):
            asked = read(data, 6)
        chains = question.chains(asked, {1, 2}) if asked.text is None else asked.text
    except BadValue as wrong:
        return wrong.field, repr(wrong.value), wrong.want
    named = {size: list(chain.blocks) for size, chain in chains.items()} if not asked.text else 0
    return asked.model, asked.adapter, asked.salt, asked.workers, asked.items, chains and named


@given(bodies())
@example(b'{"model": "m", "token_ids": [1, 2], "token_ids": [3]}')
@example(b'{"model": "m", "token_ids": [1, 2], "token\\u005fids": [3]}')
@example(b'{"model": "m", "token\\u005fids": [3], "token_ids": [-1, 2]}')
@example(b'{"model": "m", "x": {"token_ids": [1, 2]}, "token_ids": []}')
@example(b'{"x": {"token_ids": [1, 2]}, "block_hashes": ["0123456789abcdef"]}')
@example(b'{"model": "m", "token_ids": [1, 02]}')
@example(b'{"model": "m", "token_ids": [4294967296, 1]}')
@example(b'{"token_ids": [1, 2], "model": "m"')
@example(b'{"block_hashes": [0], "block_hashes": []}')
@example(b'{"token_ids": ["x"], "token_ids": null}')
@example(b'{"items": [{}], "items": [[]]}')
@example(b'{"block_hashes": ["0123456789abcdeF", "0123456789abcde "]}')
@example(b'{"block_hashes": ["0123456789abcdef", "x"], "block_hashes": ["0123456789abcdef"]}')
def test_at_once_or_one_by_one_a_body_means_the_same(body: bytes) -> None:
    assert said(body, range(sys.maxsize)) == said(body, range(0))


@patch.object(numerals, "SHORT_BYTES", 0)
@given(st.text("0123456789, ", max_size=40) | tokens.map(lambda some: json.dumps(some)[1:-1]))
@example("0")
@example("00")
@example("1, 02")
@example("1,02")
@example("9999999, 1")
@example("1, 9999999, 4294967296")
@example("1,9999999,99999999,999999999")
@example("1, 0, 2")
@example("0,1, 2")
@example("1,, 2")
@example("1, , 2")
@example("1 ,2")
@example(", 1")
@example("1, ")
def test_numerals_are_exactly_short_numbers_side_by_side(text: str) -> None:
    try:
        plain = json.loads(f"[{text}]")
    except ValueError:
        plain = []
    written = text in (json.dumps(plain)[1:-1], json.dumps(plain, separators=(",", ":"))[1:-1])
    fits = written and bool(plain) and min(plain) >= 0
    found = numerals.numerals(text.encode(), 0, len(text))
    if not fits or max(plain) >= 10**8:
        assert found is None
    elif max(plain) < 10**7:
        assert found is not None
    if found is not None:
        assert len(found) == len(plain)
        assert found.packed(0, len(found)) == array("I", plain).tobytes()


@pytest.mark.parametrize("mark", [", ", ","])
def test_numerals_are_read_in_whatever_order_they_are_asked_for(mark: str) -> None:
    text, whole, dice = mark.join(map(str, MANY)).encode(), array("I", MANY), random.Random(3)
    for _ in range(5):
        found = numerals.numerals(b"[" + text + b"]", 1, len(text) + 1)
        assert found is not None and len(found) == len(MANY)
        for _ in range(9):
            start = dice.randrange(len(MANY))
            stop = start + dice.randrange(3000)
            assert found.packed(start, stop) == whole[start:stop].tobytes()


@given(st.lists(hexed | st.text('0123456789abcdefABCDEF", ', min_size=14, max_size=18), max_size=6))
def test_hexes_are_exactly_names_side_by_side(names: list[str]) -> None:
    text = json.dumps(names)[1:-1]
    fits = bool(names) and all(len(name) == 16 and " " not in name for name in names)
    for written in (text, text.replace(", ", ",")):
        try:
            wanted = [int(name, 16) for name in names] if fits else None
        except ValueError:
            wanted = None
        found = hexes(written.encode())
        assert (None if found is None else list(found)) == wanted


def test_what_is_long_enough_is_read_at_once() -> None:
    for name, row in (("token_ids", MANY[:4000]), ("block_hashes", [f"{at:016x}" for at in MANY])):
        body = json.dumps({"model": "m", name: row, "adapter": "a"}).encode()
        assert len(body) in question.AT_ONCE_BYTES
        with patch.object(question, "_decode") as plain:
            assert read(body, 10_000).adapter == "a"
        assert not plain.called


def test_a_list_is_cut_out_only_where_it_is_sure_whose_it_is() -> None:
    parts = "token_ids", b'{"token_ids": [], "b": 3}', 15, 19
    assert cut(b'{"token_ids": [1, 2], "b": 3}') == parts
    for unsure in (
        b'{"b": [1]}', b'{"token_ids": 1}', b'{"token_ids": [1', b'{"token_ids":[],"\\n":0}',
        b'{"token_ids": [1], "token_ids": 2}', b'{"x": "%b", "token_ids": [1]}' % (b"x" * 5000),
    ):  # fmt: skip
        assert cut(unsure) is None

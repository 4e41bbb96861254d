"""Frames: whatever was asked before, a body means what a reader of it alone finds."""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest.mock import patch

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvplane.index import BadValue, Chains, question
from kvplane.index.frames import Frames
from kvplane.index.question import Question, read

EVERY = patch.object(question, "AT_ONCE_BYTES", range(sys.maxsize))
BEFORE = ('{"model": "m", ', "{", '{"workers": ["a"], "model": "m", ', '{"model": "m", "x": {')
AFTER = ("}", ', "salt": "s"}', ', "items": [{"id": "i", "start": 0, "length": 1}]}', "", "}}")
NAMED = json.dumps([f"{at:016x}" for at in range(4)])
LISTS = (
    '"token_ids": [1, 20, 3]', '"token_ids": [1]', '"token_ids": [20, 4294967295]',
    '"token_ids": []', '"token_ids": [-1]', '"token_ids": [1, "]"]', '"token_ids": [1, 02]',
    '"token_ids": [1, 4294967296]', '"token_ids": [1], "token_ids": [2]', '"token_ids":[7,8]',
    f'"block_hashes": {NAMED}', f'"block_hashes": {NAMED}'.replace(", ", ","),
    '"block_hashes": ["0123456789abcdef"]', '"block_hashes": ["0123456789abcdeg"]',
    '"block_hashes": ["0123456789abcdef", "x]"]', '"block_hashes": []', '"prompt": "[1]"',
    '"block_hashes": ["0123456789abcdef"], "block_hashes": ["1123456789abcdef"]',
)  # fmt: skip


def said(asked: Question) -> Any:
    """All of it, as plain values."""
    tokens = asked.tokens if asked.tokens is None else list(question_tokens(asked))
    hashes = asked.hashes if asked.hashes is None else list(asked.hashes)
    return (
        asked.model, asked.adapter, asked.salt, asked.workers, tokens, hashes, asked.text,
        asked.items,
    )  # fmt: skip


def question_tokens(asked: Question) -> Any:
    """The tokens of one, however they are kept."""
    packed = asked.tokens.packed(0, sys.maxsize) if hasattr(asked.tokens, "packed") else None
    return asked.tokens if packed is None else memoryview(packed).cast("I")


def told(reader: Any, *given: Any) -> Any:
    try:
        return said(reader(*given))
    except BadValue as wrong:
        return wrong.field, repr(wrong.value), wrong.want


def turns(many: list[tuple[str, str, str]]) -> list[bytes]:
    return ["".join(parts).encode() for parts in many]


@EVERY
@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(st.sampled_from(BEFORE), st.sampled_from(LISTS), st.sampled_from(AFTER)),
        min_size=2, max_size=6,
    ).map(turns)
)  # fmt: skip
@example([b'{"model": "m", "token_ids": [1]}', b'{"model": "m", "token_ids": [}'])
@example([b'{"model": "m", "token_ids": [1]}', b'{"model": "m", "token_ids": [1]]}'])
def test_with_any_history_a_body_means_the_same(bodies: list[bytes]) -> None:
    frames = Frames(3, Chains(2**20).texts)
    for body in bodies:
        with patch.object(question, "AT_ONCE_BYTES", range(0)):
            wanted = told(read, body, 3)
        assert told(frames.read, body) == wanted


def test_all_but_the_list_is_read_once() -> None:
    frames = Frames(1000)
    for name, rows in (
        ("token_ids", [list(range(at, 4000)) for at in range(3)]),
        ("block_hashes", [[f"{at:016x}" for at in range(first, 900)] for first in range(3)]),
    ):
        bodies = [json.dumps({"model": "m", name: row, "salt": "s"}).encode() for row in rows]
        first = frames.read(bodies[0])
        with patch.object(question, "_parts") as parts:
            others = [frames.read(body) for body in bodies[1:]]
        assert not parts.called and {one.salt for one in [first, *others]} == {"s"}


def test_what_stands_behind_the_list_counts_too() -> None:
    """Of one length, and long enough to be read at once."""
    frames = Frames(4096)
    for worker in ("a", "b"):
        body = {"model": "m", "token_ids": [*range(1000, 3000)], "workers": [worker]}
        found = frames.read(json.dumps(body).encode())
        assert [str(one) for one in found.workers or ()] == [worker]

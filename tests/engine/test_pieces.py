"""Pieces: an answer ends where it must, and never shows a part of its stop text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.engine.model import END
from kvplane.engine.pieces import Piece, Written


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids if i != END)


def pieces(
    text: str, stops: Sequence[str] = (), most: int = 100, ignore: bool = False
) -> list[Piece]:
    """Pieces until the end; "$" stands for the end token."""
    written = Written(decode, stops, most, ignore)
    found: list[Piece] = []
    for letter in text:
        found.append(written.add(0, END if letter == "$" else ord(letter)))
        if found[-1].finish:
            break
    return found


@pytest.mark.parametrize(
    ("text", "stops", "most", "shown", "finish", "matched"),
    [
        ("abc", (), 3, "abc", "length", None),
        ("ab$cd", (), 9, "ab", "stop", END),
        ("abXcd", ("X",), 9, "ab", "stop", "X"),
        ("abXY.", ("XY",), 9, "ab", "stop", "XY"),
        ("abXZ", ("XY",), 4, "abXZ", "length", None),
        ("aXXY.", ("XY",), 9, "aX", "stop", "XY"),
        ("abX", ("XY",), 3, "abX", "length", None),
        ("abX$", ("XY",), 9, "abX", "stop", END),
    ],
)
def test_an_answer_ends_at_its_limit_its_end_token_or_its_stop_text(
    text: str, stops: Sequence[str], most: int, shown: str, finish: str, matched: object
) -> None:
    found = pieces(text, stops, most)
    assert "".join(piece.text for piece in found) == shown
    assert (found[-1].finish, found[-1].matched) == (finish, matched)
    assert not any(piece.finish for piece in found[:-1])


def test_an_ignored_end_token_is_counted_and_not_shown() -> None:
    found = pieces("a$b", most=3, ignore=True)
    assert "".join(piece.text for piece in found) == "ab"
    assert (len(found), found[-1].finish) == (3, "length")


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_streamed_text_is_what_was_written_up_to_the_first_stop(
    text: str, stops: list[str]
) -> None:
    found = pieces(text, stops, most=len(text)) if text else []
    shown = "".join(piece.text for piece in found)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert len(found) == min(ends, default=len(text))

"""Numerals: token ids that are still JSON text, read as far as somebody needs them.

Pure. To make a number of each of 8 k token ids takes longer than all else that a question does, and
most prompts are new from some block on. So the text is only looked through, many letters at once:
it has to be whole numbers of 7 digits at most, side by side as json.dumps or JSON.stringify write
them. question.py has anything else read in the plain way, which also says what is wrong with it.
What it begins with is not even looked through where somebody remembers it (texts.py). Open it to
change what such a look accepts.

    b"17, 4, 128000, 9"     4 numbers, read when asked for     b"17, 04"  b"17 4"  b"1.5"     None
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 4 * 1024  # of text that is read at once: some 600 numbers

_COMMA, _BLANK, _ZERO = b", 0"
_TWO = 0x0101  # bytes that are both True
Letters = npt.NDArray[np.uint8]
Truths = npt.NDArray[np.bool_]


class Piece:
    """Some numbers of a list, and which names the blocks have that end in it: of one chain."""

    __slots__ = ("named", "packed", "text")

    def __init__(self, text: bytes, packed: bytes) -> None:
        self.text, self.packed = text, packed  # the same as little-endian u32
        self.named: tuple[tuple[int, int, bytes], array[int]] | None = None  # see chains.py

    @property
    def room(self) -> int:
        """Bytes for names: of blocks of 4 tokens and more."""
        return len(self.packed) // 2

    @property
    def bytes(self) -> int:
        """All that it may need."""
        return len(self.text) + len(self.packed) + self.room


class Memory(Protocol):
    """What is needed of one who remembers pieces of such texts; texts.py offers it."""

    def get(self, text: bytes, step: int) -> Piece | None: ...

    def put(self, piece: Piece, step: int) -> None: ...


class Numerals:
    """Of one prompt. Not for several threads at a time."""

    __slots__ = ("_at", "_count", "_found", "_last", "_memory", "_step", "_text")

    def __init__(
        self, text: bytes, rest: tuple[int, int, int], known: list[Piece], count: int,
        memory: Memory | None,
    ) -> None:  # fmt: skip
        self._text, (self._at, self._last, self._step) = text, rest
        self._found, self._count, self._memory = known, count, memory

    def __len__(self) -> int:
        return self._count

    def pieces(self) -> Iterator[Piece]:
        """All of it in order; what nobody knows is read when it is asked for."""
        yield from self._found
        while self._at < self._last:
            yield self._next()

    def packed(self, start: int, stop: int) -> bytes:
        """Numbers start..stop-1, or those of them that there are, as little-endian u32."""
        many = sum(len(piece.packed) for piece in self._found)
        while many < 4 * stop and self._at < self._last:
            many += len(self._next().packed)
        return b"".join(piece.packed for piece in self._found)[4 * start : 4 * stop]

    def _next(self) -> Piece:
        end = self._text.find(b",", self._at + PIECE_BYTES, self._last)
        text = self._text[self._at : end if end >= 0 else self._last]
        piece = Piece(text, np.fromstring(text, "<u4", sep=",").tobytes())
        self._at = end + self._step if end >= 0 else self._last
        if end >= 0 and self._memory is not None:
            self._memory.put(piece, self._step)
        self._found.append(piece)
        return piece


def numerals(text: bytes, first: int, last: int, memory: Memory | None = None) -> Numerals | None:
    """Of what stands between the brackets of a list; None where it is for the plain way."""
    at, step, known = _known(text, first, last, memory)
    if at >= last or text[at] < _ZERO:
        return None
    letters = np.frombuffer(text, np.uint8, last - at, at)
    comma, digit = letters == _COMMA, letters - _ZERO < 10  # below 0 they are far above it
    commas = _many(comma)
    others = last - at - commas - _many(digit)
    if others not in (0, commas):
        return None
    if others and _many(comma[:-1] & (letters[1:] == _BLANK)) != commas:
        return None  # else each of them is a blank behind a comma
    if commas and step != (2 if others else 1):
        return None
    plain = text[at] > _ZERO and _many(comma[:-step] & (letters[step:] > _ZERO)) == commas
    if not plain and not _begun(letters, comma, digit, step):  # some begin with 0, or no digit
        return None
    if _long(digit):
        return None
    count = sum(len(piece.packed) for piece in known) // 4 + commas + 1
    return Numerals(text, (at, last, step), known, count, memory)


def _known(
    text: bytes, first: int, last: int, memory: Memory | None
) -> tuple[int, int, list[Piece]]:
    """Where the first piece begins that nobody remembers, how far the end of a number is from the
    next, and the pieces before."""
    behind = text.find(b",", first, last) + 1
    at, step, known = first, 2 if text[behind : behind + 1] == b" " else 1, list[Piece]()
    while memory is not None and (end := text.find(b",", at + PIECE_BYTES, last)) >= 0:
        piece = memory.get(text[at:end], step)
        if piece is None or (step == 2 and text[end + 1 : end + 2] != b" "):
            break
        known.append(piece)
        at = end + step
    return at, step, known


def _begun(letters: Letters, comma: Truths, digit: Truths, step: int) -> bool:
    """Does each number begin with a digit that is not 0, or is 0?"""
    if _many(comma[:-step] & digit[step:]) != _many(comma):
        return False
    zero = letters == _ZERO
    if (zero[:1] & digit[1:2]).any():
        return False
    return not (comma[: -step - 1] & zero[step:-1] & digit[step + 1 :]).any()


def _long(digit: Truths) -> bool:
    """Is there a number that may not fit? Two at a time: no 7 digits are, any 9 are."""
    even = len(digit) // 2 * 2
    two = digit[:even].view(np.uint16) == _TWO
    four = two[1:] & two[:-1]
    return _many(four[2:] & four[:-2]) > 0


def _many(truths: Truths) -> int:
    """How many are True; numpy's own any() and max() take three times as long to begin."""
    return int(np.count_nonzero(truths))

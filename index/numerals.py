"""Numerals: token ids that are still JSON text, read as far as somebody needs them.

Pure. To make a number of each of 8 k token ids takes longer than all else that a question does, and
most prompts are new from some block on. So the text is only looked through, many letters at once:
it has to be whole numbers of 7 digits at most, side by side as json.dumps or JSON.stringify write
them. question.py has anything else read in the plain way, which also says what is wrong with it.
What it begins with is not even looked through where somebody remembers it (texts.py), and a short
rest is read at once, however it is written. Open it to change what such a look accepts.

    b"17, 4, 128000, 9"     4 numbers, read when asked for     b"17, 04"  b"17 4"  b"1.5"     None
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

PIECE_BYTES = 4 * 1024  # of text that is read at once: some 600 numbers
SHORT_BYTES = 8 * 1024  # of text that is sooner read whole than looked through

_COMMA, _BLANK, _ZERO = b", 0"
_TWO = 0x0101  # bytes that are both True
_list = msgspec.json.Decoder(list[int]).decode
Letters = npt.NDArray[np.uint8]
Truths = npt.NDArray[np.bool_]
# How many are True; numpy's own any() and max() take three times as long to begin.
_many: Callable[[Truths], int] = np.count_nonzero
# In a chain: the name before, tokens of a block, and packed tokens of one that is not whole yet.
Place = tuple[int, int, bytes]


class Piece:
    """Some numbers of a list, and which names the blocks have that end in it: of one chain."""

    __slots__ = ("named", "next", "packed", "text")

    def __init__(self, text: bytes, packed: bytes) -> None:
        self.text = text  # up to the number that the next one begins with
        self.packed = packed  # the same as little-endian u32
        self.named: tuple[Place, array[int], Place] | None = None  # where it begins and ends
        self.next = (0, 0)  # under which that is remembered which followed it last: texts.py

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

    def known(self, text: bytes, at: int, last: int, step: int) -> list[Piece]: ...

    def keep(self, piece: Piece, step: int) -> None: ...


class Numerals:
    """Of one prompt. Not for several threads at a time."""

    __slots__ = ("_at", "_count", "_last", "_memory", "_step", "_text", "found")

    def __init__(
        self, text: bytes, rest: tuple[int, int, int], known: list[Piece], count: int,
        memory: Memory | None,
    ) -> None:  # fmt: skip
        self._text, (self._at, self._last, self._step) = text, rest
        self._count, self._memory = count, memory
        self.found = known  # pieces that are read

    def __len__(self) -> int:
        return self._count

    def pieces(self, first: int = 0) -> Iterator[Piece]:
        """All from one on; what nobody knows is read when it is asked for, by whoever is ahead of
        several that go through it side by side."""
        while first < len(self.found) or self._at < self._last:
            yield self.found[first] if first < len(self.found) else self._next()
            first += 1

    def packed(self, start: int, stop: int) -> bytes:
        """Numbers start..stop-1, or those of them that there are, as little-endian u32."""
        many = sum(len(piece.packed) for piece in self.found)
        while many < 4 * stop and self._at < self._last:
            many += len(self._next().packed)
        return b"".join(piece.packed for piece in self.found)[4 * start : 4 * stop]

    def _next(self) -> Piece:
        end = self._text.find(b",", self._at + PIECE_BYTES, self._last)
        whole = end >= 0
        end = end if whole else self._last
        packed = np.fromstring(self._text[self._at : end], "<u4", sep=",").tobytes()
        end = end + self._step if whole else end
        piece = Piece(self._text[self._at : end], packed)
        if whole and self._memory is not None:
            self._memory.keep(piece, self._step)
        self._at = end
        self.found.append(piece)
        return piece


def numerals(text: bytes, first: int, last: int, memory: Memory | None = None) -> Numerals | None:
    """Of what stands between the brackets of a list; None where it is for the plain way."""
    behind = text.find(b",", first, last) + 1
    at, step, count, known = first, 2 if text[behind : behind + 1] == b" " else 1, 1, list[Piece]()
    if memory is not None:
        known = memory.known(text, first, last, step)
        for piece in known:
            at += len(piece.text)
            count += len(piece.packed) // 4
    if at >= last or text[at] < _ZERO:
        return None
    if last - at <= SHORT_BYTES:
        return _short(text, (at, last, step), known, count - 1, memory)
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
    return Numerals(text, (at, last, step), known, count + commas, memory)


def _short(
    text: bytes, rest: tuple[int, int, int], known: list[Piece], count: int, memory: Memory | None
) -> Numerals | None:
    """The rest as numbers: the plain way reads it alike, so it may be written in any way."""
    at, last, step = rest
    try:
        numbers = array("I", _list(b"[%b]" % text[at:last]))
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError):
        return None
    many, begun = len(numbers), 0
    if sys.byteorder == "big":
        numbers.byteswap()
    packed = numbers.tobytes()
    while (end := text.find(b",", at + PIECE_BYTES, last) + step) >= step:
        if text[end - 1 : end] != (b" " if step > 1 else b","):
            break
        upto = begun + 4 * text.count(b",", at, end)
        piece = Piece(text[at:end], packed[begun:upto])
        if memory is not None:
            memory.keep(piece, step)
        known.append(piece)
        at, begun = end, upto
    known.append(Piece(text[at:last], packed[begun:]))
    return Numerals(text, (last, last, step), known, count + many, memory)


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

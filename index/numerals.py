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

from typing import Protocol

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 4 * 1024  # of text that is read at once: some 600 numbers

_COMMA, _BLANK, _ZERO, _NINE = b", 09"
_TWO = 0x0101  # bytes that are both True
Letters = npt.NDArray[np.uint8]
Truths = npt.NDArray[np.bool_]


class Memory(Protocol):
    """What is needed of one who remembers pieces of such texts; texts.py offers it."""

    def get(self, piece: bytes, step: int) -> bytes | None: ...  # its numbers, if it is known

    def put(self, piece: bytes, step: int, packed: bytes) -> None: ...


class Numerals:
    """Of one prompt. Not for several threads at a time."""

    __slots__ = ("_at", "_count", "_last", "_memory", "_read", "_step", "_text", "known")

    def __init__(
        self, text: bytes, rest: tuple[int, int, int], known: bytearray, count: int,
        memory: Memory | None,
    ) -> None:  # fmt: skip
        self._text, (self._at, self._last, self._step) = text, rest
        self._read, self.known = known, len(known) // 4  # as little-endian u32; how many of them
        self._count, self._memory = count, memory

    def __len__(self) -> int:
        return self._count

    def packed(self, start: int, stop: int) -> bytearray:
        """Numbers start..stop-1, or those of them that there are, as little-endian u32."""
        read = self._read
        while len(read) < 4 * stop and self._at < self._last:
            read += self._next()
        return read[4 * start : 4 * stop]

    def _next(self) -> bytes:
        text, at = self._text, self._at
        end = text.find(b",", at + PIECE_BYTES, self._last)
        piece = text[at : end if end >= 0 else self._last]
        packed = np.fromstring(piece, "<u4", sep=",").tobytes()
        if end < 0:
            self._at = self._last
        else:
            self._at = end + self._step
            if self._memory is not None:
                self._memory.put(piece, self._step, packed)
        return packed


def numerals(text: bytes, first: int, last: int, memory: Memory | None = None) -> Numerals | None:
    """Of what stands between the brackets of a list; None where it is for the plain way."""
    at, step, known = _known(text, first, last, memory)
    if at >= last or text[at] < _ZERO:
        return None
    letters = np.frombuffer(text, np.uint8, last - at, at)
    if letters.max() > _NINE:
        return None
    comma, digit = letters == _COMMA, letters >= _ZERO
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
    return Numerals(text, (at, last, step), known, len(known) // 4 + commas + 1, memory)


def _known(text: bytes, first: int, last: int, memory: Memory | None) -> tuple[int, int, bytearray]:
    """Where the first piece begins that nobody remembers, how far the end of a number is from the
    next, and the numbers before."""
    behind = text.find(b",", first, last) + 1
    at, step, read = first, 2 if text[behind : behind + 1] == b" " else 1, bytearray()
    while memory is not None and (end := text.find(b",", at + PIECE_BYTES, last)) >= 0:
        packed = memory.get(text[at:end], step)
        if packed is None or (step == 2 and text[end + 1 : end + 2] != b" "):
            break
        read += packed
        at = end + step
    return at, step, read


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
    return bool((four[2:] & four[:-2]).any())


def _many(truths: Truths) -> int:
    return int(np.count_nonzero(truths))

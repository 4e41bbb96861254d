"""Numerals: token ids that are still JSON text, read as far as somebody needs them.

Pure. To make a number of each of 8 k token ids takes longer than all else that a question does, and
most prompts are new from some block on. So the text is only looked through, many letters at once:
it has to be whole numbers below 10,000,000, side by side as json.dumps or JSON.stringify write
them. question.py has anything else read in the plain way, which also says what is wrong with it.
Open it to change what such a look accepts.

    b"17, 4, 128000, 9"     4 numbers, read when asked for     b"17, 04"  b"17 4"  b"1.5"     None
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 8 * 1024  # of text that is read at once: about a thousand numbers

_COMMA, _BLANK, _ZERO = b", 0"
_Truths = npt.NDArray[np.bool_]


class Numerals:
    """Of one prompt. Not for several threads at a time."""

    __slots__ = ("_count", "_read", "_text", "_till")

    def __init__(self, text: bytes, count: int) -> None:
        self._text, self._count = text, count
        self._read, self._till = bytearray(), 0  # little-endian u32; how far into the text

    def __len__(self) -> int:
        return self._count

    def packed(self, start: int, stop: int) -> bytes:
        """Numbers start..stop-1, or those of them that there are, as little-endian u32."""
        text, read = self._text, self._read
        while len(read) < 4 * stop and self._till < len(text):
            end = text.find(b",", self._till + PIECE_BYTES)
            end = len(text) if end < 0 else end
            read += np.fromstring(text[self._till : end], "<u4", sep=",").tobytes()
            self._till = end + 1
        return bytes(read[4 * start : 4 * stop])


def numerals(text: bytes) -> Numerals | None:
    """What stands between the brackets of a list; None where it is for the plain way."""
    letters = np.frombuffer(text, np.uint8)
    digit, comma = (letters - _ZERO) < 10, letters == _COMMA
    commas = _many(comma)
    others = len(text) - commas - _many(digit)
    if others not in (0, commas) or not digit[:1].all() or not text:
        return None
    if others and _many(comma[:-1] & (letters[1:] == _BLANK)) != commas:
        return None  # else each is one blank behind one comma
    step = 2 if others else 1
    if _many(comma[:-step] & digit[step:]) != commas:
        return None
    if _long(digit) or _padded(letters == _ZERO, comma, digit, step):
        return None
    return Numerals(text, commas + 1)


def _long(digit: _Truths) -> bool:
    """Are there eight digits in a row?"""
    two = digit[1:] & digit[:-1]
    four = two[2:] & two[:-2]
    return bool((four[4:] & four[:-4]).any())


def _padded(zero: _Truths, comma: _Truths, digit: _Truths, step: int) -> bool:
    """Does a number of more than one digit begin with 0?"""
    if (zero[:1] & digit[1:2]).any():
        return True
    return bool((comma[: -step - 1] & zero[step:-1] & digit[step + 1 :]).any())


def _many(truths: Any) -> int:
    return int(np.count_nonzero(truths))

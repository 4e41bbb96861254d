"""Numerals: token ids that are still JSON text, read as far as somebody needs them.

Pure. To make a number of each of 8 k token ids takes longer than all else that a question does, and
most prompts are new from some block on. So the text is only looked through, many letters at once:
it has to be whole numbers of 7 digits at most, side by side as json.dumps or JSON.stringify write
them. question.py has anything else read in the plain way, which also says what is wrong with it.
Open it to change what such a look accepts.

    b"17, 4, 128000, 9"     4 numbers, read when asked for     b"17, 04"  b"17 4"  b"1.5"     None
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PIECE_BYTES = 8 * 1024  # of text that is read at once: about a thousand numbers

_COMMA, _BLANK, _ZERO, _NINE = b", 09"
_TWO = 0x0101  # bytes that are both True
Letters = npt.NDArray[np.uint8]
Truths = npt.NDArray[np.bool_]


class Numerals:
    """Of one prompt. Not for several threads at a time."""

    __slots__ = ("_at", "_count", "_last", "_read", "_text")

    def __init__(self, text: bytes, first: int, last: int, count: int) -> None:
        self._text, self._at, self._last = text, first, last
        self._count, self._read = count, bytearray()  # as little-endian u32

    def __len__(self) -> int:
        return self._count

    def packed(self, start: int, stop: int) -> bytes:
        """Numbers start..stop-1, or those of them that there are, as little-endian u32."""
        text, read = self._text, self._read
        while len(read) < 4 * stop and self._at < self._last:
            end = text.find(b",", self._at + PIECE_BYTES, self._last)
            end = self._last if end < 0 else end
            found = np.fromstring(text[self._at : end], np.uint32, sep=",")
            read += found.astype("<u4", copy=False).tobytes()
            self._at = end + 1
        return bytes(read[4 * start : 4 * stop])


def numerals(text: bytes, first: int, last: int) -> Numerals | None:
    """Of what stands between the brackets of a list; None where it is for the plain way."""
    if first >= last or text[first] < _ZERO:
        return None
    letters = np.frombuffer(text, np.uint8, last - first, first)
    if letters.max() > _NINE:
        return None
    comma, digit = letters == _COMMA, letters >= _ZERO
    commas = _many(comma)
    others = last - first - commas - _many(digit)
    if others not in (0, commas):
        return None
    if others and _many(comma[:-1] & (letters[1:] == _BLANK)) != commas:
        return None  # else each of them is a blank behind a comma
    step = 2 if others else 1
    plain = text[first] > _ZERO and _many(comma[:-step] & (letters[step:] > _ZERO)) == commas
    if not plain and not _begun(letters, comma, digit, step):  # some begin with 0, or no digit
        return None
    return None if _long(digit) else Numerals(text, first, last, commas + 1)


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

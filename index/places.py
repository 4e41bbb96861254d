"""Places: in which family of runs may a block lie that neither begins nor ends a run?

Pure. Nearly all that engines tell begins at a beginning or an end, which forest.py knows by heart;
the middle is asked for now and then, by branches and holes. So it is kept small and filled in bulk:
a word of 64 bits for each block ever put in, first bits of its hash and its family's number, in
sorted arrays. A word may be old, and first bits may meet: whoever asks looks into the family.
Open it to change what such a question costs.

    told       blocks, as they came: looked through                     up to FEW of them
    segments   sorted words, each half as long as the one before        up to MOST words in each
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from sys import byteorder

import numpy as np
import numpy.typing as npt

FEW = 8_192  # blocks: to sort them takes a tenth of a millisecond
MOST = 131_072  # words: to merge so many takes one or two
FAMILIES = 1 << 24  # numbers that fit into a word

_HIGH = np.uint64(2**64 - FAMILIES)
_LOW = np.uint64(FAMILIES - 1)
Words = npt.NDArray[np.uint64]


class Places:
    """Of one forest. Nothing is ever taken out; who has too much of the old begins another one."""

    def __init__(self) -> None:
        self._told: list[array[int]] = []
        self._numbers: list[int] = []  # of the families that told
        self._unsorted = 0  # how many
        self._segments: list[Words] = []
        self.words = 0  # in them, old ones too

    def add(self, family: int, blocks: array[int]) -> None:
        """These blocks lie in this family from now on; nobody may change the row any more."""
        self._told.append(blocks)
        self._numbers.append(family)
        self._unsorted += len(blocks)
        if self._unsorted >= FEW:
            self._sort()

    def find(self, block: int) -> Iterator[int]:
        """Families that may have it; the one that does is among them."""
        wanted, told = block.to_bytes(8, byteorder), b"".join(self._told)
        at = told.find(wanted)
        while at >= 0:
            if not at & 7:
                ends = list(accumulate(map(len, self._told)))
                yield self._numbers[bisect_right(ends, at >> 3)]
            at = told.find(wanted, at + 1)
        first = np.uint64(block) & _HIGH
        for words in self._segments:
            low, high = words.searchsorted(first), words.searchsorted(first | _LOW, "right")
            yield from (words[low:high] & _LOW).tolist()

    def sift(self, blocks: array[int]) -> array[int]:
        """Those of many that may have been put in, in order: a small part of as many `find`s."""
        if self._told:
            self._sort()
        asked = np.frombuffer(blocks, np.uint64)
        first, there = asked & _HIGH, np.zeros(len(asked), bool)
        for words in self._segments:
            at = np.minimum(words.searchsorted(first), len(words) - 1)
            there |= words[at] & _HIGH == first
        return array("Q", asked[there].tobytes())

    def bytes(self) -> int:
        """What all this weighs."""
        return 8 * (self.words + self._unsorted)

    def _sort(self) -> None:
        words = np.frombuffer(b"".join(self._told), np.uint64) & _HIGH
        words |= np.repeat(np.array(self._numbers, np.uint64), list(map(len, self._told)))
        words.sort()
        self.words += len(words)
        self._told, self._numbers, self._unsorted = [], [], 0
        segments = self._segments
        while segments and len(segments[-1]) <= len(words) <= MOST // 2:
            words = np.concatenate((segments.pop(), words))
            words.sort(kind="stable")  # two sorted rows: a merge
        segments.append(words)

"""Unrolled: names of a prompt's blocks, worked out as far as somebody looks.

Pure. Whoever ranks looks a run ahead and stops where nobody holds more, so the tail of a prompt
that is new everywhere is never hashed. chains.py fills it. Open it to change what looking costs.

    asked for [127]     b0 .. b127 are named now     asked for its length     nothing is
    beside a run that holds b0 .. b511 of it, but parts from it at b100      hardly more than these
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import cast, overload

from kvplane.vocabulary import BlockHash


class Unrolled(Sequence[BlockHash]):
    """`count` names that `pages` brings, one row after the other."""

    __slots__ = ("_count", "_pages", "found")

    def __init__(
        self, count: int, pages: Iterator[Sequence[int]], found: array[int] | None = None
    ) -> None:
        self._count, self._pages = count, pages
        self.found = array("Q") if found is None else found  # so far; it grows

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BlockHash]: ...
    def __getitem__(self, at: int | slice) -> BlockHash | Sequence[BlockHash]:
        found = self.found
        if isinstance(at, slice) or at < 0:
            self.unroll(self._count)
        elif at >= len(found):
            self.unroll(at + 1)
        # An array is like the tuple it stands for, as far as anybody asks who does not change it.
        return cast("BlockHash | Sequence[BlockHash]", found[at])

    def unroll(self, many: int) -> None:
        """At least so many are found then, if there are."""
        while len(self.found) < many and (page := next(self._pages, None)) is not None:
            self.found.extend(page)

    def agreement(self, at: int, run: array[int]) -> int:
        """How many blocks of `run` are those from `at` on; the first is known to be. What follows
        them is found then, if there is more."""
        found, most, same = self.found, min(len(run), self._count - at), 1
        while same < most:
            if len(found) - at == same:
                self.unroll(at + same + 1)
            known = min(len(found) - at, most)
            assert known > same, "pages bring as many names as were promised"
            if found[at + known - 1] == run[known - 1]:  # equality is monotone: see runs.py
                same = known
                continue
            while same < known:
                middle = (same + known) // 2
                if found[at + middle] == run[middle]:
                    same = middle + 1
                else:
                    known = middle
            return same
        self.unroll(at + same + 1)
        return same

"""Unrolled: names of a prompt's blocks, worked out as far as somebody looks.

Pure. Whoever ranks looks a run ahead and stops where nobody holds more, so the tail of a prompt
that is new everywhere is never hashed. chains.py fills it. Open it to change what looking costs.

    asked for [127]     b0 .. b127 are named now     asked for its length     nothing is
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvplane.vocabulary import BlockHash


class Unrolled(Sequence[BlockHash]):
    """`count` names that `pages` brings, one row after the other."""

    __slots__ = ("_count", "_found", "_pages")

    def __init__(self, count: int, pages: Iterator[Sequence[BlockHash]]) -> None:
        self._count, self._pages = count, pages
        self._found: list[BlockHash] = []

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> BlockHash: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[BlockHash]: ...
    def __getitem__(self, at: int | slice) -> BlockHash | Sequence[BlockHash]:
        found = self._found
        if isinstance(at, slice) or at < 0:
            self._unroll(self._count)
        elif at >= len(found):
            self._unroll(at + 1)
        return found[at]

    def _unroll(self, many: int) -> None:
        while len(self._found) < many and (page := next(self._pages, None)) is not None:
            self._found += page

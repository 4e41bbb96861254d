"""Regions: where do the pages of this process lie?

Pure. A region is one named, contiguous piece of memory cut into equal items; a *page* is the item
of that number in every region. Two ranks that hold different heads or layers move the regions
that both have: `select` makes the view of a page they share. Backends move items, they never look
inside. Open it to change what memory can be moved, or how a page is summed.

    region l0.k0  | item 0 | item 1 | item 2 | ...      page 1 = item 1 of every region
    region l0.k1  | item 0 | item 1 | item 2 | ...      sum of a page: xxh3-64, in order
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import NoRegion, NotRegistered


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One piece of memory; `owner` keeps it alive as long as the region is registered."""

    memory: memoryview  # of bytes, writable
    item_bytes: int
    owner: object = None
    name: str = ""  # the same on every rank that holds this part of a page; "" = its number

    @staticmethod
    def of(array: npt.NDArray[Any], name: str = "") -> Region:
        """The items are array[0], array[1], ...; refuses what cannot be moved as raw bytes."""
        if not isinstance(array, np.ndarray) or array.ndim < 1 or array.nbytes == 0:
            raise ValueError(f"region {type(array).__name__}: must be a numpy array with items")
        if not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError("region: must be C-contiguous and writable")
        view = array.reshape(-1).view(np.uint8).data
        return Region(view, array.nbytes // array.shape[0], array, name)

    @property
    def items(self) -> int:
        """How many there are."""
        return len(self.memory) // self.item_bytes

    def run(self, first: int, count: int = 1) -> memoryview:
        """The bytes of `count` neighbouring items."""
        return self.memory[first * self.item_bytes : (first + count) * self.item_bytes]


class Regions:
    """Memory of one rank, or a part of it; every region has the same number of items."""

    def __init__(self, regions: Sequence[Region]) -> None:
        counts = {region.items for region in regions}
        if len(counts) != 1:
            raise ValueError(f"regions: must be one or more of equal length, got items {counts}")
        self._regions = tuple(regions)
        self.names = tuple(region.name or f"r{at}" for at, region in enumerate(regions))
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"regions: names must differ, got {self.names}")
        self.pages = counts.pop()
        self.items = tuple(region.item_bytes for region in regions)  # bytes, region by region
        self.page_bytes = sum(self.items)

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def select(self, names: Sequence[str]) -> Regions:
        """The part of each page that lies in these regions, in this order; () = all of it.

        Raises NoRegion for a name that is not ours.
        """
        if not names or tuple(names) == self.names:
            return self
        known = dict(zip(self.names, self._regions, strict=True))
        missing = [name for name in names if name not in known]
        if missing:
            raise NoRegion(missing[0], self.names)
        return Regions([replace(known[name], name=name) for name in names])

    def check(self, pages: Iterable[int]) -> None:
        """Raises NotRegistered for the first page that is not ours."""
        for page in pages:
            if not 0 <= page < self.pages:
                raise NotRegistered(page, self.pages)

    def parts(self, page: int) -> tuple[memoryview, ...]:
        """The bytes of one page, region by region."""
        return tuple(region.run(page) for region in self._regions)

    def out(self, sources: Sequence[int], pages: Sequence[int]) -> list[PageOut]:
        """Our pages `sources` on their way to the decode's `pages`."""
        both = zip(sources, pages, strict=True)
        return [PageOut(page, self.parts(source), source) for source, page in both]

    def gather(self, pages: Sequence[PageOut]) -> list[memoryview]:
        """The bytes region by region, neighbours as one piece.

        sources 4 5 9:   region 0: [4 5] [9]   region 1: [4 5] [9]
        """
        pieces: list[memoryview] = []
        for at, region in enumerate(self._regions):
            start = 0
            while start < len(pages):
                end = _neighbours(pages, start)
                first = pages[start].source
                own = first is None or end - start == 1
                pieces.append(
                    pages[start].parts[at] if own else region.run(first or 0, end - start)
                )
                start = end
        return pieces

    def sums(self, pages: Iterable[int]) -> tuple[int, ...]:
        """xxh3-64 of each page, over its regions in order. Blocks: 6 GB/s; use a thread."""
        return tuple(page_sum(self.parts(page)) for page in pages)


def _neighbours(pages: Sequence[PageOut], start: int) -> int:
    """End of the run of pages whose sources follow each other; start + 1 at least."""
    end = start + 1
    source = pages[start].source
    while source is not None and end < len(pages) and pages[end].source == source + end - start:
        end += 1
    return end


@dataclass(frozen=True, slots=True)
class PageOut:
    """One page on its way: the decode's number for it, and its bytes region by region."""

    page: int
    parts: tuple[memoryview, ...]
    source: int | None = None  # our number, where `parts` are the registered memory itself


def page_sum(parts: Iterable[memoryview]) -> int:
    """xxh3-64 of one page."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours as (first, count), order kept:   4 5 6 9 2 3 -> (4, 3) (9, 1) (2, 2)"""
    found: list[tuple[int, int]] = []
    for page in pages:
        if found and found[-1][0] + found[-1][1] == page:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((page, 1))
    return found

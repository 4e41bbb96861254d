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
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import NoRegion, NotRegistered

BOUNCE_BYTES = 4 * 1024 * 1024  # of device memory in host memory at a time


class Copier(Protocol):
    """Between the device memory of one region and the host; complete when a call returns."""

    def out(self, start: int, size: int) -> memoryview:
        """A copy of these bytes in host memory."""

    def back(self, start: int, data: memoryview) -> None:
        """The device's bytes from `start` on become `data`."""


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One piece of memory; `owner` keeps it alive as long as the region is registered.

    memory.py makes one of anything; on a device `memory` is None and bytes pass through `copier`.
    """

    memory: memoryview | None  # of bytes, writable
    item_bytes: int
    owner: object = None
    name: str = ""  # the same on every rank that holds this part of a page; "" = its number
    device: str = "cpu"  # or cuda:0
    address: int = 0
    size: int = 0  # bytes
    copier: Copier | None = None

    def __post_init__(self) -> None:
        if self.memory is not None and not self.address:
            first = np.frombuffer(self.memory, np.uint8)
            object.__setattr__(self, "address", first.ctypes.data)
            object.__setattr__(self, "size", first.nbytes)

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
        return self.size // self.item_bytes

    def run(self, first: int, count: int = 1) -> memoryview:
        """The bytes of `count` neighbouring items; of a device, a copy."""
        start, size = first * self.item_bytes, count * self.item_bytes
        if self.memory is not None:
            return self.memory[start : start + size]
        assert self.copier is not None, "device memory comes with its copier"
        return self.copier.out(start, size)

    def pieces(self, first: int, count: int) -> Iterator[memoryview]:
        """The same to be read one after another; of a device, never much of it in host memory."""
        if self.memory is not None:
            yield self.run(first, count)
            return
        assert self.copier is not None, "device memory comes with its copier"
        for start, size in self._steps(first, count):
            yield self.copier.out(start, size)

    def into(self, first: int, count: int) -> Iterator[memoryview]:
        """Host memory to be filled; asked for the next, what was filled is where it belongs."""
        if self.memory is not None:
            yield self.run(first, count)
            return
        assert self.copier is not None, "device memory comes with its copier"
        bounce = memoryview(bytearray(min(BOUNCE_BYTES, count * self.item_bytes)))
        for start, size in self._steps(first, count):
            yield bounce[:size]
            self.copier.back(start, bounce[:size])

    def _steps(self, first: int, count: int) -> Iterator[tuple[int, int]]:
        end = (first + count) * self.item_bytes
        for start in range(first * self.item_bytes, end, BOUNCE_BYTES):
            yield start, min(BOUNCE_BYTES, end - start)


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

    def parts(self, page: int) -> Sequence[memoryview]:
        """The bytes of one page, region by region; of a device, copied when looked at."""
        if all(region.memory is not None for region in self._regions):
            return tuple(region.run(page) for region in self._regions)
        return _Copied(self._regions, page)

    def out(self, sources: Sequence[int], pages: Sequence[int]) -> list[PageOut]:
        """Our pages `sources` on their way to the decode's `pages`."""
        both = zip(sources, pages, strict=True)
        return [PageOut(page, self.parts(source), source) for source, page in both]

    def gather(self, pages: Sequence[PageOut]) -> Iterator[memoryview]:
        """The bytes region by region, neighbours as one piece.

        sources 4 5 9:   region 0: [4 5] [9]   region 1: [4 5] [9]
        """
        for at, region in enumerate(self._regions):
            start = 0
            while start < len(pages):
                end, first = _neighbours(pages, start), pages[start].source
                if first is None:
                    yield pages[start].parts[at]
                else:
                    yield from region.pieces(first, end - start)
                start = end

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


class _Copied(Sequence[memoryview]):
    """The parts of a page that lie on a device, at least one of them."""

    def __init__(self, regions: Sequence[Region], page: int) -> None:
        self._regions, self._page = regions, page

    def __len__(self) -> int:
        return len(self._regions)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [region.run(self._page) for region in self._regions[at]]
        return self._regions[at].run(self._page)


@dataclass(frozen=True, slots=True)
class PageOut:
    """One page on its way: the decode's number for it, and its bytes region by region."""

    page: int
    parts: Sequence[memoryview]
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

"""Chains: which names have these tokens? Most of a conversation was named in its last turn.

Edge: a bounded memory with a lock, over hashing.py's arithmetic. Names depend on nothing but
parent, tokens and block size, so pages of blocks are remembered by just these. Open it to change
how much.

    seed -> page of 64 blocks -> its last name -> page of 64 blocks -> ... -> the rest, hashed
            remembered: names as they were        new: hashed, remembered

A page is found by a digest of its tokens, then compared with them. Where tokens are JSON still,
their text was remembered as well (texts.py), or they are new to us, and so are their names.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from xxhash import xxh3_64_intdigest

from kvplane.recall import Shelf
from kvplane.vocabulary import BlockHash, Namespace, PrefixChain

from .hashing import Tokens, chain, chained, extend, pack, seed
from .numerals import Numerals
from .texts import Texts
from .unrolled import Unrolled

PAGE_BLOCKS = 64
STRIDE_BLOCKS = 16  # named at once where nothing is remembered: a view hardly looks further

Page = tuple[bytes, "array[int]"]  # tokens, names


class Chains:
    """Names tokens as hashing.chain() does. Safe to use from several threads."""

    def __init__(self, most_bytes: int = 0) -> None:
        self._shelf: Shelf[tuple[int, int, int], Page] = Shelf(most_bytes - most_bytes // 2)
        self.texts = Texts(most_bytes // 2)
        self._lock = threading.Lock()
        self.blocks: Counter[str] = Counter()  # recalled | hashed

    @property
    def held_bytes(self) -> int:
        """Of the pages, and pieces of texts, that are remembered now."""
        return self._shelf.bytes + self.texts.held_bytes

    def chain(
        self, tokens: Tokens, namespace: Namespace, extra: Mapping[int, Sequence[str]] | None = None
    ) -> PrefixChain:
        """As hashing.chain(). With `extra` keys nothing is remembered."""
        packed, size = pack(tokens), namespace.block_size
        step = PAGE_BLOCKS * size * 4
        whole = len(packed) // step * step if step > 0 else 0
        if extra or not whole or not self._shelf.most_bytes:
            found = chain(bytes(packed), namespace, extra)
            self._count(0, len(found.blocks))
            return found
        parent, blocks = seed(namespace), list[BlockHash]()
        recalled = 0
        for start in range(0, whole, step):
            page = bytes(packed[start : start + step])
            if (known := self._recalled(parent, page, size)) is not None:
                blocks += cast("list[BlockHash]", known.tolist())
                recalled += PAGE_BLOCKS
            else:
                names = extend(parent, page, size)
                self._remember(parent, page, size, array("Q", names))
                blocks += names
            parent = blocks[-1]
        blocks += extend(parent, bytes(packed[whole:]), size)
        self._count(recalled, len(blocks) - recalled)
        return PrefixChain(namespace, tuple(blocks), len(packed) // 4)

    def unrolled(
        self, tokens: Tokens, namespace: Namespace, extra: Mapping[int, Sequence[str]] | None = None
    ) -> PrefixChain:
        """As chain(), but a block is named when somebody looks at it or beyond. For one thread."""
        row = tokens if isinstance(tokens, Numerals) else _Packed(tokens)
        count, size = len(row), namespace.block_size
        if extra or size < 1 or count <= PAGE_BLOCKS * size:
            return self.chain(tokens, namespace, extra)  # hardly more than a look would name
        blocks = Unrolled(count // size, self._pages(seed(namespace), row, size))
        # A row like the tuple it stands for, as far as anybody asks it who does not change it.
        return PrefixChain(namespace, cast("tuple[BlockHash, ...]", blocks), count)

    def _pages(self, parent: int, row: Numerals | _Packed, size: int) -> Iterator[Sequence[int]]:
        """Pages that are remembered; others in strides, as far as anybody wants them."""
        many, remembers = len(row) // size, self._shelf.most_bytes > 0
        for start in range(0, many, PAGE_BLOCKS):
            end = start + PAGE_BLOCKS
            if remembers and end <= many and row.known > start * size:
                known = self._recalled(parent, row.packed(start * size, end * size), size)
                if known is not None:
                    self._count(PAGE_BLOCKS, 0)
                    yield known
                    parent = known[-1]
                    continue
            above, page = parent, array("Q")
            for at in range(start, min(end, many), STRIDE_BLOCKS):
                tokens = row.packed(at * size, min(at + STRIDE_BLOCKS, many) * size)
                names = chained(parent, tokens, size)
                self._count(0, len(names))
                yield names
                parent = names[-1]
                page.extend(names)
            if remembers and end <= many:
                self._remember(above, row.packed(start * size, end * size), size, page)

    def _recalled(self, parent: int, page: bytes | bytearray, size: int) -> array[int] | None:
        """Names of its blocks, where they are known."""
        held = self._shelf.one((parent, size, xxh3_64_intdigest(page)))
        return held[1] if held is not None and held[0] == page else None

    def _remember(self, parent: int, page: bytes | bytearray, size: int, names: array[int]) -> None:
        key = parent, size, xxh3_64_intdigest(page)
        self._shelf.put(key, (bytes(page), names), len(page) + 8 * len(names))

    def _count(self, recalled: int, hashed: int) -> None:
        with self._lock:
            self.blocks["recalled"] += recalled
            self.blocks["hashed"] += hashed


class _Packed:
    """Numbers that are there already."""

    def __init__(self, tokens: Tokens) -> None:
        self._packed = pack(tokens)
        self.known = len(self._packed) // 4

    def __len__(self) -> int:
        return self.known

    def packed(self, start: int, stop: int) -> bytes:
        """Numbers start..stop-1."""
        return bytes(self._packed[4 * start : 4 * stop])

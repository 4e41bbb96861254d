"""Chains: which names have these tokens? Most of a conversation was named in its last turn.

Edge: a bounded memory with a lock, over hashing.py's arithmetic. Names depend on nothing but
parent, tokens and block size, so pages of blocks are remembered by just these. Open it to change
how much.

    seed -> page of 128 blocks -> its last name -> page of 128 blocks -> ... -> the rest, hashed
            remembered: names as they were         new: hashed, remembered

A page is found by a digest of its tokens, then compared with them.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from xxhash import xxh3_64_intdigest

from kvplane.recall import Shelf
from kvplane.vocabulary import BlockHash, Namespace, PrefixChain

from .hashing import Tokens, chain, chained, extend, pack, seed
from .numerals import Numerals
from .unrolled import Unrolled

PAGE_BLOCKS = 128
STRIDE_BLOCKS = 64  # named at once where nothing is remembered

Page = tuple[bytes, "array[int]"]  # tokens, names
Cut = Callable[[int, int], bytes]  # tokens from the first to before the second, packed


class Chains:
    """Names tokens as hashing.chain() does. Safe to use from several threads."""

    def __init__(self, most_bytes: int = 0) -> None:
        self._shelf: Shelf[tuple[int, int, int], Page] = Shelf(most_bytes)
        self._stride_blocks = PAGE_BLOCKS if most_bytes > 0 else STRIDE_BLOCKS
        self._lock = threading.Lock()
        self.blocks: Counter[str] = Counter()  # recalled | hashed

    @property
    def held_bytes(self) -> int:
        """Of the pages that are remembered now."""
        return self._shelf.bytes

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
            names, known = self._page(parent, bytes(packed[start : start + step]), size)
            blocks += names
            recalled += known * PAGE_BLOCKS
            parent = blocks[-1]
        blocks += extend(parent, bytes(packed[whole:]), size)
        self._count(recalled, len(blocks) - recalled)
        return PrefixChain(namespace, tuple(blocks), len(packed) // 4)

    def unrolled(
        self, tokens: Tokens, namespace: Namespace, extra: Mapping[int, Sequence[str]] | None = None
    ) -> PrefixChain:
        """As chain(), but a block is named when somebody looks at it or beyond. For one thread."""
        (count, cut), size = _packed(tokens), namespace.block_size
        if extra or size < 1 or count <= self._stride_blocks * size:
            return self.chain(tokens, namespace, extra)  # all would be named at the first look
        blocks = Unrolled(count // size, self._pages(seed(namespace), count // size, cut, size))
        # A row like the tuple it stands for, as far as anybody asks it who does not change it.
        return PrefixChain(namespace, cast("tuple[BlockHash, ...]", blocks), count)

    def _pages(self, parent: int, many: int, cut: Cut, size: int) -> Iterator[list[BlockHash]]:
        remembers, step = self._shelf.most_bytes > 0, self._stride_blocks
        for start in range(0, many, step):
            page = cut(start * size, min(start + step, many) * size)
            if remembers and start + step <= many:
                names, known = self._page(parent, page, size)
            else:
                names, known = chained(parent, page, size), False
            self._count(*((len(names), 0) if known else (0, len(names))))
            yield names
            parent = names[-1]

    def _page(self, parent: int, page: bytes, size: int) -> tuple[list[BlockHash], bool]:
        """Names of its blocks, and whether they were known."""
        key = parent, size, xxh3_64_intdigest(page)
        (held,) = self._shelf.get([key])
        if held is not None and held[0] == page:
            return held[1].tolist(), True  # type: ignore[return-value]  # BlockHash is an int
        names = extend(parent, page, size)
        self._shelf.put(key, (page, array("Q", names)), len(page) + 8 * len(names))
        return names, False

    def _count(self, recalled: int, hashed: int) -> None:
        with self._lock:
            self.blocks["recalled"] += recalled
            self.blocks["hashed"] += hashed


def _packed(tokens: Tokens) -> tuple[int, Cut]:
    """How many there are, and what gives some of them."""
    if isinstance(tokens, Numerals):
        return len(tokens), tokens.packed
    packed = pack(tokens)
    return len(packed) // 4, lambda start, stop: bytes(packed[4 * start : 4 * stop])

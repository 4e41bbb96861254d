"""Chains: which names have these tokens? Most of a conversation was named in its last turn.

Edge: a bounded memory with a lock, over hashing.py's arithmetic. Names depend on nothing but
parent, tokens and block size, so pages of blocks are remembered by just these. Open it to change
how much.

    seed -> page of 64 blocks -> its last name -> page of 64 blocks -> ... -> the rest, hashed
            remembered: names as they were        new: hashed, remembered

A page is found by a digest of its tokens, then compared with them. Where tokens are JSON still, the
pieces of their text stand for pages (numerals.py): who knows the text need not look at the tokens.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from xxhash import xxh3_64_intdigest

from kvplane.recall import Shelf
from kvplane.vocabulary import BlockHash, Namespace, PrefixChain

from .hashing import Tokens, chain, chained, extend, pack, seed
from .numerals import Numerals, Piece, Place
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
            self._count("hashed", len(found.blocks))
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
        self._count("recalled", recalled)
        self._count("hashed", len(blocks) - recalled)
        return PrefixChain(namespace, tuple(blocks), len(packed) // 4)

    def unrolled(
        self, tokens: Tokens, namespace: Namespace, extra: Mapping[int, Sequence[str]] | None = None
    ) -> PrefixChain:
        """As chain(), but a block is named when somebody looks at it or beyond. For one thread."""
        row, size = tokens if isinstance(tokens, Numerals) else pack(tokens), namespace.block_size
        count = len(row) if isinstance(row, Numerals) else len(row) // 4
        if extra or size < 1 or count <= PAGE_BLOCKS * size:
            return self.chain(tokens, namespace, extra)  # hardly more than a look would name
        names, parent = array("Q"), seed(namespace)
        if isinstance(row, Numerals):
            pages = self._pieces(names, (parent, size, b""), row)
        else:
            pages = self._pages(parent, row, size)
        blocks = Unrolled(count // size, pages, names)
        # A row like the tuple it stands for, as far as anybody asks it who does not change it.
        return PrefixChain(namespace, cast("tuple[BlockHash, ...]", blocks), count)

    def _pages(self, parent: int, packed: memoryview, size: int) -> Iterator[Sequence[int]]:
        """Pages that are remembered; others in strides, as far as anybody wants them."""
        step, remembers = 4 * size, self._shelf.most_bytes > 0
        last = len(packed) // step * step
        for start in range(0, last, PAGE_BLOCKS * step):
            page, above = bytes(packed[start : min(start + PAGE_BLOCKS * step, last)]), parent
            whole = remembers and len(page) == PAGE_BLOCKS * step
            names = self._recalled(above, page, size) if whole else None
            if names is not None:
                self._count("recalled", len(names))
                yield names
            else:
                names = array("Q")
                yield from self._strides(above, page, size, names)
                if whole:
                    self._remember(above, page, size, names)
            parent = names[-1]

    def _pieces(self, begun: array[int], place: Place, row: Numerals) -> Iterator[Sequence[int]]:
        """The same along pieces of text; a block has its name from that in which it ends. Those of
        the first pieces that have names already are put to those that `begun` has."""
        many = 0
        for piece in row.found:
            named = piece.named
            if named is None or named[0] != place:
                break
            _, names, place = named
            begun += names
            many += 1
        if begun:
            self._count("recalled", len(begun))
        return self._further(place, row.pieces(many))

    def _further(self, place: Place, pieces: Iterable[Piece]) -> Iterator[Sequence[int]]:
        for piece in pieces:
            named = piece.named
            if named is not None and named[0] == place:
                _, names, place = named
                self._count("recalled", len(names))
                yield names
                continue
            parent, size, left = begins = place
            names, packed = array("Q"), left + piece.packed
            whole = len(packed) // (4 * size) * 4 * size
            yield from self._strides(parent, packed[:whole], size, names)
            place = names[-1] if names else parent, size, packed[whole:]
            if 8 * len(names) + len(place[2]) <= piece.room:
                piece.named = begins, names, place  # of one chain: most have one, soon made

    def _strides(
        self, parent: int, packed: bytes, size: int, names: array[int]
    ) -> Iterator[Sequence[int]]:
        """What nobody remembers, to be written down in `names` as well."""
        stride = STRIDE_BLOCKS * 4 * size
        for start in range(0, len(packed), stride):
            some = chained(parent, packed[start : start + stride], size)
            self._count("hashed", len(some))
            yield some
            names.extend(some)
            parent = some[-1]

    def _recalled(self, parent: int, page: bytes, size: int) -> array[int] | None:
        """Names of its blocks, where they are known."""
        held = self._shelf.one((parent, size, xxh3_64_intdigest(page)))
        return held[1] if held is not None and held[0] == page else None

    def _remember(self, parent: int, page: bytes, size: int, names: array[int]) -> None:
        key = parent, size, xxh3_64_intdigest(page)
        self._shelf.put(key, (page, names), len(page) + 8 * len(names))

    def _count(self, source: str, many: int) -> None:
        with self._lock:
            self.blocks[source] += many

"""Texts: which token ids did this piece of JSON have, when it was last read?

Edge: a bounded memory with a lock, for numerals.py. Prompts begin like earlier ones, so lists of
token ids do, letter by letter. Their texts are cut alike from the beginning on, and what was read
of a piece is kept beside it. Open it to change what is remembered of a text.

    17, 4, 128000, ..., 9 | , | 23, 12, ..., 7 | , | 4, 5
    a piece of a text       the next one         the rest: it grows with the next turn

A piece is found by a digest of it, then compared; and by what parts its numbers, so that pieces of
two hands are never put together.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from kvplane.recall import Shelf

from .numerals import Piece


class Texts:
    """Pieces of lists that were found right. Safe to use from several threads."""

    def __init__(self, most_bytes: int) -> None:
        self._shelf: Shelf[tuple[int, int], Piece] = Shelf(most_bytes)

    @property
    def held_bytes(self) -> int:
        """Of the pieces that are remembered now."""
        return self._shelf.bytes

    def get(self, text: bytes, step: int) -> Piece | None:
        """What was read of this text; `step` bytes are from the end of a number to the next."""
        held = self._shelf.one((xxh3_64_intdigest(text), step))
        return held if held is not None and held.text == text else None

    def put(self, piece: Piece, step: int) -> None:
        """Remember it, with room for the names of its blocks."""
        key = xxh3_64_intdigest(piece.text), step
        self._shelf.put(key, piece, piece.bytes)

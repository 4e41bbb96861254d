"""Texts: which token ids did this piece of JSON have, when it was last read?

Edge: a bounded memory with a lock, for numerals.py. Prompts begin like earlier ones, so lists of
token ids do, letter by letter. Their texts are cut alike from the beginning on, and what was read
of a piece is kept beside it. Open it to change what is remembered of a text.

    17, 4, 128000, ..., 9 | , | 23, 12, ..., 7 | , | 4, 5
    a piece of a text       the next one         the rest: it grows with the next turn

A piece is found by a digest of it, then compared; and by what parts its numbers, so that pieces of
two hands are never put together. What followed a piece last mostly follows it again: so that one is
compared before anything is cut out or digested.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from kvplane.recall import Shelf

from . import numerals
from .numerals import Piece


class Texts(Shelf[tuple[int, int], Piece]):
    """Pieces of lists that were found right. Safe to use from several threads."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self._begins = {step: Piece(b"", b"") for step in (1, 2)}  # what all others follow

    @property
    def held_bytes(self) -> int:
        """Of the pieces that are remembered now."""
        return self.bytes

    def known(self, text: bytes, at: int, last: int, step: int) -> list[Piece]:
        """Pieces that text[at:last] begins with; `step` bytes part two numbers."""
        found, before, held = list[Piece](), self._begins[step], self._held
        with self._lock:  # once for all: a lock for each costs more than what it keeps apart
            while True:
                key = before.next
                one = held.get(key)
                if one is None or not text.startswith(one[0].text, at):
                    end = text.find(b",", at + numerals.PIECE_BYTES, last) + step
                    if end < step:
                        return found
                    part = text[at:end]
                    key = xxh3_64_intdigest(part), step
                    one = held.get(key)
                    if one is None or one[0].text != part:
                        return found
                    before.next = key
                held.move_to_end(key)
                before = one[0]
                found.append(before)
                at += len(before.text)

    def keep(self, piece: Piece, step: int) -> None:
        """Remember it, with room for the names of its blocks."""
        key = xxh3_64_intdigest(piece.text), step
        self.put(key, piece, piece.bytes)

"""Dice: random bytes from the system, drawn by the block.

Edge of the ground floor. A system call for each room and each request id costs as much as all that
is done with it; what is drawn is as unpredictable, and no byte is given twice. Processes that fork
would share a block: ours start anew. Open it when something has to be unguessable and cheap.
"""

from __future__ import annotations

import os
import struct

BLOCK_BYTES = 4096
BITS_63 = (1 << 63) - 1


class Dice:
    """Bytes nobody can foretell, each given once."""

    __slots__ = ("_at", "_block", "_numbers")

    def __init__(self) -> None:
        self._block, self._at = b"", 0
        self._numbers: list[int] = []

    def draw(self, size: int) -> bytes:
        """`size` bytes, at most a block."""
        at = self._at
        if at + size > len(self._block):
            self._block, at = os.urandom(BLOCK_BYTES), 0
        self._at = at + size
        return self._block[at : at + size]

    def bits63(self) -> int:
        """A number from 0 to 2**63 - 1."""
        if not self._numbers:
            drawn = struct.unpack(f"={BLOCK_BYTES // 8}Q", os.urandom(BLOCK_BYTES))
            self._numbers = [number & BITS_63 for number in drawn]
        return self._numbers.pop()

    def hex_id(self) -> str:
        """96 bits as 24 digits: no two requests of the world have the same."""
        return self.draw(12).hex()


DICE = Dice()

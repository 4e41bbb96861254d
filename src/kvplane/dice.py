"""Dice: random bytes from the system, drawn by the block.

Edge of the ground floor. A system call for each room and each request id costs as much as all that
is done with it; what is drawn is as unpredictable, and no byte is given twice. Processes that fork
would share a block: ours start anew. Open it when something has to be unguessable and cheap.
"""

from __future__ import annotations

import os
import re
import struct

BLOCK_BYTES = 4096
BITS_63 = (1 << 63) - 1
NUMBERS = struct.Struct(f"<{BLOCK_BYTES // 8}Q")
ID = re.compile(r"[0-9a-f]{24}")


class Dice:
    """Numbers and names nobody can foretell, each given once."""

    __slots__ = ("_ids", "_numbers")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._ids: list[str] = []

    def bits63(self) -> int:
        """A number from 0 to 2**63 - 1."""
        if not self._numbers:
            self._numbers = list(NUMBERS.unpack(os.urandom(BLOCK_BYTES)))
        return self._numbers.pop() & BITS_63

    def hex_id(self) -> str:
        """96 bits as 24 digits: no two requests of the world have the same."""
        if not self._ids:
            self._ids = ID.findall(os.urandom(BLOCK_BYTES).hex())
        return self._ids.pop()


DICE = Dice()

"""Memo: what must a translator know of a worker beside its blocks?

Pure. One note in the worker's table, so that two ingests, and one that was restarted, decide alike.
Used by translation.py and its helpers. Open it when a decision depends on one more fact of the
past.

    b"!g" -> Note(i32 counted group or -1, u32 block size, u8 flags, u8 caveats, u8 ages);
             little-endian
"""

from __future__ import annotations

import struct
from collections.abc import MutableMapping
from dataclasses import dataclass

from kvplane.index import Note, Value

KEY = b"!g"
_MEMO = struct.Struct("<iIBBB")
PAIRED, HYBRID, LOOKAHEAD = 1, 2, 4
CAVEATS = {  # why a depth may be more than the engine serves
    PAIRED: "speculative decoding: the last block of a prefix may not be usable",
    HYBRID: "hybrid attention: other groups than full attention may not hold the prefix",
    LOOKAHEAD: "lookahead hashes: the last block of a shared prefix may not be usable",
}


@dataclass(slots=True)
class Memo:
    """Facts of one life of one worker, learnt from its events."""

    group: int | None = None  # the engine's number of the counted group
    size: int = 0  # tokens of a counted block; 0 = not yet learnt
    settled: bool = False  # by the GPU; a lower tier alone may have had blocks of another size
    lower: bool = False  # some lower tier was heard of: names are kept after the last copy
    caveats: int = 0
    age: int = 0  # of rows made now; see ageing.py
    alias_age: int = 0

    @staticmethod
    def of(table: MutableMapping[bytes, Value]) -> Memo:
        """As the table has it; a new one where it has none."""
        note = table.get(KEY)
        if not isinstance(note, Note):
            return Memo()  # and this packs to BLANK
        group, size, flags, caveats, ages = _MEMO.unpack(note.data)
        return Memo(
            None if group < 0 else group,
            size,
            bool(flags & 1),
            bool(flags & 2),
            caveats,
            ages & 15,
            ages >> 4,
        )

    def pack(self) -> bytes:
        """Bytes of its note."""
        flags = self.settled | self.lower << 1
        group = -1 if self.group is None else self.group
        ages = self.age | self.alias_age << 4
        return _MEMO.pack(group, self.size, flags, self.caveats, ages)

    def begin_again(self, empty: bool) -> None:
        """The table is empty. `empty`: so is the engine's cache, and its ways are as before."""
        if not empty:
            self.group, self.size, self.caveats = None, 0, 0
            self.settled = self.lower = False
        self.age = self.alias_age = 0

    @property
    def caveat(self) -> str:
        """All of them in words."""
        if not self.caveats:
            return ""
        return "; ".join(text for bit, text in CAVEATS.items() if self.caveats & bit)


BLANK = Memo().pack()  # nothing is known yet: no note is kept

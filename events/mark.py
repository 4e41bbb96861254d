"""Mark: what must a worker's table remember beside its blocks?

Pure. One row under a key that no engine can produce, without copies, so that no view counts it;
written in the same atomic step as the blocks. Used by writer.py. Open it when a restart of ours
must know one more thing.

    b"!" -> Note(u64 digest of the last batch applied, i64 first batch known, -1 where nothing is
            missing); little-endian
"""

from __future__ import annotations

import struct
from collections.abc import MutableMapping
from dataclasses import dataclass

from kvplane.index import Note, Value

KEY = b"!"
_MARK = struct.Struct("<Qq")


@dataclass(frozen=True, slots=True)
class Mark:
    """Tells a restarted ingest whether the engine is the same, and whether a gap was left open."""

    digest: int  # of the payload of the last batch
    known_from: int | None = None  # batches before it are unknown

    def note(self) -> Note:
        """As a value of the table."""
        return Note(_MARK.pack(self.digest, -1 if self.known_from is None else self.known_from))


def take(table: MutableMapping[bytes, Value]) -> Mark | None:
    """Take the mark out of a table, so that what is left is the translator's."""
    note = table.pop(KEY, None)
    if not isinstance(note, Note):
        return None
    digest, known_from = _MARK.unpack(note.data)
    return Mark(digest, None if known_from < 0 else known_from)

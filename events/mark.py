"""Mark: what must a worker's table remember beside its blocks?

Pure. One Note under a key that no engine can produce, so that no view counts it; written in the
same atomic step as the blocks. Used by writer.py. Open it when a restart of ours must know one
more thing.

    b"!" -> Note(u64 digest of the last batch applied, i64 first batch known, -1 where nothing is
            missing, f64 wall clock of that gap); little-endian
"""

from __future__ import annotations

import struct
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import UTC, datetime

from kvplane.index import Note, Value

KEY = b"!"
_MARK = struct.Struct("<Qqd")


@dataclass(frozen=True, slots=True)
class Mark:
    """Tells a restarted ingest whether the engine is the same, and whether a gap was left open."""

    digest: int  # of the payload of the last batch
    known_from: int | None = None  # batches before it are unknown
    since: float = 0.0  # wall clock of the gap, seconds; 0 where nothing is missing

    def note(self) -> Note:
        """As a value of the table."""
        first = -1 if self.known_from is None else self.known_from
        return Note(_MARK.pack(self.digest, first, self.since))


def take(table: MutableMapping[bytes, Value]) -> Mark | None:
    """Take the mark out of a table, so that what is left is the translator's."""
    note = table.pop(KEY, None)
    if not isinstance(note, Note) or len(note.data) != _MARK.size:
        return None
    digest, known_from, since = _MARK.unpack(note.data)
    return Mark(digest, None if known_from < 0 else known_from, since)


def incomplete(since: float, what: str) -> str:
    """A gap in words: incomplete since 2026-01-02T03:04:05Z: batches 2 to 3 were missed."""
    time = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"incomplete since {time}: {what}"

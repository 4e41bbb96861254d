"""Mark: what must a worker's table remember beside its blocks?

Pure. One row under a key that no engine can produce, without copies, so that no view counts it;
written in the same atomic step as the blocks. Used by writer.py. Open it when a restart of ours
must know one more thing.

    b"!" -> Row(block = digest of the last batch applied, parent = first batch known, or None
            where nothing is missing)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.index import Row
from kvplane.vocabulary import BlockHash

KEY = b"!"


@dataclass(frozen=True, slots=True)
class Mark:
    """Tells a restarted ingest whether the engine is the same, and whether a gap was left open."""

    digest: int  # of the payload of the last batch
    known_from: int | None = None  # batches before it are unknown

    def row(self, block_size: int) -> Row:
        """As a row of the table; `block_size` is the worker's, to look like its others."""
        above = None if self.known_from is None else BlockHash(self.known_from)
        return Row(BlockHash(self.digest), above, (0, 0, 0, 0), max(1, block_size))


def take(table: dict[bytes, Row]) -> Mark | None:
    """Take the mark out of a table, so that only blocks are left."""
    row = table.pop(KEY, None)
    return None if row is None else Mark(row.block, row.parent)

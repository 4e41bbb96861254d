"""Index, packed: as index_adapter.py, but an event comes as bytes and is decoded in apply().

Edge of bench/: the bytes are those of the store's stream, one event each, because the peer parses
what it is told too.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.index_adapter import EPOCH, Index
from kvplane.index.stores.codec import decode, encode
from kvplane.vocabulary import Worker


class Packed:
    """One view over numbered pods."""

    def __init__(self, pods: int, block_size: int) -> None:
        index = self._index = Index(pods, block_size)
        self.view, self.query, self.find = index.view, index.query, index.find

    def event(
        self, pod: int, stored: bool, parent: int | None, seq: Sequence[int], local: Sequence[int]
    ) -> tuple[Worker, bytes]:
        """One engine event as msgpack."""
        change = self._index.event(pod, stored, parent, seq, local)
        return change.worker, encode([change])

    def apply(self, payload: tuple[Worker, bytes]) -> None:
        """Take over one event."""
        worker, data = payload
        for change in decode(data, worker, EPOCH):
            self.view.apply(change)

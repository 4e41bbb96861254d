"""Index of Dynamo: its RadixTree under the names of index_adapter.py.

Edge of bench/: runs in the environment that DYNAMO_PY names, and imports nothing of ours. The tree
is told events as JSON and asked by content hashes; its scores are by (worker, rank).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


class Dynamo:
    """One tree over numbered pods."""

    def __init__(self, pods: int, block_size: int) -> None:
        from dynamo.llm import RadixTree  # type: ignore[import-not-found, unused-ignore]

        self._tree: Any = RadixTree()
        self._told = 0

    def event(
        self, pod: int, stored: bool, parent: int | None, seq: Sequence[int], local: Sequence[int]
    ) -> tuple[int, bytes]:
        """One engine event as JSON."""
        self._told += 1
        data: dict[str, Any] = {"removed": {"block_hashes": list(seq)}}
        if stored:
            blocks = [
                {"block_hash": block, "tokens_hash": content}
                for block, content in zip(seq, local, strict=True)
            ]
            data = {"stored": {"parent_hash": parent, "blocks": blocks}}
        return pod, json.dumps({"event_id": self._told, "data": data}).encode()

    def apply(self, payload: tuple[int, bytes]) -> None:
        """Take over one event."""
        self._tree.apply_event(*payload)

    def query(self, seq: Sequence[int], local: Sequence[int]) -> list[int]:
        """One prompt."""
        return list(local)

    def find(self, payload: list[int]) -> dict[Any, int]:
        """Depth in blocks by (pod, rank)."""
        found: dict[Any, int] = self._tree.find_matches(payload).scores
        return found

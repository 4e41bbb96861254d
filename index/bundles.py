"""Bundles: the lines of many workers of one depth, written in one go.

Pure. Who shares a system prompt has the same depth for it, request after request, and only the
depth between head and tail of a line is another each time: so the pieces around it are kept, and
one join writes all lines. Used by lines.py. Open it to change what is kept.

    head a | tail a, head b | tail b        joined by a depth: the lines of a and b
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvplane.vocabulary import Worker

Line = tuple[bytes, int, bytes]  # before the depth, block size or 0, after it
Group = tuple[Worker, ...]  # of one depth; the view gives the same tuple again
MOST = 1024  # sets of groups that are remembered; some kilobytes each


class Bundles:
    """Of one state of all lines."""

    def __init__(self, lines: Mapping[Worker, Line], everybody: Sequence[Worker]) -> None:
        self._lines, self._everybody = lines, everybody
        # Found by identity, since tuples of hundreds of workers are slow to compare; kept with
        # their key, so that no other tuple can take its place.
        self._pieces: dict[tuple[int, ...], tuple[Sequence[Group], list[bytes]]] = {}
        self._rests: dict[tuple[int, ...], tuple[Sequence[Group], Group]] = {}

    def write(self, groups: Sequence[Group], depth: bytes) -> bytes:
        """The lines of all of them, by name; empty for nobody."""
        key = tuple(map(id, groups))
        kept = self._pieces.get(key)
        if kept is None:
            kept = _bound(self._pieces)[key] = groups, self._cut(groups)
        return depth.join(kept[1])

    def rest(self, groups: Sequence[Group]) -> Group:
        """Everybody else."""
        key = tuple(map(id, groups))
        kept = self._rests.get(key)
        if kept is None:
            named = {worker for group in groups for worker in group}
            others = tuple([worker for worker in self._everybody if worker not in named])
            kept = _bound(self._rests)[key] = groups, others
        return kept[1]

    def _cut(self, groups: Iterable[Group]) -> list[bytes]:
        tail, pieces = b"", list[bytes]()
        for worker in sorted(worker for group in groups for worker in group):
            head, _, after = self._lines[worker]
            pieces.append(tail + head)
            tail = after
        return [*pieces, tail] if pieces else []


def _bound(kept: dict[tuple[int, ...], Any]) -> dict[tuple[int, ...], Any]:
    if len(kept) >= MOST:
        kept.clear()
    return kept

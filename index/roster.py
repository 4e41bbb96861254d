"""Roster: what does the fleet that discovery sees mean to a question?

Pure: facts of pods in; names, models and sizes out. Worked out once for as long as the fleet stays
the same, because it is asked for with every question. Open it to use another fact of a pod.

    ups -> workers a, b, b@1      models served: qwen/3      adapters: sql -> qwen/3      sizes: 16
"""

from __future__ import annotations

from collections.abc import Sequence

from kvplane.vocabulary import Worker, WorkerUp

from .view import View


class Roster:
    """One state of the fleet. Read it; it never changes."""

    __slots__ = ("_everybody", "_seen", "bases", "fleet", "served", "sizes", "ups")

    def __init__(self, ups: Sequence[WorkerUp]) -> None:
        self.ups = tuple(ups)
        # Every dp rank of every pod.
        self.fleet = {Worker(up.pod, rank): up for up in ups for rank in range(up.dp_size)}
        self.served = frozenset(up.model for up in self.fleet.values())
        self.bases = {name: up.model for up in self.fleet.values() for name in up.adapters}
        self.sizes = frozenset(up.block_size for up in self.fleet.values() if up.block_size)
        self._seen: tuple[Worker, ...] | None = None
        self._everybody: tuple[Worker, ...] = ()

    def block_sizes(self, view: View) -> list[int]:
        """Those that events or discovery told, ascending."""
        return sorted({*view.block_sizes(), *self.sizes})

    def everybody(self, view: View) -> tuple[Worker, ...]:
        """Workers that discovery or events told us of, in order."""
        seen = view.workers()
        if seen != self._seen:
            self._seen, self._everybody = seen, tuple(sorted({*seen, *self.fleet}))
        return self._everybody


def roster(ups: Sequence[WorkerUp], last: Roster | None = None) -> Roster:
    """Of these pods; the last one where they are the same, which is quick to see."""
    return last if last is not None and last.ups == tuple(ups) else Roster(ups)

"""Evidence: which stages of a room did this engine see?

Pure. transfer/ and the two roles record into it; GET /rooms/{room} reads it. Bounded: the oldest
room makes room. Open it to change what is kept of a room.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvplane.vocabulary import Room, StageRecord

from .metrics import EngineMetrics

MOST_STAGES = 64  # of one room; six stages, so more means a fault


class Evidence:
    """The last rooms with their stages, in the order they ended."""

    def __init__(self, most: int, metrics: EngineMetrics) -> None:
        self._rooms: OrderedDict[Room, list[StageRecord]] = OrderedDict()
        self._most = most
        self._metrics = metrics

    def record(self, record: StageRecord) -> None:
        """Remember one stage."""
        stages = self._rooms.setdefault(record.room, [])
        if len(stages) < MOST_STAGES:
            stages.append(record)
        while len(self._rooms) > self._most:
            self._rooms.popitem(last=False)
        labels = record.stage.value, record.outcome
        self._metrics.stages.labels(*labels).observe(record.duration_s)

    def room(self, room: Room) -> dict[str, Any] | None:
        """One room as JSON; None where nothing is known of it."""
        stages = self._rooms.get(room)
        if stages is None:
            return None
        return {"room": room, "stages": [_shown(stage) for stage in stages]}

    def __len__(self) -> int:
        return len(self._rooms)


def _shown(record: StageRecord) -> dict[str, Any]:
    return {
        "stage": record.stage.value,
        "outcome": record.outcome,
        "duration_s": round(record.duration_s, 6),
        "detail": record.detail,
        "by": record.by,
        "at": record.at,
    }

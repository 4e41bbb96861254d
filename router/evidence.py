"""Evidence: what happened in each room, stage by stage, and why this pair met there.

Edge: a bounded ring in memory, and readers who wait a moment for what is still being collected.
gateway.py opens and closes meetings, aftermath.py brings the engines' stages, admin.py and
diagnosis.py read. Open it to change what is remembered of a request.

    meeting (one attempt) --- room 71 --- register resolve-topology ... consume
                          \\-- room 12 --- one room per prompt and sample
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvplane.runtime import Clock
from kvplane.vocabulary import Room, Stage, StageRecord

ORDER = {stage: number for number, stage in enumerate(Stage)}
MOST_STAGES = 64  # records per room: ranks x stages of two engines, and no more


@dataclass(eq=False)
class Meeting:
    """One attempt: its rooms, its pair, what was expected and what came of it."""

    request_id: str
    attempt: int  # from 1
    path: str
    model: str
    rooms: tuple[Room, ...]  # empty with a unified worker
    prefill: dict[str, Any] | None  # worker, url, epoch; later status
    decode: dict[str, Any]
    why: dict[str, Any]  # depth, load, policy, knowledge, candidates
    predicted_tokens: int | None = None  # cached tokens the index foretold; None = not known
    actual_tokens: int | None = None  # as prefill told; None = it did not
    triple: dict[str, Any] | None = None
    outcome: str = "open"  # open | ok | failed | rejected | client_gone
    error: dict[str, Any] | None = None
    opened_at: float = 0.0  # wall clock
    first_byte_s: float | None = None
    duration_s: float | None = None
    begun: float = 0.0
    stages: dict[Room, list[StageRecord]] = field(default_factory=dict)
    collected: asyncio.Event = field(default_factory=asyncio.Event)

    def shown(self, room: Room | None = None) -> dict[str, Any]:
        """As JSON; of one room, or of the attempt as a whole. Rooms are text: 64-bit numbers
        break JavaScript."""
        records = self.stages.get(room, []) if room is not None else []
        found: dict[str, Any] = {"room": str(room)} if room is not None else {}
        return found | {
            "rooms": [str(one) for one in self.rooms],
            "request_id": self.request_id,
            "attempt": self.attempt,
            "path": self.path,
            "model": self.model,
            "outcome": self.outcome,
            "error": self.error,
            "opened_at": self.opened_at,
            "first_byte_s": self.first_byte_s,
            "duration_s": self.duration_s,
            "prefill": self.prefill,
            "decode": self.decode,
            "triple": self.triple,
            "why": self.why,
            "cached_tokens": {"predicted": self.predicted_tokens, "actual": self.actual_tokens},
            "collected": self.collected.is_set(),
            "stages": [_shown(record) for record in sorted(records, key=_order)],
        }


class Ledger:
    """The last `most` rooms and the requests they belong to."""

    def __init__(self, clock: Clock, most: int = 10_000) -> None:
        self._clock, self._most = clock, most
        self._ring: deque[Meeting] = deque()
        self._weight = 0  # rooms in the ring; a meeting without rooms weighs one
        self._by_room: dict[Room, Meeting] = {}
        self._by_request: dict[str, list[Meeting]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def open_rooms(self) -> int:
        """Rooms whose meeting is not over."""
        return sum(len(m.rooms) for m in self._ring if m.outcome == "open")

    def open(self, meeting: Meeting) -> Meeting:
        """A meeting begins; the oldest that are over make place."""
        meeting.opened_at, meeting.begun = self._clock.wall(), self._clock.now()
        self._ring.append(meeting)
        self._weight += max(1, len(meeting.rooms))
        for room in meeting.rooms:
            self._by_room[room] = meeting
        self._by_request.setdefault(meeting.request_id, []).append(meeting)
        while self._weight > self._most and len(self._ring) > 1:
            self._drop(self._ring.popleft())
        return meeting

    def _drop(self, meeting: Meeting) -> None:
        self._weight -= max(1, len(meeting.rooms))
        for room in meeting.rooms:
            if self._by_room.get(room) is meeting:
                del self._by_room[room]
        same = self._by_request[meeting.request_id]
        same.remove(meeting)
        if not same:
            del self._by_request[meeting.request_id]

    def record(self, record: StageRecord) -> bool:
        """A party saw a stage. False where the room is not known, or it was recorded before."""
        meeting = self._by_room.get(record.room)
        if meeting is None:
            return False
        records = meeting.stages.setdefault(record.room, [])
        if len(records) >= MOST_STAGES or any(_same(record, known) for known in records):
            return False
        records.append(record)
        return True

    def first_byte(self, meeting: Meeting) -> None:
        """The answer began to leave."""
        meeting.first_byte_s = round(self._clock.now() - meeting.begun, 6)

    def close(self, meeting: Meeting, outcome: str, error: dict[str, Any] | None = None) -> None:
        """The legs ended. The first word stands."""
        if meeting.outcome == "open":
            meeting.outcome, meeting.error = outcome, error
            meeting.duration_s = round(self._clock.now() - meeting.begun, 6)

    # -- readers

    def room(self, room: Room) -> dict[str, Any] | None:
        """Evidence of one room, None where it is not (or no longer) known."""
        meeting = self._by_room.get(room)
        return meeting.shown(room) if meeting is not None else None

    async def settled(self, room: Room, deadline_s: float) -> dict[str, Any] | None:
        """The same, after waiting a moment for the engines' stages."""
        meeting = self._by_room.get(room)
        if meeting is not None and meeting.outcome != "open":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await meeting.collected.wait()
        return self.room(room)

    def meetings(self, limit: int = 100, failed: bool | None = None) -> list[Meeting]:
        """Newest first; only those that failed (or did not), where asked."""
        found: list[Meeting] = []
        for meeting in reversed(self._ring):
            if len(found) >= limit:
                break
            if failed is None or failed is (meeting.outcome == "failed"):
                found.append(meeting)
        return found

    def rooms(self, limit: int = 100, failed: bool | None = None) -> list[dict[str, Any]]:
        """Evidence of the newest rooms."""
        each = (m.shown(room) for m in self.meetings(limit, failed) for room in m.rooms)
        return [found for found, _ in zip(each, range(limit), strict=False)]

    def request(self, request_id: str) -> dict[str, Any] | None:
        """All attempts of one request, with each room's stages."""
        meetings = self._by_request.get(request_id)
        if not meetings:
            return None
        attempts = [
            meeting.shown()
            | {"stages": {str(r): meeting.shown(r)["stages"] for r in meeting.rooms}}
            for meeting in meetings
        ]
        last = meetings[-1]
        return {"request_id": request_id, "outcome": last.outcome, "attempts": attempts}


def stage_records(room: Room, told: object, by: str) -> Iterable[StageRecord]:
    """An engine's list of stages as records; what is no stage is left out."""
    for item in told if isinstance(told, list) else ():
        try:
            yield StageRecord(
                room,
                Stage(item["stage"]),
                "ok" if item["outcome"] == "ok" else "failed",
                float(item["duration_s"]),
                str(item.get("detail") or "")[:500],
                str(item.get("by") or by)[:100],
                float(item.get("at") or 0.0),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            continue


def _same(one: StageRecord, other: StageRecord) -> bool:
    return (one.stage, one.by, one.at) == (other.stage, other.by, other.at)


def _order(record: StageRecord) -> tuple[int, float]:
    return ORDER[record.stage], record.at


def _shown(record: StageRecord) -> dict[str, Any]:
    return {
        "stage": record.stage.value,
        "outcome": record.outcome,
        "duration_s": record.duration_s,
        "detail": record.detail,
        "by": record.by,
        "at": record.at,
    }

"""Evidence: what happened in each room, stage by stage, and why this pair met there.

Edge: a bounded ring in memory, and readers who wait a moment for what the engines have to tell.
gateway.py opens and closes meetings (meeting.py), aftermath.py asks the engines, admin_evidence.py
and diagnosis.py read. Open it to change what is remembered of a request.

    meeting (one attempt) --- room 71 --- register resolve-topology ... consume
                          \\-- room 12 --- one room per prompt and sample
    refused (nobody was chosen) --- a small ring of its own: a flood of them pushes out no room

Most meetings go as they came, and nobody ever asks for them: they get their names, by which they
are found, when somebody asks for any.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from kvplane.runtime import Clock
from kvplane.vocabulary import MEETING, Room, Stage, StageRecord

from .errors import GatewayError
from .meeting import Meeting, Trail

__all__ = ["Ledger", "Meeting", "stage_records"]

MOST_STAGES = 64  # records per room: ranks x stages of two engines, and no more
MOST_REFUSED = 1000  # attempts for which nobody was chosen
MOST_ATTEMPTS = 64  # of one request id, the newest: a client may use one id for all it asks


class Ledger:
    """The last `most` rooms and the requests they belong to."""

    def __init__(self, clock: Clock, most: int = 10_000) -> None:
        self._clock, self._now, self._most = clock, clock.now, most
        self._ring: deque[Meeting] = deque()
        self._refused: deque[Meeting] = deque()
        self._weight = 0  # rooms in the ring; a meeting without rooms weighs one
        self._named = 0  # meetings of the ring, the oldest, that these two know:
        self._by_room: dict[Room, Meeting] = {}
        self._by_request: dict[str, Meeting | list[Meeting]] = {}  # a list of several attempts
        self.ask: Callable[[Meeting], Awaitable[None]] | None = None  # its engines, for stages
        self.on_close: list[Callable[[Meeting], None]] = []  # who wants to hear of every end

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def now(self) -> float:
        """By the clock of all meetings."""
        return self._now()

    @property
    def open_rooms(self) -> int:
        """Rooms whose meeting is not over."""
        return sum(len(m.rooms) for m in self._ring if m.outcome == "open")

    def open(self, meeting: Meeting, trail: Trail | None = None) -> Meeting:
        """A meeting begins, or began with its trail."""
        self._begin(meeting, trail)
        return self.add(meeting)

    def add(self, meeting: Meeting) -> Meeting:
        """One that says when it began; the oldest make place."""
        ring, weight = self._ring, self._weight + (len(meeting.rooms) or 1)
        ring.append(meeting)
        while weight > self._most and len(ring) > 1:
            oldest = ring.popleft()
            weight -= len(oldest.rooms) or 1
            if self._named:
                self._forget(oldest)
        self._weight = weight
        return meeting

    def refuse(self, meeting: Meeting, trail: Trail, error: GatewayError) -> None:
        """Nobody could be chosen: it ends in the stage the error names, or that is under way."""
        at = Stage(error.stage) if error.stage is not None else error.at
        if at is not None and trail.steps and trail.steps[-2] is not at:
            trail.begin(at)
        self._begin(meeting, trail)
        self._learn()
        self._name(meeting)
        meeting.attempt = len(self.of(meeting.request_id))
        self._refused.append(meeting)
        while len(self._refused) > MOST_REFUSED:
            self._unname(self._refused.popleft())
        outcome = "rejected" if error.status < 500 else "failed"
        self.close(meeting, outcome, error.shape()["error"])

    def _begin(self, meeting: Meeting, trail: Trail | None) -> None:
        begun = now = self._now()
        if trail is not None and (steps := trail.steps):
            meeting.steps, begun = steps, steps[1]
        meeting.begun, meeting.opened_at = begun, self._clock.wall() - now + begun

    def _learn(self) -> None:
        """Name those that came since somebody last asked for one."""
        fresh = len(self._ring) - self._named
        if not fresh:
            return
        for meeting in reversed(list(islice(reversed(self._ring), fresh))):
            for room in meeting.rooms:
                self._by_room[room] = meeting
            self._name(meeting)
        self._named += fresh

    def _name(self, meeting: Meeting) -> None:
        """One more attempt of its request."""
        known = self._by_request.setdefault(meeting.request_id, meeting)
        if isinstance(known, list):
            known.append(meeting)
        elif known is not meeting:
            self._by_request[meeting.request_id] = [known, meeting]

    def _forget(self, meeting: Meeting) -> None:
        """The oldest that has names loses them."""
        self._named -= 1
        for room in meeting.rooms:
            if self._by_room.get(room) is meeting:
                del self._by_room[room]
        self._unname(meeting)

    def _unname(self, meeting: Meeting) -> None:
        same = self._by_request[meeting.request_id]
        if same is not meeting and isinstance(same, list) and len(same) > 1:
            same.remove(meeting)
        else:
            del self._by_request[meeting.request_id]

    def of(self, request_id: str) -> list[Meeting]:
        """Its newest attempts, oldest first."""
        self._learn()
        found = self._by_request.get(request_id, [])
        return found[-MOST_ATTEMPTS:] if isinstance(found, list) else [found]

    def record(self, record: StageRecord) -> bool:
        """A party saw a stage. False where the room is not known, or it was recorded before."""
        meeting = self._in(record.room)
        if meeting is None:
            return False
        records = meeting.stages.get(record.room, [])
        if len(records) >= MOST_STAGES or any(_same(record, known) for known in records):
            return False
        meeting.stages = {**meeting.stages, record.room: [*records, record]}
        return True

    def close(self, meeting: Meeting, outcome: str, error: dict[str, Any] | None = None) -> None:
        """The legs ended. The first word stands."""
        if meeting.outcome == "open":
            meeting.outcome, meeting.ended = outcome, self._now()
            if error is not None:
                meeting.error = error
            for hear in self.on_close:
                hear(meeting)

    # -- readers

    def _in(self, room: Room) -> Meeting | None:
        """Who met there last."""
        self._learn()
        return self._by_room.get(room)

    def room(self, room: Room) -> dict[str, Any] | None:
        """Evidence of one room, None where it is not (or no longer) known."""
        meeting = self._in(room)
        return meeting.shown(room, self.now) if meeting is not None else None

    async def settled(self, room: Room, deadline_s: float) -> dict[str, Any] | None:
        """The same, after the engines were asked for their stages, for a moment at most."""
        meeting = self._in(room)
        await self.settle([] if meeting is None else [meeting], deadline_s)
        return self.room(room)

    async def settle(self, meetings: Iterable[Meeting], deadline_s: float) -> None:
        """Ask the engines of these, of which not all is known yet; returns in time."""
        asked = [meeting for meeting in meetings if meeting.rooms and not meeting.collected]
        if self.ask is not None and asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await asyncio.gather(*map(self.ask, asked))

    def meetings(
        self, limit: int = 100, failed: bool | None = None, since: float | None = None
    ) -> list[Meeting]:
        """Newest first; only those that failed (or did not), or began `since`, where asked."""
        found: list[Meeting] = []
        for meeting in reversed(self._ring):
            if len(found) >= limit or (since is not None and meeting.begun < since):
                break
            if failed is None or failed is (meeting.outcome == "failed"):
                found.append(meeting)
        return found

    def refusals(self, limit: int = 100, since: float = 0.0) -> Iterator[Meeting]:
        """Attempts for which nobody was chosen, newest first."""
        for meeting, _ in zip(reversed(self._refused), range(limit), strict=False):
            if meeting.begun < since:
                return
            yield meeting

    def rooms(self, limit: int = 100, failed: bool | None = None) -> list[dict[str, Any]]:
        """Evidence of the newest rooms."""
        now = self.now
        each = (m.shown(room, now) for m in self.meetings(limit, failed) for room in m.rooms)
        return [found for found, _ in zip(each, range(limit), strict=False)]

    def attempts(self, limit: int = 100, failed: bool | None = None) -> list[dict[str, Any]]:
        """The newest attempts, those included for which nobody was chosen, newest first."""
        found = self.meetings(limit, failed) + [
            one
            for one in self.refusals(limit)
            if failed is None or failed is (one.outcome == "failed")
        ]
        found.sort(key=lambda one: one.begun, reverse=True)
        return [meeting.shown(None, self.now) for meeting in found[:limit]]

    def request(self, request_id: str) -> dict[str, Any] | None:
        """All attempts of one request (the newest of very many), with each room's stages; those
        of none are under ""."""
        if not (meetings := self.of(request_id)):
            return None
        attempts = [self.attempt(meeting) for meeting in meetings]
        outcome = meetings[-1].outcome
        return {"request_id": request_id, "outcome": outcome, "attempts": attempts}

    def attempt(self, meeting: Meeting) -> dict[str, Any]:
        """One of them."""
        now = self.now
        stages = {str(room): list(meeting.timeline(room, now)) for room in meeting.rooms}
        bare = stages or {"": list(meeting.timeline(None, now))}
        return meeting.shown(None, now) | {"stages": bare}

    async def settled_request(self, request_id: str, deadline_s: float) -> dict[str, Any] | None:
        """The same, after the engines of its attempts were asked."""
        await self.settle(self.of(request_id), deadline_s)
        return self.request(request_id)


TOLD = frozenset(stage.value for stage in MEETING)
MOST_S = 1e11  # seconds of a duration or a wall clock; more, less than 0 or no number is no time


def stage_records(room: Room, told: object, by: str) -> Iterable[StageRecord]:
    """An engine's list of stages as records; what is no stage of a meeting is left out."""
    for item in told if isinstance(told, list) else ():
        try:
            if item["stage"] not in TOLD:
                continue
            yield StageRecord(
                room,
                Stage(item["stage"]),
                "ok" if item["outcome"] == "ok" else "failed",
                _seconds(item["duration_s"]),
                str(item.get("detail") or "")[:500],
                str(item.get("by") or by)[:100],
                _seconds(item.get("at") or 0.0),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue


def _seconds(told: Any) -> float:
    """Raises ValueError for what is no time: one "nan" would spoil the sum of a histogram for ever,
    and its order."""
    seconds = float(told)
    if not 0 <= seconds <= MOST_S:
        raise ValueError(f"{seconds} is no time")
    return seconds


def _same(one: StageRecord, other: StageRecord) -> bool:
    return (one.stage, one.by, one.at) == (other.stage, other.by, other.at)

"""Shared evidence: rooms and requests that any gateway can tell of, for a while.

Edge: one small task that writes behind, into a store that is given; never awaited by a request.
evidence.py says when an attempt ended, admin_evidence.py asks here for what it does not know.
Open it to change what is shared, or for how long.

    attempt ends --> queue (bounded) --> a moment later, its engines asked --> r:ROOM  q:REQUEST

    r:ROOM     the attempt; of a list under its first room, which the others name
    q:REQUEST  the first room of each attempt, or the attempt where it has none

A client may use an id again, at another gateway: then q:REQUEST tells of the last one only, and
each room of itself all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvplane.index import StoreDown
from kvplane.runtime import Clock, cancel, supervise
from kvplane.vocabulary import Room

from .evidence import Ledger
from .meeting import Meeting

log = logging.getLogger(__name__)

TICK_S = 0.5  # between two writes
SETTLE_S = 1.5  # after its end: until then its engines were asked, where they are asked at all
MOST_WAITING = 10_000  # attempts; more are dropped, and counted
MOST_WRITTEN = 500  # attempts of one write
MOST_BYTES = 256 * 1024  # of one text; a list of thousands of rooms is left out


class Texts(Protocol):
    """Where they are kept; kvplane.index.Lasting is one."""

    async def put(self, texts: Sequence[tuple[str, bytes]], seconds: int) -> int: ...
    async def get(self, name: str) -> bytes | None: ...


class SharedEvidence:
    """Writes what this gateway's ledger closed, reads what others wrote. A Part."""

    def __init__(
        self,
        ledger: Ledger,
        texts: Texts,
        clock: Clock,
        lifetime_s: int,
        on_dropped: Callable[[int], None] = lambda count: None,
    ) -> None:
        self._ledger, self._texts, self._clock = ledger, texts, clock
        self._lifetime_s, self._on_dropped = lifetime_s, on_dropped
        self._waiting: deque[tuple[float, Meeting]] = deque()  # since when
        self._task: asyncio.Task[None] | None = None
        ledger.on_close.append(self._closed)

    async def start(self) -> None:
        """Begin to write."""
        work = supervise("shared evidence", self._write_for_ever, self._clock)
        self._task = asyncio.create_task(work, name="shared evidence")

    async def stop(self) -> None:
        """Write no more; what waits is only known here."""
        await cancel(self._task)

    async def request(self, request_id: str) -> dict[str, Any] | None:
        """A request some gateway had; None where none did, or the store is away."""
        whole = await self._get(f"q:{request_id}")
        if whole is None:
            return None
        told = whole["attempts"]
        rooms = [one for one in told if isinstance(one, str)]
        # At once: one after the other, a store that went away would be waited for as many times.
        found = await asyncio.gather(*(self._get(f"r:{one}") for one in rooms))
        by_room = dict(zip(rooms, found, strict=True))
        each = [by_room[one] if isinstance(one, str) else one for one in told]
        attempts = [one for one in each if one is not None]  # one under way is not told of yet
        return {**whole, "attempts": attempts} if attempts else None

    async def room(self, room: Room) -> dict[str, Any] | None:
        """The same of one room, as its own gateway shows it."""
        attempt = await self._get(f"r:{room}")
        if attempt is not None and "first" in attempt:
            attempt = await self._get(f"r:{attempt['first']}")
        if attempt is None:
            return None
        return {"room": str(room), **attempt, "stages": attempt["stages"][str(room)]}

    async def _get(self, name: str) -> dict[str, Any] | None:
        try:
            text = await self._texts.get(name)
            found = None if text is None else msgspec.json.decode(text)
        except (StoreDown, TimeoutError, msgspec.DecodeError) as error:
            log.warning("shared evidence not read name=%s why=%s", name, error)
            return None
        return found if isinstance(found, dict) else None

    # -- behind

    def _closed(self, meeting: Meeting) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._on_dropped(1)
        self._waiting.append((self._clock.now(), meeting))

    async def _write_for_ever(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            while (texts := self._due()) and await self._write(texts):
                pass  # more is due

    def _due(self) -> list[tuple[str, bytes]]:
        """Keys and texts of what ended a while ago; each request once."""
        before, ended = self._clock.now() - SETTLE_S, list[Meeting]()
        while self._waiting and self._waiting[0][0] <= before and len(ended) < MOST_WRITTEN:
            ended.append(self._waiting.popleft()[1])
        found: list[tuple[str, bytes]] = []
        names: dict[str, list[Meeting]] = {}
        for meeting in ended:
            text = msgspec.json.encode(self._ledger.attempt(meeting))
            if len(text) > MOST_BYTES:
                self._on_dropped(1)
                continue
            found += _by_room(meeting, text)
            names.setdefault(meeting.request_id, []).append(meeting)
        for name, those in names.items():
            whole = self._request(name, self._ledger.of(name) or those)
            found.append((f"q:{name}", msgspec.json.encode(whole)))
        return found

    def _request(self, name: str, attempts: Sequence[Meeting]) -> dict[str, Any]:
        told = [str(one.rooms[0]) if one.rooms else self._ledger.attempt(one) for one in attempts]
        return {"request_id": name, "outcome": attempts[-1].outcome, "attempts": told}

    async def _write(self, texts: Sequence[tuple[str, bytes]]) -> bool:
        try:
            lost = await self._texts.put(texts, self._lifetime_s)
        except (StoreDown, TimeoutError) as error:
            log.warning(
                "shared evidence not written texts=%d why=%s action=drop", len(texts), error
            )
            lost = len(texts)
        if lost:
            self._on_dropped(lost)
        return not lost


def _by_room(meeting: Meeting, text: bytes) -> list[tuple[str, bytes]]:
    """What is told of an attempt, under each of its rooms."""
    if not meeting.rooms:
        return []
    first, *others = meeting.rooms
    way = msgspec.json.encode({"first": str(first)})
    return [(f"r:{first}", text), *((f"r:{room}", way) for room in others)]

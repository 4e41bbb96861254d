"""Shared evidence: rooms and requests that any gateway can tell of, for a while.

Edge: one small task that writes behind, into a store that is given; never awaited by a request.
evidence.py says when an attempt ended, admin_evidence.py asks here for what it does not know.
Open it to change what is shared, or for how long.

    attempt ends --> queue (bounded) --> a moment later, its engines asked --> q:REQUEST  r:ROOM
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
MOST_WRITTEN = 500  # requests of one write
MOST_BYTES = 256 * 1024  # of one request; a list of thousands of rooms is left out


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
        self._waiting: deque[tuple[float, str]] = deque()  # since when, request
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
        try:
            text = await self._texts.get(f"q:{request_id}")
            found = None if text is None else msgspec.json.decode(text)
        except (StoreDown, TimeoutError, msgspec.DecodeError) as error:
            log.warning("shared evidence not read request=%s why=%s", request_id, error)
            return None
        return found if isinstance(found, dict) else None

    async def room(self, room: Room) -> dict[str, Any] | None:
        """The same of one room, as its own gateway shows it."""
        try:
            name = await self._texts.get(f"r:{room}")
        except (StoreDown, TimeoutError) as error:
            log.warning("shared evidence not read room=%d why=%s", room, error)
            return None
        whole = None if name is None else await self.request(name.decode())
        for attempt in (whole or {}).get("attempts", ()):
            stages = attempt.get("stages", {}).get(str(room))
            if stages is not None:
                return {"room": str(room), **attempt, "stages": stages}
        return None

    # -- behind

    def _closed(self, meeting: Meeting) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self._on_dropped(1)
        self._waiting.append((self._clock.now(), meeting.request_id))

    async def _write_for_ever(self) -> None:
        while True:
            await self._clock.sleep(TICK_S)
            while (texts := self._due()) and await self._write(texts):
                pass  # more is due

    def _due(self) -> list[tuple[str, bytes]]:
        """Keys and texts of what ended a while ago; each request once."""
        before, names = self._clock.now() - SETTLE_S, dict[str, None]()
        while self._waiting and self._waiting[0][0] <= before and len(names) < MOST_WRITTEN:
            names[self._waiting.popleft()[1]] = None
        found: list[tuple[str, bytes]] = []
        for name in names:
            whole = self._ledger.request(name)
            text = b"" if whole is None else msgspec.json.encode(whole)
            if whole is None or len(text) > MOST_BYTES:
                self._on_dropped(1)
                continue
            rooms = [room for attempt in whole["attempts"] for room in attempt["rooms"]]
            found.append((f"q:{name}", text))
            found += [(f"r:{room}", name.encode()) for room in rooms]
        return found

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

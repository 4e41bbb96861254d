"""Reader: one consumer's walk through the change stream, at its own pace.

Edge. Made by broadcast.py, drained by api.py. It walks the ring that all readers share; one that is
older than the ring reads the store itself, in one of few places, until it has caught up. Open it to
change how a reader waits, falls behind or catches up.

    ring   --too slow, or came with an old cursor-->  own tail of the store  --caught up-->  ring
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, cast

from kvplane.index import CursorGone, Entry, StoreDown
from kvplane.runtime import cancel
from kvplane.vocabulary import Cursor

from .ring import NOWHERE, Place, encoded

if TYPE_CHECKING:
    from .broadcast import Broadcast

_MOST_BYTES = 16 * 1024  # joined into one write
_FIRST_S = 1.0  # a cursor that is gone shows at once; then the answer begins
_LOOK_S = 0.2  # between looks whether the ring has come to where an own tail waits


class OwnTail:
    """The store's tail for one reader alone; what was asked for is never asked twice."""

    def __init__(self, entries: AsyncGenerator[Entry, None]) -> None:
        self._entries = entries
        self._next: asyncio.Task[Entry] | None = None

    async def next(self, wait_s: float) -> Entry | None:
        """The next entry, None when there is none in time; raises what the store raises."""
        if self._next is None:
            self._next = asyncio.create_task(_following(self._entries))
        done, _ = await asyncio.wait({self._next}, timeout=wait_s)
        if not done:
            return None
        asked, self._next = self._next, None
        return asked.result()

    async def close(self) -> None:
        """The tail ends, wherever it waits."""
        await cancel(cast("asyncio.Task[object] | None", self._next))
        self._next = None
        await self._entries.aclose()


async def _following(entries: AsyncGenerator[Entry, None]) -> Entry:
    try:
        return await anext(entries)
    except StopAsyncIteration:  # may not leave a task
        raise StoreDown("change stream", "it was closed") from None


class Reader:
    """Where one consumer is. Nothing is queued for it; `close` gives everything back."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._all, self._ring = broadcast, broadcast.ring
        self._place = Place(0, NOWHERE, True)
        self._life = 0
        self._own: OwnTail | None = None
        self._first = b""  # read before the answer began
        self.began = NOWHERE  # the cursor it goes on from
        self._told_at: float | None = None  # wall clock of the last entry of the own tail

    async def begin(self, after: Cursor | None) -> None:
        """Find the place; raises CursorGone, StoreDown or TooMany."""
        await self._all.followed()
        self._ring = self._all.ring
        cursor = await self._all.now() if after is None else after
        self._place.at = self.began = cursor
        if not await self._settle(self._all.settings.changes_wait_s):
            await self._fall_behind()
            self._first = await self._catch_up(_FIRST_S, _FIRST_S)

    async def take(self, wait_s: float) -> bytes:
        """Next events, joined; b"" when there are none in time. Raises as `begin` does."""
        if first := self._first:
            self._first = b""
            return first
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while not self._all.closed:
            left = end - loop.time()
            if left <= 0:
                return b""
            found = await (self._catch_up(left) if self._own else self._walk(left))
            if found:
                return found
        raise StoreDown("change stream", "it was closed")

    async def close(self) -> None:
        """The own tail ends, and its place is free."""
        own, self._own = self._own, None
        if own is not None:
            try:
                await own.close()
            finally:
                self._all.behind.release()

    def waiting_since(self) -> float | None:
        """Wall clock of the oldest change this reader has not taken; None where it has all."""
        if self._own is not None:
            return self._told_at
        at = max(self._place.number, self._ring.first)
        behind = self._life == self._ring.life and at < self._ring.end
        return self._ring[at].at if behind else None

    async def _walk(self, wait_s: float) -> bytes:
        """From the ring, as much as one write takes."""
        ring, place, parts, size = self._ring, self._place, list[bytes](), 0
        if self._life != ring.life:
            raise CursorGone(place.at, ring.why)
        if place.number < ring.first:
            await self._fall_behind()
            return b""
        if place.number == ring.end:
            await self._all.news(wait_s)
            return b""
        while place.number < ring.end and size < _MOST_BYTES:
            event = ring.take(place)
            size += len(event)
            parts.append(event)
            self._all.metrics.sent.inc()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _fall_behind(self) -> None:
        """On from the same cursor with a tail of its own, once there is a place for one."""
        await self._all.may_be_behind()
        self._own, self._told_at = OwnTail(self._all.store.tail(self._place.at)), None

    async def _catch_up(self, wait_s: float, look_s: float = _LOOK_S) -> bytes:
        """From the store; into the ring as soon as it holds what comes next."""
        assert self._own is not None, "only a reader that is behind catches up"
        entry = await self._own.next(min(wait_s, look_s))
        found = b""
        if entry is not None:
            self._place.at, self._told_at = entry.cursor, entry.at
            self._all.metrics.sent.inc()
            found = encoded(entry)
        if await self._settle(0.0):
            await self.close()
        return found

    async def _settle(self, wait_s: float) -> bool:
        """Whether the ring holds what follows our cursor; waits where it has not come so far."""
        loop = asyncio.get_running_loop()
        end = loop.time() + wait_s
        while self._ring.life:
            try:
                place, ahead = self._ring.place(self._place.at), self._ring.ahead(self._place.at)
            except ValueError:  # marks of another number of shards; the store says it in words
                return False
            if place is not None:
                self._place, self._life = place, self._ring.life
                return True
            left = end - loop.time()
            if not ahead or left <= 0:
                return False
            await self._all.news(left)
        return False

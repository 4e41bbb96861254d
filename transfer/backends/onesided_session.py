"""onesided_session: one life of a transfer library, and the next one when it must be fenced.

Edge. The libraries cannot forbid one landing alone: a peer that was stopped writes when it wakes.
What they can do is end: an engine that was destroyed applies nothing any more. So an unclean
landing retires its whole session. Open it to change when a session is replaced or destroyed.

    session 1: landing A is unclean -> retired ... landings B, C end -> destroyed -> A is fenced
    session 2:                         new landings are offered this one
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from ..errors import Stalled
from ..regions import Regions
from ..settings import TransferSettings
from .base import Offer
from .onesided_plan import VERSION, Move, Reach, Span, encode, merged, spans_of
from .onesided_slots import Slots
from .onesided_work import Stop

log = logging.getLogger(__name__)
MOST_RETIRED = 4  # sessions that wait for their last landing; each has threads and memory


class Engine(Protocol):
    """A library in this process. Every call blocks, and is made in a worker thread."""

    session: str  # what a peer calls it
    port: int  # 0 where the library tells it in `library`
    library: bytes

    @property
    def worn(self) -> bool:
        """It holds too much that only its end gives back."""

    def open(self, advertise: str, spans: Sequence[Span]) -> None:
        """Begin, with this memory registered. Raises NotAvailable."""

    def reach(self, reach: Reach, peer: str) -> str:
        """Make a peer's engine known; what `write` calls it. Raises TransferError."""

    def write(self, where: str, moves: Sequence[Move], peer: str, stop: Stop) -> None:
        """Return when all is applied at the peer. Raises TransferError."""

    def leave(self, where: str, gone: bool) -> None:
        """One `reach` less; `gone`: the peer did not answer, forget what is known of it."""

    def close(self) -> None:
        """No byte of a peer is applied after this returned."""


MakeEngine = Callable[[str], Engine]  # told the address that peers are told


class Session:
    """An engine, its slots and who uses it: landings and peers."""

    def __init__(
        self, engine: Engine, regions: Regions, advertise: str, backend: str, slot_bytes: int
    ) -> None:
        self.engine, self.slots = engine, Slots(slot_bytes)
        self.life = secrets.randbelow(2**63)
        self.retired = False
        self.closed = asyncio.Event()
        self.users: set[object] = set()
        self._regions, self._advertise, self._backend = regions, advertise, backend
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Register; afterwards `offer` is there. Raises NotAvailable."""
        spans = spans_of(self._regions)
        registered = merged([*spans, self.slots.span])
        await asyncio.to_thread(self.engine.open, self._advertise, registered)
        self.reach = Reach(self.engine.session, self.life, spans, self.engine.library)
        self.offer = Offer(
            self._backend, VERSION, self._advertise, self.engine.port,
            self._regions.items, self._regions.names, encode(self.reach),
        )  # fmt: skip

    def leave(self, user: object) -> None:
        """It does not use this session any more; a retired one ends with its last user."""
        self.users.discard(user)
        if self.retired and not self.users:
            self.close()

    def retire(self) -> None:
        """Nothing new comes here."""
        self.retired = True
        if not self.users:
            self.close()

    def close(self) -> asyncio.Task[None]:
        """Destroy the engine, in a thread; `closed` is set when nothing lands any more."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        await asyncio.to_thread(self.engine.close)
        self.closed.set()


class Sessions:
    """The one that takes new landings, and those that wait to be destroyed."""

    def __init__(self, make: MakeEngine, backend: str, settings: TransferSettings) -> None:
        self._make, self._backend, self._settings = make, backend, settings
        self._retired: list[Session] = []
        self._lock = asyncio.Lock()
        self.rotations = 0
        self._stopped = False

    async def start(self, advertise: str, regions: Regions) -> None:
        """The first one. Raises NotAvailable."""
        self._advertise, self._regions = advertise, regions
        self.current = await self._new()

    async def _new(self) -> Session:
        engine = await asyncio.to_thread(
            self._make, self._advertise
        )  # the first one loads the library
        session = Session(
            engine, self._regions, self._advertise, self._backend, self._settings.slot_bytes
        )
        await session.open()
        return session

    async def rotate(self, session: Session, peer: str) -> None:
        """`session` takes nothing new any more; another one is offered. Raises Stalled."""
        async with self._lock:
            if session is not self.current or self._stopped:
                return
            self._retired = [each for each in self._retired if not each.closed.is_set()]
            if len(self._retired) >= MOST_RETIRED:
                raise Stalled(peer, f"{MOST_RETIRED} sessions wait for their last landing")
            self.current = await self._new()
            self._retired.append(session)
            self.rotations += 1
            log.warning("session replaced peer=%s engine=%s", peer, session.engine.session)
            session.retire()

    async def stop(self) -> None:
        """Destroy all; bounded."""
        self._stopped = True
        sessions = [*self._retired, self.current] if hasattr(self, "current") else []
        closing = [session.close() for session in sessions]
        if closing:
            await asyncio.wait(closing, timeout=self._settings.fence_s)
        self._retired.clear()

    def __len__(self) -> int:
        return sum(not session.closed.is_set() for session in self._retired)

"""Offer, the prefill side: who wants which room, and what each room is told.

Edge. The engine calls deliver() when a prompt's KV is complete; decodes dial the rank port and
bind. Whoever comes first waits for the other. delivery.py moves the pages once both are there,
meeting.py keeps one room. Open it to change who is let in.

    decode binds first:   bind -> bound ...... deliver() -> pages, record, commit -> verdict
    prefill is first:     deliver() ...... bind -> bound -> pages, record, commit -> verdict
    late or second bind:  bind -> refused, with why this room is over or taken
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvplane.runtime import Clock, cancel
from kvplane.vocabulary import Generation, Room, Stage, StageRecord

from .backends.base import Backend
from .control import Channel
from .delivery import Delivery
from .errors import PeerGone, PrefillFailed, Refused, TransferError
from .frames import MOST_BIND, MOST_REASON, BadFrame, BindFrame, BoundFrame, RefusedFrame
from .meeting import Ended, Meeting, given_up
from .metadata import Layout, Metadata
from .metrics import TransferMetrics
from .settings import TransferSettings
from .tamper import UNTOUCHED, Tamper
from .terms import Terms
from .waiting import Steps, unless

log = logging.getLogger(__name__)


class Offers:
    """One per prefill rank: its control port and all rooms it owes."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        generation: Generation,
        record: Callable[[StageRecord], None],
        clock: Clock,
        settings: TransferSettings,
        metrics: TransferMetrics,
        tamper: Tamper = UNTOUCHED,
        by: str = "",  # goes into every StageRecord
    ) -> None:
        self._backend, self._layout, self._generation = backend, layout, generation
        self._record, self._clock, self._by = record, clock, by
        self._settings, self._metrics, self._tamper = settings, metrics, tamper
        self._meetings: dict[Room, Meeting] = {}
        self._ended = Ended(settings.most_ended, settings.ended_s)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._delivery = Delivery(backend, generation, tamper, settings)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen for decodes; returns the rank port to register."""
        self._terms = Terms(self._backend.offer(), self._layout, self._generation, self._settings)
        self._server = await asyncio.start_server(self._serve, host, port, backlog=256)
        return int(self._server.sockets[0].getsockname()[1])

    async def deliver(
        self, room: Room, pages: Sequence[int], metadata: Metadata, deadline_s: float
    ) -> None:
        """Wait until a decode bound this room, send, and return on its good verdict.

        `pages` are ours, in prompt order, those a decode says it holds already included (they are
        skipped). room, generation, pages, page_sums, attempt of `metadata` are filled in here.
        Raises TransferError; the pages are not read any more when this returns or raises.
        """
        try:
            self._backend.regions.check(pages)
        except TransferError as mistake:
            self.fail(room, str(mistake))
            raise
        over = self._ended.find(room, self._clock.now())
        if over is not None:
            raise over
        meeting = self._meetings.get(room) or self._open(room)
        if meeting.claimed:
            raise Refused(f"room {room}", "is being delivered already", Stage.VERIFY)
        meeting.claim()
        steps = Steps(room, deadline_s, self._record, self._clock, self._by)
        error: BaseException | None = None
        try:
            await unless(self._deliver(meeting, pages, metadata, steps), meeting.lost)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._close(meeting, error)

    async def _deliver(
        self, meeting: Meeting, pages: Sequence[int], metadata: Metadata, steps: Steps
    ) -> None:
        bootstrapping_s = self._settings.bootstrapping_s
        connect, verify = Stage.CONNECT, Stage.VERIFY
        async with steps.stage(connect, meeting.peer, "its bind", bootstrapping_s) as step:
            bind = await asyncio.shield(meeting.bound)
            step.peer = meeting.peer
        timed = self._metrics.seconds.labels("prefill").time()
        async with steps.stage(verify, meeting.peer, "the transfer") as step:
            with timed:
                await self._delivery.run(meeting, bind, pages, metadata, step, steps.left_s)

    def fail(self, room: Room, reason: str) -> None:
        """Tell the decode of this room, waiting or late, that it will never come."""
        error = given_up(room, reason)
        meeting = self._meetings.get(room)
        if meeting is None:
            self._ended.add(room, error, self._clock.now())
        elif meeting.claimed:
            meeting.lose(error)  # deliver() ends it
        else:
            self._close(meeting, error)

    async def close(self) -> None:
        """End every room, close every socket. Does not stop the backend."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for meeting in list(self._meetings.values()):
            self.fail(meeting.room, "the prefill stops")
        await cancel(*self._connections)
        if server is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await server.wait_closed()

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        return {"rooms": len(self._meetings), "connections": len(self._connections)}

    def _open(self, room: Room) -> Meeting:
        meeting = self._meetings[room] = Meeting(room)
        self._metrics.rooms.labels("prefill").inc()
        return meeting

    def _close(self, meeting: Meeting, error: BaseException | None) -> None:
        """The only way out of the table; once per room."""
        if self._meetings.pop(meeting.room, None) is None:
            return
        self._metrics.rooms.labels("prefill").dec()
        known = error if isinstance(error, TransferError) else None
        if error is not None:
            kind = known.kind if known else "other"
            self._metrics.failures.labels("prefill", kind).inc()
            known = known or given_up(meeting.room, str(error) or "the request was cancelled")
        meeting.lose(known or Refused(meeting.peer, "the room is over"))
        self._ended.add(meeting.room, known, self._clock.now())
        meeting.end(known)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > self._settings.most_connections:
                self._metrics.refused.labels("control", "too many").inc()
                return
            bind = await self._hello(channel)
            meeting = await self._admit(channel, bind) if bind is not None else None
            if meeting is not None:
                await meeting.listen(channel, self._settings.bootstrapping_s)
                if not meeting.claimed:
                    self._close(meeting, meeting.lost.exception())
        except asyncio.CancelledError:
            channel.reset()
            raise
        finally:
            self._connections.discard(task)
            channel.close()

    async def _hello(self, channel: Channel) -> BindFrame | None:
        """The first frame, if it is a bind."""
        why = "garbage"
        try:
            async with asyncio.timeout(self._settings.hello_s):
                frame = await channel.read(MOST_BIND)
            if isinstance(frame, BindFrame):
                return frame
        except TimeoutError:
            why = "silent"
        except (BadFrame, PeerGone):
            pass
        self._metrics.refused.labels("control", why).inc()
        channel.reset()
        return None

    async def _admit(self, channel: Channel, bind: BindFrame) -> Meeting | None:
        """Bound, or told why not."""
        room = Room(bind.room)
        no = self._terms.refusal(bind, channel.host) or self._refusal(room)
        if no is None:
            try:
                async with asyncio.timeout(self._settings.bootstrapping_s):
                    await self._tamper.before(Stage.CONNECT, room)
            except ConnectionResetError:
                channel.reset()
                return None
            except Exception as error:
                no = RefusedFrame(kind="refused", reason=repr(error)[:MOST_REASON])
        no = no or self._refusal(room)  # time passed
        if no is not None:
            self._metrics.refused.labels("control", no.kind).inc()
            log.warning("bind refused room=%d peer=%s why=%r", room, channel.peer, no.reason)
            channel.finish(no)
            return None
        meeting = self._meetings.get(room) or self._open(room)
        channel.post(BoundFrame(generation=self._generation))
        meeting.bind(channel, bind)
        return meeting

    def _refusal(self, room: Room) -> RefusedFrame | None:
        """Why nobody may bind this room now."""
        over = self._ended.find(room, self._clock.now())
        if over is not None:
            kind = "refused" if isinstance(over, Refused) else PrefillFailed.kind
            reason = over.reason if isinstance(over, Refused | PrefillFailed) else str(over)
            return RefusedFrame(kind=kind, reason=reason[:MOST_REASON])
        meeting = self._meetings.get(room)
        if meeting is not None and meeting.bound.done():
            return RefusedFrame(kind="refused", reason=f"room {room} is bound already")
        if meeting is None and len(self._meetings) >= self._settings.most_waiting:
            return RefusedFrame(kind="refused", reason=f"{len(self._meetings)} rooms wait already")
        return None

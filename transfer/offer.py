"""Offer, the prefill side: who wants which room, and what each room is told.

Edge. The engine calls deliver() when a prompt's KV is complete; decode ranks dial the rank port and
bind. Whoever comes first waits for the others. delivery.py moves the pages once all are there,
gathering.py keeps one room, meeting.py one decode rank in it. Open it to change who is let in.

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
from .errors import LeaseExpired, PeerGone, PrefillFailed, Refused, TransferError
from .frames import (
    MOST_REASON,
    BadFrame,
    BindFrame,
    BoundFrame,
    HoldFrame,
    OtherProtocol,
    RefusedFrame,
)
from .gathering import Ended, Gathering, given_up
from .hearing import Hearing
from .meeting import Meeting
from .metadata import Layout, Metadata
from .metrics import TransferMetrics
from .settings import TransferSettings
from .tamper import UNTOUCHED, Tamper
from .terms import Terms
from .waiting import Steps, all_of, unless

log = logging.getLogger(__name__)

MOST_UNREAD = 16 * 1024  # bytes of a connection that nobody has asked for yet


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
        self._rooms: dict[Room, Gathering] = {}
        self._pages = self._bytes = 0  # of all rooms that are bound; bytes of what is no page
        self._hearing = Hearing(settings)
        self._ended = Ended(settings.most_ended, settings.ended_s)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._delivery = Delivery(backend, generation, tamper, settings)

    async def start(self, host: str, port: int = 0) -> int:
        """Listen for decodes; returns the rank port to register."""
        self._terms = Terms(self._backend.offer(), self._layout, self._generation, self._settings)
        self._server = await asyncio.start_server(
            self._serve, host, port, backlog=256, limit=MOST_UNREAD
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def deliver(
        self, room: Room, pages: Sequence[int], metadata: Metadata, deadline_s: float
    ) -> None:
        """Wait until all decode ranks bound this room, send, and return on their good verdicts.

        The wait for them is bounded by the lease (`bootstrapping_s`, renewed by those who queue);
        `deadline_s` counts from the last bind.
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
        gathering = self._rooms.get(room) or self._open(room)
        if gathering.claimed:
            raise Refused(f"room {room}", "is being delivered already", Stage.VERIFY)
        gathering.claim()
        steps = Steps(room, deadline_s, self._record, self._clock, self._by)
        error: BaseException | None = None
        try:
            await self._deliver(gathering, pages, metadata, steps)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._close(gathering, error)

    async def _deliver(
        self, gathering: Gathering, pages: Sequence[int], metadata: Metadata, steps: Steps
    ) -> None:
        settings, peer = self._settings, gathering.peer
        most_s = settings.most_hold_s
        async with steps.stage(Stage.CONNECT, peer, "its bind", most_s, counts=False) as step:
            await unless(gathering.full(settings.bootstrapping_s), gathering.lost)
            step.peer = gathering.peer
        timed = self._metrics.seconds.labels("prefill").time()
        async with steps.stage(Stage.VERIFY, gathering.peer, "the transfer") as step:
            with timed:
                work = (
                    self._delivery.run(
                        meeting, pages, metadata, step.part(meeting.peer), steps.left_s
                    )
                    for meeting in gathering.meetings.values()
                )
                await unless(all_of(*work), gathering.lost)

    def fail(self, room: Room, reason: str) -> None:
        """Tell the decode of this room, waiting or late, that it will never come."""
        error = given_up(room, reason)
        gathering = self._rooms.get(room)
        if gathering is None:
            self._ended.add(room, error, self._clock.now())
        elif gathering.claimed:
            gathering.lose(error)  # deliver() ends it
        else:
            self._close(gathering, error)

    async def close(self) -> None:
        """End every room, close every socket. Does not stop the backend."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for room in list(self._rooms):
            self.fail(room, "the prefill stops")
        await cancel(*self._connections)
        if server is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await server.wait_closed()

    def counts(self) -> dict[str, int]:
        """What is held now; all 0 when idle."""
        return {"rooms": len(self._rooms), "connections": len(self._connections)}

    def _open(self, room: Room) -> Gathering:
        gathering = self._rooms[room] = Gathering(room)
        self._metrics.rooms.labels("prefill").inc()
        return gathering

    def _close(self, gathering: Gathering, error: BaseException | None) -> None:
        """The only way out of the table; once per room."""
        if self._rooms.pop(gathering.room, None) is None:
            return
        self._pages -= gathering.pages
        self._bytes -= gathering.other_bytes
        self._metrics.rooms.labels("prefill").dec()
        known = error if isinstance(error, TransferError) else None
        if error is not None:
            kind = known.kind if known else "other"
            self._metrics.failures.labels("prefill", kind).inc()
            known = known or given_up(gathering.room, str(error) or "the request was cancelled")
        gathering.lose(known or Refused(gathering.peer, "the room is over"))
        self._ended.add(gathering.room, known, self._clock.now())
        gathering.end(known)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if len(self._connections) > self._settings.most_connections:
                self._metrics.refused.labels("control", "too many").inc()
                return
            first = await self._hello(channel)
            while isinstance(first, HoldFrame):
                first = await self._renewed(channel, first)
            if first is not None:
                await self._bound(channel, first)
        except asyncio.CancelledError:
            channel.reset()
            raise
        finally:
            self._connections.discard(task)
            channel.close()

    async def _bound(self, channel: Channel, bind: BindFrame) -> None:
        """From its bind to its end."""
        meeting = await self._admit(channel, bind)
        if meeting is None:
            return
        await meeting.listen(self._settings.bootstrapping_s)
        gathering = self._rooms.get(Room(bind.room))
        if gathering is not None and not gathering.claimed and gathering.lost.done():
            self._close(gathering, gathering.lost.exception())
        await meeting.ended.wait()  # deliver() says last whether something is still under way

    async def _hello(self, channel: Channel) -> BindFrame | HoldFrame | None:
        """The first frame, if a decode may begin with it."""
        why = "garbage"
        try:
            frame = await self._hearing.frame(channel, self._settings.hello_s)
            if isinstance(frame, BindFrame | HoldFrame):
                return frame
        except TimeoutError:
            why = "silent"
        except OtherProtocol as error:
            why = "protocol"
            channel.post(RefusedFrame(kind="refused", reason=str(error)))
            with suppress(TransferError):
                await channel.drain()
        except (BadFrame, PeerGone):
            pass
        self._metrics.refused.labels("control", why).inc()
        channel.finish() if why == "protocol" else channel.reset()
        return None

    async def _renewed(self, channel: Channel, hold: HoldFrame) -> BindFrame | HoldFrame | None:
        """Keep the room a lease longer; the next frame. A decode that leaves says nothing."""
        gathering = self._rooms.get(Room(hold.room))
        if gathering is not None:
            gathering.renew()
        over = self._ended.find(Room(hold.room), self._clock.now())
        if over is not None:
            return None
        try:
            frame = await self._hearing.frame(channel, self._settings.bootstrapping_s)
        except (TimeoutError, BadFrame, PeerGone):
            return None
        return frame if isinstance(frame, BindFrame | HoldFrame) else None

    async def _admit(self, channel: Channel, bind: BindFrame) -> Meeting | None:
        """Bound, or told why not."""
        room = Room(bind.room)
        no = self._terms.refusal(bind, channel.host) or self._refusal(bind)
        if no is None:
            try:
                async with asyncio.timeout(self._settings.bootstrapping_s):
                    await self._tamper.before(Stage.CONNECT, room)
            except ConnectionResetError:
                channel.reset()
                return None
            except Exception as error:
                no = RefusedFrame(kind="refused", reason=repr(error)[:MOST_REASON])
        no = no or self._refusal(bind)  # time passed
        if no is not None:
            self._metrics.refused.labels("control", no.kind).inc()
            log.warning("bind refused room=%d peer=%s why=%r", room, channel.peer, no.reason)
            channel.finish(no)
            return None
        gathering = self._rooms.get(room) or self._open(room)
        channel.post(BoundFrame(generation=self._generation))
        self._pages += len(bind.pages)
        self._bytes += bind.other_bytes
        return gathering.bind(channel, bind)

    def _refusal(self, bind: BindFrame) -> RefusedFrame | None:
        """Why nobody may bind this room now."""
        room = Room(bind.room)
        over = self._ended.find(room, self._clock.now())
        if over is not None:
            return _told(over)
        gathering = self._rooms.get(room)
        fault = None if gathering is None else gathering.fault(bind)
        if gathering is None and len(self._rooms) >= self._settings.most_waiting:
            fault = f"{len(self._rooms)} rooms wait already"
        elif self._pages + len(bind.pages) > self._settings.most_bound_pages:
            fault = f"{self._pages} pages of {len(self._rooms)} rooms wait already"
        elif self._bytes + bind.other_bytes > self._settings.most_bound_bytes:
            fault = f"{self._bytes} bytes of {len(self._rooms)} rooms wait already"
        return None if fault is None else RefusedFrame(kind="refused", reason=fault)


def _told(over: TransferError) -> RefusedFrame:
    """Why the room is over, to a decode that comes late."""
    kind = over.kind if isinstance(over, Refused | LeaseExpired) else PrefillFailed.kind
    reason = over.reason if isinstance(over, Refused | PrefillFailed) else str(over)
    return RefusedFrame(kind=kind, reason=reason[:MOST_REASON])

"""Subscriber: follow what one worker says, and never believe more than it said.

Edge: one loop over the live socket of live.py. What is missing or doubtful is repair.py's, the
store is behind writer.py, what others are told behind telling.py. Started by subscriptions.py. Open
it to change what is done about a connection, or how batches are gathered.

    connected -> catch up by replay -> live batches, gathered for a moment -> written as one
    lost, or silent for long        -> catch up again
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import zmq.asyncio

from kvplane.index import Store
from kvplane.runtime import Clock, backoff, cancel, supervise
from kvplane.vocabulary import Epoch, Knowledge, Worker

from . import frames
from .errors import BadFrames, Mistaken, Resync
from .frames import Frame
from .live import Live
from .metrics import EventsMetrics
from .patience import Outage
from .places import Place
from .pulse import Pulse
from .repair import Repair
from .replay import Replays
from .settings import EventsSettings
from .silence import Silence
from .states import Signal, State, Stream
from .telling import Telling
from .writer import Writer

log = logging.getLogger(__name__)
SAMPLES = 8  # reasons kept of one stream; more are only counted


class Subscriber:
    """One (pod, dp rank). `start` returns at once; `stop` is bounded and never raises."""

    def __init__(
        self,
        worker: Worker,
        place: Place,
        store: Store,
        clock: Clock,
        metrics: EventsMetrics,
        settings: EventsSettings | None = None,
        context: zmq.asyncio.Context | None = None,
        ingest: str = "",
        turns: asyncio.Semaphore | None = None,
        outage: Outage | None = None,
        pulse: Pulse | None = None,
    ) -> None:
        self.worker, self.place = worker, place
        self._settings = settings or EventsSettings()
        self._clock, self._metrics = clock, metrics
        several = worker.dp_rank if place.ranks > 1 else None
        self._stream = Stream(place.events, place.replay, several)
        self._telling = Telling(worker, self._stream, store, clock, metrics, ingest)
        self._context, self._shared = context or zmq.asyncio.Context(), context is not None
        found = (self._settings, clock, metrics)
        self._replays = Replays(self._context, place.replay, *found, turns)
        self._writer = Writer(
            worker, place.dialect, store, place.model, clock, metrics, self._settings,
            self._telling, place.ranks, outage,
        )  # fmt: skip
        self._repair = Repair(
            worker, place, self._writer, self._replays, self._telling, metrics, self._settings
        )
        self._task: asyncio.Task[None] | None = None
        self._checked = self._judged = 0  # connections behind which replay was asked
        self._looked = 0.0  # monotonic seconds of the last look at the store
        self._silence = Silence(self._settings)
        self._pulse = pulse or Pulse(self._settings.linger_s)
        self._samples: set[str] = set()  # why messages were no batches, each logged once
        self.last_event: float | None = None  # monotonic seconds

    @property
    def endpoint(self) -> str:
        """Where it is heard."""
        return self.place.events

    @property
    def epoch(self) -> Epoch:
        """The life that is followed; 0 before the store was read."""
        return self._writer.epoch

    @property
    def sequence(self) -> int | None:
        """Last batch taken."""
        return self._writer.last

    @property
    def state(self) -> Knowledge | None:
        """What was last told about how far we may be believed."""
        return self._telling.told

    @property
    def stream(self) -> tuple[State, str]:
        """How far the stream is, and why in words."""
        return self._stream.state, self._stream.reason

    async def start(self) -> None:
        """Follow in the background."""
        name = f"events of {self.worker}"
        self._task = asyncio.create_task(supervise(name, self._run, self._clock), name=name)

    async def stop(self) -> None:
        """End the loop and give the sockets back."""
        await cancel(self._task)
        self._telling.end()
        if not self._shared:
            self._context.destroy(linger=0)

    def distrust(self, reason: str) -> None:
        """The store lost something of somebody: begin anew, soon."""
        self._writer.distrust(reason)

    async def sleeps(self, asleep: bool) -> None:
        """The engine dropped its cache to sleep, and its stream will say so only when it wakes."""
        if asleep and not self._stream.asleep:
            self._stream.asleep = True
            await self._telling.say(Signal.ASLEEP)

    # -- the walk --------------------------------------------------------------------------------

    async def _run(self) -> None:
        topic = self.place.topic or self._settings.topic
        live = Live(self._context, self.place.events, self._settings, topic, self._pulse)
        waits = backoff(self._settings.store_retry_s, most_s=self._settings.store_retry_most_s)
        self._checked = self._judged = 0
        try:
            live.open()
            while True:
                try:
                    await self._writer.load()
                    await self._follow(live)
                except Resync as fault:
                    self._metrics.resyncs.labels(fault.reason).inc()
                    await self._clock.sleep(next(waits))
        except Exception as fault:  # nobody may go on believing what is not followed
            self._writer.distrust("failed")
            await self._telling.say(Signal.FAILED, f"{type(fault).__name__}: {fault}"[:200])
            raise
        finally:
            await live.close()

    async def _follow(self, live: Live) -> None:
        self._checked = 0
        while True:
            if not live.up:
                await self._wait_for(live)
            await self._meet(live)
            heard = await self._gather(live)
            await self._look_round(live, heard)

    async def _gather(self, live: Live) -> bool:
        """What came until a beat goes to the store as one; false: nothing came for long."""
        messages = await live.receive(self._silence.look_s)
        if not messages:
            return False
        await self._meet(live)  # first whose batches these are
        await self._hear(messages, live.fresh)
        await self._writer.flush()
        await self._repair.settle()
        return True

    async def _meet(self, live: Live) -> None:
        """Behind a new connection there may be a new life: ask before anything is believed."""
        if live.connections == self._checked:
            return
        await self._writer.flush()
        self._checked = live.connections
        self._silence.begin(self._clock.now())
        if self._replays.endpoint is not None:
            await self._telling.say(Signal.CONNECTED)
        await self._repair.catch_up(fresh=self._checked != self._judged)
        self._judged = self._checked

    async def _look_round(self, live: Live, heard: bool) -> None:
        """In silence ask for what may be lost: of the engine now and then, of the store often."""
        now = self._clock.now()
        if heard:
            self._silence.broken(now)
        if not heard or now - self._looked >= self._settings.store_check_s:
            self._looked = now
            await self._writer.check()
        if live.up and (self._replays.due or self._silence.due(self._clock.now())):
            await self._repair.catch_up()

    async def _wait_for(self, live: Live) -> None:
        """Until the publisher is there; dark meanwhile, and in doubt from the first moment."""
        await self._telling.say(Signal.LOST)
        while not await live.connected(self._settings.connect_s):
            await self._telling.say(Signal.FOREIGN if live.foreign else Signal.NO_STREAM)
            await self._writer.check()
            if live.foreign:
                await live.reopen()

    async def _hear(self, messages: Sequence[Sequence[bytes]], fresh: bool) -> None:
        """Live messages, oldest first; not `fresh`: perhaps of a connection before this one."""
        for message in messages:
            try:
                frame = frames.live(message)
            except BadFrames as error:
                self._metrics.malformed.inc()
                if len(self._samples) < SAMPLES and error.reason not in self._samples:
                    self._samples.add(error.reason)
                    log.warning("malformed message worker=%s %s", self.worker, error)
                continue
            self.last_event = self._clock.now()
            await self._one(frame, fresh)

    async def _one(self, frame: Frame, fresh: bool) -> None:
        try:
            await self._repair.live(frame, fresh)
        except Mistaken as error:
            await self._repair.refuse(error)
        else:
            self._stream.mistaken, self._stream.asleep = "", False

"""Subscriber: follow what one worker says, and never believe more than it said.

Edge: a loop that acts on the verdicts of sequence.py; sockets are in live.py and replay.py, the
store behind writer.py. Started by subscriptions.py. Open it to change what is done about a gap, a
restart or silence.

    connected -> catch up by replay -> live batches, in order
       gap       replay asked once from the first missing; still open: clear, partial
       suspect   replay asked from our last batch: equal = late or again, else a new life
       silence, a new connection     the same question, so lost tails and restarts show
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
from .dialects.base import Dialect
from .errors import BadFrames, Resync
from .frames import Frame
from .knowledge import believed, unreachable
from .live import Live
from .metrics import EventsMetrics
from .replay import Replays
from .sequence import Gap, Life, Seen, judge, same_life
from .settings import EventsSettings
from .silence import Silence
from .writer import Writer

log = logging.getLogger(__name__)


class Subscriber:
    """One (pod, dp rank). `start` returns at once; `stop` is bounded and never raises."""

    def __init__(
        self,
        worker: Worker,
        endpoint: str,
        replay_endpoint: str | None,
        dialect: Dialect,
        store: Store,
        model: str,
        clock: Clock,
        metrics: EventsMetrics,
        settings: EventsSettings | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.worker, self.endpoint = worker, endpoint
        self._settings = settings or EventsSettings()
        self._clock, self._metrics = clock, metrics
        self._writer = Writer(worker, dialect, store, model, clock, metrics, self._settings)
        self._context, self._shared = context or zmq.asyncio.Context(), context is not None
        self._replays = Replays(self._context, replay_endpoint, self._settings, clock, metrics)
        self._task: asyncio.Task[None] | None = None
        self._checked = self._judged = 0  # connections behind which replay was asked
        self._silence = Silence(self._settings)
        self.last_event: float | None = None  # monotonic seconds

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
        return self._writer.state

    async def start(self) -> None:
        """Follow in the background."""
        name = f"events of {self.worker}"
        self._task = asyncio.create_task(supervise(name, self._run, self._clock), name=name)

    async def stop(self) -> None:
        """End the loop and give the sockets back."""
        await cancel(self._task)
        self._writer.count_state(None)
        if not self._shared:
            self._context.destroy(linger=0)

    # -- the walk --------------------------------------------------------------------------------

    async def _run(self) -> None:
        live = Live(self._context, self.endpoint, self._settings)
        waits = backoff(self._settings.store_retry_s, most_s=self._settings.store_retry_most_s)
        live.open()
        self._checked = self._judged = 0
        try:
            while True:
                try:
                    await self._writer.load()
                    await self._follow(live)
                except Resync as fault:
                    self._metrics.resyncs.labels(fault.reason).inc()
                    await self._clock.sleep(next(waits))
        finally:
            await live.close()

    async def _follow(self, live: Live) -> None:
        self._checked = 0
        while True:
            if not live.up:
                await self._wait_for(live)
            await self._meet(live)
            messages = await live.receive(self._silence.look_s)
            await self._meet(live)  # first whose batches these are
            await self._hear(messages)
            await self._look_round(live, bool(messages))

    async def _meet(self, live: Live) -> None:
        """Behind a new connection there may be a new life: ask before anything is believed."""
        if live.connections != self._checked:
            self._checked = live.connections
            self._silence.begin(self._clock.now())
            await self._catch_up(fresh=self._checked != self._judged)
            self._judged = self._checked

    async def _look_round(self, live: Live, heard: bool) -> None:
        """In silence ask for what may be lost: of the engine now and then, of the store often."""
        if heard:
            self._silence.broken(self._clock.now())
        else:
            await self._writer.check()
        owed = self._replays.due(self._settings.idle_check_s)
        if live.up and (owed or self._silence.due(self._clock.now())):
            await self._catch_up()

    async def _wait_for(self, live: Live) -> None:
        """Until the publisher is there; dark meanwhile, and in doubt from the first moment."""
        if self._writer.state is Knowledge.EXACT:
            await self._writer.know(Knowledge.PARTIAL, f"connection to {self.endpoint} is lost")
        while not await live.connected(self._settings.connect_s):
            await self._writer.know(*unreachable(self.endpoint, live.foreign))
            if live.foreign:
                await live.reopen()

    async def _hear(self, messages: Sequence[Sequence[bytes]]) -> None:
        """Live messages, oldest first, then what they mean for our knowledge."""
        for message in messages:
            try:
                frame = frames.live(message)
            except BadFrames as error:
                self._metrics.malformed.inc()
                log.warning("malformed message worker=%s %s", self.worker, error)
                continue
            self.last_event = self._clock.now()
            await self._one(frame)
        if messages:
            await self._writer.flush()
            await self._tell()

    async def _one(self, frame: Frame) -> None:
        writer = self._writer
        verdict = judge(writer.last, frame.sequence)
        if verdict in (Seen.REPEAT, Seen.SUSPECT):
            if await self._is_old(frame):
                self._metrics.repeats.inc()
                return
            await self._writer.begin_life()
            await self._rebuild()
            verdict = judge(writer.last, frame.sequence)
        if isinstance(verdict, Gap):
            if not await self._close(verdict, frame):
                self._metrics.repeats.inc()
                return
            verdict = judge(writer.last, frame.sequence)
            if isinstance(verdict, Gap):
                self._give_up(verdict, frame)
                verdict = Seen.IN_ORDER
        if verdict is Seen.IN_ORDER:
            await writer.take(frame)

    async def _is_old(self, frame: Frame) -> bool:
        """A batch from the past: late or sent again (true), or the first sign of a new life?

        Without replay to ask, an unknown batch from the past is taken for a new life: in doubt we
        clear.
        """
        if self._writer.digest(frame.sequence) == frame.digest:
            return True
        await self._writer.flush()
        life, rest = await self._life()
        if life is Life.SAME:
            await self._take(rest)
        return life is Life.SAME

    # -- repairing -------------------------------------------------------------------------------

    async def _catch_up(self, fresh: bool = False) -> None:
        """Same life? Then what we lack of it, by replay.

        Behind a `fresh` connection a life that nobody vouches for is a new one: in doubt we clear.
        """
        writer, asks = self._writer, self._replays.endpoint is not None
        if writer.last is None or (self._replays.owed and not fresh):
            answered = await self._rebuild()
        else:
            life, rest = await self._life()
            answered = life is not None
            if life is Life.NEW or (life is None and fresh):
                await writer.begin_life()
                self._replays.owed = asks
                answered = answered and await self._rebuild()
            await self._take(rest)
        await writer.flush()
        await self._tell(silent=asks and not answered)

    async def _life(self) -> tuple[Life | None, tuple[Frame, ...]]:
        """Ask replay from our last batch whose life it is, and what follows; None: no answer."""
        last = self._writer.last
        assert last is not None, "a life without a batch is not judged"
        answer = await self._replays.ask(last)
        if answer is None:
            return None, ()
        found = answer.frames[0] if answer.frames else None
        matches = found is not None and found.digest == self._writer.digest(last)
        life = same_life(last, matches, found.sequence if found else None)
        return life, answer.frames[1 if life is Life.SAME else 0 :] if life is not Life.NEW else ()

    async def _rebuild(self) -> bool:
        """All that the engine still holds; owed until replay answers, which false says."""
        answer = await self._replays.ask(0)
        self._replays.owed = answer is None and self._replays.endpoint is not None
        if answer and answer.frames:
            known_from = self._writer.known_from
            if known_from is not None and answer.frames[0].sequence < known_from:
                await self._writer.begin_life()  # more than we kept: build it anew
            await self._take(answer.frames)
        return not self._replays.owed

    async def _close(self, gap: Gap, frame: Frame) -> bool:
        """Ask once for what is missing before a batch; false: the batch is of another life.

        The answer is newer. Where it ends before the batch, that is a leftover of an earlier life,
        unless the publisher itself was restarted meanwhile.
        """
        writer = self._writer
        await writer.flush()
        if self._replays.endpoint is None:
            return True
        await writer.know(Knowledge.PARTIAL, f"batches {gap.first} to {gap.last} are asked for")
        answer = await self._replays.ask(gap.first)
        if answer is None:
            self._replays.owed = True
            return True
        if answer.frames:
            if await self._take(answer.frames):
                self._metrics.gaps.labels("closed").inc()
            return not answer.ended or answer.frames[-1].sequence >= frame.sequence
        life = Life.NEW if writer.last is None else (await self._life())[0]
        if life is Life.NEW and writer.last is not None:
            await writer.begin_life()
            await self._rebuild()
        return life is not Life.SAME

    async def _take(self, answer: Sequence[Frame], rounds: int | None = None) -> bool:
        """Replayed batches in order; false where some before or between are lost.

        A hole inside the answer is asked for once: a slow reader loses batches there (vLLM before
        0.33). One before it stays: the engine's buffer has moved on.
        """
        left = self._settings.replay_rounds if rounds is None else rounds
        whole = True
        for at, frame in enumerate(answer):
            verdict = judge(self._writer.last, frame.sequence)
            if isinstance(verdict, Gap):
                await self._writer.flush()
                again = await self._replays.ask(verdict.first) if at and left else None
                if again and again.frames:
                    return await self._take(again.frames, left - 1) and whole
                self._give_up(verdict, frame)
                whole = False
            elif verdict is not Seen.IN_ORDER:
                continue
            await self._writer.take(frame)
        return whole

    def _give_up(self, gap: Gap, frame: Frame) -> None:
        self._metrics.gaps.labels("lost").inc()
        why = "are not in the replay" if self._replays.endpoint else "were missed, no replay"
        self._writer.lose(frame.sequence, f"batches {gap.first} to {gap.last} {why}")

    async def _tell(self, silent: bool = False) -> None:
        writer = self._writer
        heard, at = writer.last is not None, self._replays.endpoint
        await writer.know(*believed(heard, at, silent, writer.doubt, writer.caveat))

"""Repair: what is done about a gap, a restart, a batch from the past, or doubt.

Edge: acts on the verdicts of sequence.py with replay.py and writer.py. Used by subscriber.py, which
has the live socket. Open it to change what is asked of an engine, and when a life is given up.

    live batch  in order   written
                gap        replay asked once from the first missing; still open: clear, partial
                suspect    replay asked from our last batch: equal = late or again, else a new life
    a new connection, silence     the same question, so lost tails and restarts show
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvplane.vocabulary import Worker

from .errors import Mistaken, Resync
from .frames import Frame
from .metrics import EventsMetrics
from .places import Place
from .replay import Replays
from .sequence import Gap, Life, Seen, judge, same_life
from .settings import EventsSettings
from .states import Signal
from .telling import Telling
from .topics import Match, NoPort, Other, Unsure, judge_topic
from .writer import Writer

log = logging.getLogger(__name__)
EMPTY = 3  # looks at an engine that says what its replay does not know
ODD = 3  # live batches that the replay's engine cannot have said, until it is another one's


class Repair:
    """Brings one worker's batches into its writer, in order, whatever happened on the way."""

    def __init__(
        self,
        worker: Worker,
        place: Place,
        writer: Writer,
        replays: Replays,
        telling: Telling,
        metrics: EventsMetrics,
        settings: EventsSettings,
    ) -> None:
        self.worker, self._place, self._writer, self._replays = worker, place, writer, replays
        self._telling, self._metrics, self._settings = telling, metrics, settings
        self._topic = ""  # the last one that was taken
        self._connections = 0  # caught up with
        self._odd = 0  # batches of this connection that replay contradicts
        self._empty = 0  # first batches of this connection that replay does not know
        self._named = False  # a topic named this worker: others on its socket do not darken it

    async def live(self, frame: Frame, fresh: bool = False) -> None:
        """One batch off the wire; raises Mistaken where it is another worker's.

        `fresh`: it was surely said by the engine that is there now.
        """
        writer = self._writer
        self._identify(frame)
        self._contradicted(0)
        left = not fresh and self._connections > 1
        if left and writer.last is None and await self._disowned(frame):
            self._metrics.repeats.inc()
            return
        verdict = judge(writer.last, frame.sequence)
        if verdict is not Seen.IN_ORDER:
            writer.examine(frame)  # before anything is asked or given up for it
        if verdict in (Seen.REPEAT, Seen.SUSPECT):
            if await self._is_old(frame):
                self._metrics.repeats.inc()
                said = writer.digest(frame.sequence)
                self._contradicted(fresh and said not in (None, frame.digest))
                return
            await writer.begin_life("sequence")
            await self._rebuild()
            verdict = judge(writer.last, frame.sequence)
        if isinstance(verdict, Gap):
            if not await self._close(verdict, frame, fresh):
                self._metrics.repeats.inc()
                self._contradicted(fresh)
                return
            verdict = judge(writer.last, frame.sequence)
            if isinstance(verdict, Gap):
                await writer.flush()  # what a replay that was cut short gave all the same
                self._give_up(verdict, frame)
                verdict = Seen.IN_ORDER
        if verdict is Seen.IN_ORDER:
            await writer.take(frame)

    async def catch_up(self, fresh: bool = False) -> None:
        """Same life? Then what we lack of it, by replay.

        Behind a `fresh` connection a life that nobody vouches for is a new one: in doubt we clear.
        """
        writer, asks = self._writer, self._replays.endpoint is not None
        if fresh:
            self._connections += 1
            self._topic, self._named, self._telling.stream.mistaken = "", False, ""
            self._odd = self._empty = 0
        if self._telling.stream.mistaken:
            return  # nothing of it is taken anyway
        answered = True
        try:
            if writer.last is None or (self._replays.owed and not fresh):
                answered = await self._rebuild()
            else:
                life, rest = await self._life()
                answered = life is not None
                if life is Life.NEW or (life is None and fresh):
                    await writer.begin_life("doubt" if life is None else "connection")
                    self._replays.owe(asks)
                    answered = answered and await self._rebuild()
                await self._take(rest)
                if life is Life.SAME and fresh and writer.known_from is not None:
                    answered = await self._rebuild()  # replay may give what it, or we, lacked then
            await writer.flush()
        except Mistaken as error:
            await self.refuse(error)
        await self.settle(silent=asks and not answered)

    async def settle(self, silent: bool = False) -> None:
        """Tell what the stream amounts to now."""
        writer = self._writer
        await self._telling.settle(writer.last is not None, silent, writer.doubt, writer.caveat)

    async def refuse(self, error: Mistaken) -> None:
        """The stream is another worker's: what was taken from it before is void as well."""
        self._metrics.mistaken.labels(error.what).inc()
        if self._named and error.what == "topic":
            return  # several share this socket, and ours is one of them
        known, self._telling.stream.mistaken = self._telling.stream.mistaken, error.reason
        if not known:
            log.error("stream refused worker=%s %s", self.worker, error)
            if self._writer.last is not None:
                await self._writer.begin_life("doubt")
        await self.settle()

    def _contradicted(self, more: int) -> None:
        """Replay has not, or has otherwise, what the engine said just now: whose replay is it?

        Once that may be a batch of a life before; again and again it is another engine's.
        """
        self._odd += more
        if self._odd >= ODD:
            place = self._place
            why = f"replay at {place.replay} contradicts events at {place.events}: of two engines"
            raise Mistaken("replay", why)

    def _identify(self, frame: Frame) -> None:
        """Raises Mistaken where a batch's topic names somebody else."""
        if frame.topic in ("", self._topic):
            return
        place = self._place
        found = judge_topic(frame.topic, self.worker, place.url, place.ranks)
        if isinstance(found, Other):
            raise Mistaken("topic", found.reason)
        if isinstance(found, NoPort | Unsure):
            self._metrics.portless.inc()
            log.warning("stream taken on trust worker=%s %s", self.worker, found.reason)
        self._topic, self._named = frame.topic, isinstance(found, Match)

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
        self._replays.owe(answer is None)
        if answer and answer.frames:
            known_from = self._writer.known_from
            if known_from is not None and answer.frames[0].sequence < known_from:
                await self._writer.begin_life("more")  # than we kept: build it anew
            await self._take(answer.frames)
        return not self._replays.owed

    async def _close(self, gap: Gap, frame: Frame, fresh: bool) -> bool:
        """Ask once for what is missing before a batch; false: the batch is of another life.

        The answer is newer. Where it ends before the batch, that is a leftover of an earlier life,
        unless the publisher itself was restarted meanwhile.
        """
        writer = self._writer
        await writer.flush()
        if self._replays.endpoint is None:
            return True
        missing = f"batches {gap.first} to {gap.last}"
        await self._telling.say(Signal.HOLE, missing)
        await self._telling.say(Signal.ASKED, missing)
        answer = await self._replays.ask(gap.first)
        if answer is None:
            self._replays.owe()
            return True
        if answer.frames:
            if await self._take(answer.frames):
                self._metrics.gaps.labels("closed").inc()
            return not answer.ended or answer.frames[-1].sequence >= frame.sequence
        if writer.last is None:
            return self._keeps_nothing(fresh)
        life = (await self._life())[0]
        if life is Life.NEW:
            await writer.begin_life("digest")
            await self._rebuild()
        return life is not Life.SAME

    async def _disowned(self, frame: Frame) -> bool:
        """A life's first batch, perhaps of an earlier connection: where replay of the engine there
        is now answers and lacks it, it is a last word of the engine before."""
        if self._replays.endpoint is None or not await self._rebuild():
            return False
        return judge(self._writer.last, frame.sequence) is Seen.IN_ORDER

    def _keeps_nothing(self, fresh: bool) -> bool:
        """The first batch of a life, and replay has none at all: is it this engine's?

        An ingest that lags hears the last words of an engine when another ingest has begun its next
        life already. They are left out where they came by an earlier connection. What is `fresh`
        may be so only because its end was not heard of yet: we look again a few times. Who says
        more even then keeps nothing for replay.
        """
        self._empty += fresh
        if fresh and self._empty <= EMPTY:
            raise Resync("empty")
        return fresh

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
            self._identify(frame)
            await self._writer.take(frame)
        return whole

    def _give_up(self, gap: Gap, frame: Frame) -> None:
        self._metrics.gaps.labels("lost").inc()
        why = "are not in the replay" if self._replays.endpoint else "were missed, no replay"
        self._writer.lose(frame.sequence, f"batches {gap.first} to {gap.last} {why}")

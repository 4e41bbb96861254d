"""Writer: one worker's batches into the store, in order, each once.

Edge: store calls with patience; judgement is in sequence.py, meaning in translation.py, words in
telling.py. Used by subscriber.py and repair.py. Open it to change how batches are gathered or what
a refusal leads to.

    take(frame) ... take(frame) -> one Batch -> flush() -> Applied           go on
                                                           Repeat            another ingest was it
                                                           GapRefused, StaleEpoch -> Resync: load()
    StoreDown: the same Batch again after a pause; rows are absolute, so twice does no harm
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from dataclasses import replace

from kvplane.index import (
    Applied,
    Batch,
    Outcome,
    Position,
    Repeat,
    StaleEpoch,
    Store,
    StoreDown,
    Value,
)
from kvplane.runtime import Clock
from kvplane.vocabulary import Change, ClearReason, Epoch, Worker

from . import mark
from .dialects.base import BadBatch, Decoded, Dialect
from .errors import Mistaken, Resync
from .frames import Frame
from .metrics import EventsMetrics
from .patience import Outage, Patience
from .settings import EventsSettings
from .telling import Telling
from .translation import Translation, Translator

log = logging.getLogger(__name__)
SAMPLES = 8  # batches of one life that are no batches, each logged; more are only counted


class Writer:
    """The only one that writes this worker's life from this process."""

    def __init__(
        self,
        worker: Worker,
        dialect: Dialect,
        store: Store,
        model: str,
        clock: Clock,
        metrics: EventsMetrics,
        settings: EventsSettings,
        telling: Telling,
        ranks: int = 1,
        outage: Outage | None = None,
    ) -> None:
        self.worker, self._dialect, self._store, self._model = worker, dialect, store, model
        self._clock, self._metrics, self._settings = clock, metrics, settings
        self._telling, self._ranks = telling, ranks
        self._patiently = Patience(worker, clock, metrics, settings, outage)
        self._bad = 0  # batches that could not be decoded
        self.epoch = Epoch(0)  # 0 until load()
        self.last: int | None = None  # last batch taken; the store may be one flush behind
        self.known_from: int | None = None  # first batch known; None where nothing is missing
        self.doubt = ""  # why, in words
        self._since = 0.0  # wall clock of the gap before known_from
        self._gaps = 0  # that stayed open, as the store counts them
        self._distrusted = ""  # why nothing the store holds of this life is believed any more
        self._seen: OrderedDict[int, int] = OrderedDict()  # sequence -> digest of the newest
        self._empty(self._translator_of({}))

    def _translator_of(self, table: dict[bytes, Value]) -> Translator:
        most = self._settings.worker_blocks
        return Translator(
            self.worker, self.epoch, self._model, table, self._dialect.copies, most_blocks=most
        )

    def _empty(self, translator: Translator) -> None:
        self._translator = translator
        self._first: int | None = None  # of what is gathered and not flushed
        self._changes: list[Change] = []
        self._rows: dict[bytes, Value | None] = {}
        self._reset = False
        self._begun = self._breath = 0.0  # monotonic seconds of its first, of the loop's last turn

    # -- where the store stands ------------------------------------------------------------------

    async def load(self) -> None:
        """Take over position and table of the living life; the first contact begins one.

        A life whose table is gone, or that is distrusted, ends here: what it held has to be heard
        again. Where another ingest ended it already, the next one is taken as it is.
        """
        position, table = await self._patiently(self._read)
        doubted = self._distrusted and position.epoch == self.epoch
        if doubted or not position.whole:
            old = position.epoch
            await self._patiently(lambda: self._store.begin_life(self.worker, old))
            log.warning("table lost worker=%s epoch=%d action=new life", self.worker, old)
            position, table = await self._patiently(self._read)
        self._distrusted = ""
        self._telling.begin(position.epoch)  # a store that was emptied has to be told again
        marked = mark.take(table)
        if position.epoch != self.epoch:
            self._seen.clear()
        self.epoch, self.last, self._gaps = position.epoch, position.last, position.gaps
        self.known_from, self._since, self.doubt = None, 0.0, ""
        if marked and marked.known_from is not None:
            self._doubt(marked.known_from, f"batches before {marked.known_from}", marked.since)
        if marked and self.last is not None:
            self._seen[self.last] = marked.digest
        self._empty(self._translator_of(table))

    async def _read(self) -> tuple[Position, dict[bytes, Value]]:
        """Position and table of one moment: another ingest may move both meanwhile."""
        position = await self._store.position(self.worker)
        while True:
            if position is None:
                await self._store.begin_life(self.worker, self.epoch or None)
            try:
                table, readable = await self._store.table(self.worker), True
            except ValueError as error:  # somebody else wrote there: as good as gone
                log.error("table unreadable worker=%s %s", self.worker, error)
                table, readable = {}, False
            again = await self._store.position(self.worker)
            if again is not None and again == position:
                return replace(again, whole=again.whole and readable), table
            position = again

    async def check(self) -> None:
        """Does the store stand where we left it? Raises Resync where it lost something.

        While an engine is silent an emptied or older store shows only here; at any time so does a
        gap that another ingest could not close, and that our own table knows nothing of.
        """
        assert self._first is None, "flush() comes before check()"
        if self._distrusted:
            raise Resync(self._distrusted)
        try:
            position = await self._store.position(self.worker)
        except StoreDown:
            self._metrics.store_errors.inc()
            return
        if position is None or position.epoch != self.epoch or not position.whole:
            raise Resync("lost")
        if self.last is not None and (position.last is None or position.last < self.last):
            raise Resync("lost")
        if position.gaps > self._gaps:
            raise Resync("gap")
        await self._telling.verify(position.known)

    def distrust(self, reason: str) -> None:
        """Something of the store is gone, nobody knows what: the next check() ends the life."""
        self._distrusted = reason

    async def begin_life(self, seen_by: str) -> None:
        """The engine was restarted, or nobody can say that it was not: its old life is void.

        `seen_by`: sequence, digest, connection; doubt, where there is no proof; more, where replay
        gives more than we kept.
        """
        await self.flush()
        old = self.epoch
        new = await self._patiently(lambda: self._store.begin_life(self.worker, old))
        self._metrics.lives.labels(seen_by).inc()
        if seen_by not in ("doubt", "more"):
            self._metrics.restarts.inc()
            log.info("restart detected worker=%s epoch=%d by=%s", self.worker, new, seen_by)
        await self.load()

    # -- batches ---------------------------------------------------------------------------------

    def digest(self, sequence: int) -> int | None:
        """Digest of a batch taken before; None where we do not remember it."""
        return self._seen.get(sequence)

    @property
    def caveat(self) -> str:
        """Why a depth may be more than the engine serves: of the model, not of what was lost."""
        return self._translator.caveat

    def lose(self, known_from: int, what: str) -> None:
        """What came before the next batch cannot be had: clear, and know only what follows."""
        assert self._first is None, "flush() comes before lose()"
        self._translator.table.clear()
        out = Translation()
        self._translator.clear(ClearReason.GAP, out)
        self._changes, self._rows, self._reset = out.changes, {}, True
        if not self.doubt:  # else it is still not over
            log.warning("batches lost worker=%s what=%r action=clear", self.worker, what)
        self._doubt(known_from, what, self._clock.wall())

    def _doubt(self, known_from: int, what: str, since: float) -> None:
        self.known_from, self._since = known_from, since
        self.doubt = mark.incomplete(since, what)

    async def take(self, frame: Frame) -> None:
        """Translate the next batch of the life; flushed with its neighbours, or when many."""
        decoded, lost = self._decode(frame)
        if lost:
            await self.flush()
            self.lose(frame.sequence + 1, lost)
        told = decoded.events[decoded.void :]
        out = self._translator.translate(told, decoded.ts, frame.sequence)
        if out.cleared:
            self.known_from, self._since, self.doubt = None, 0.0, ""
        self._metrics.translated(out.left_out, out.waiting)
        if self._first is None:
            self._first, self._begun = frame.sequence, self._clock.now()
            self._breath = self._begun
        self.last = frame.sequence
        self._changes += out.changes
        if self._rows:
            self._rows |= out.rows
        else:
            self._rows = out.rows  # nobody else's from now on
        self._remember(frame)
        settings = self._settings
        many = self.last - self._first + 1 >= settings.apply_batches
        if many or len(self._rows) >= settings.apply_rows:
            await self.flush()
        elif self._clock.now() - self._breath > settings.breath_s:
            await asyncio.sleep(0)
            self._breath = self._clock.now()

    def _decode(self, frame: Frame) -> tuple[Decoded, str]:
        """Events of a batch, and what was lost where one may have taken blocks away unread.

        Raises Mistaken for a batch of another rank.
        """
        try:
            decoded = self._dialect.decode(frame.payload)
        except BadBatch as error:
            self._metrics.undecodable.inc()
            self._bad += 1
            if self._bad <= SAMPLES:
                log.warning("undecodable worker=%s batch=%d %s", self.worker, frame.sequence, error)
            return Decoded(0.0, (), None), f"batch {frame.sequence} could not be decoded"
        self._same_rank(decoded)
        self._metrics.heard(decoded)
        for name in decoded.unknown:
            log.warning("read past worker=%s what=%s: newer than this program", self.worker, name)
        taken = [drop for drop in decoded.dropped if drop.took_away]
        what = "an event" if taken and taken[0].unread else f"a {taken[0].kind}" if taken else ""
        lost = f"{what} in batch {frame.sequence} could not be read" if taken else ""
        return decoded, lost

    def examine(self, frame: Frame) -> None:
        """Raises Mistaken for a batch that take() would refuse."""
        if self._ranks > 1:
            with contextlib.suppress(BadBatch):
                self._same_rank(self._dialect.decode(frame.payload))

    def _same_rank(self, decoded: Decoded) -> None:
        """Where a pod has several streams, each says whose it is."""
        rank = self.worker.dp_rank
        if self._ranks > 1 and decoded.dp_rank not in (None, rank):
            raise Mistaken("rank", f"rank {rank}'s stream says rank {decoded.dp_rank}")

    def _remember(self, frame: Frame) -> None:
        self._seen[frame.sequence] = frame.digest
        if len(self._seen) > self._settings.remembered:
            self._seen.popitem(last=False)

    async def flush(self) -> None:
        """Write what is gathered as one batch; raises Resync where the store stands elsewhere."""
        if self._first is None:
            return
        assert self.last is not None, "a gathered batch has a number"
        marked = mark.Mark(self._seen[self.last], self.known_from, self._since).note()
        self._rows[mark.KEY] = marked
        rows, changes = self._rows, tuple(self._changes)
        batch = Batch(self.worker, self.epoch, self._first, self.last, changes, rows, self._reset)
        outcome = await self._patiently(lambda: self._store.apply(batch))
        self._metrics.applied(changes, batch.last - batch.first + 1)
        self._metrics.lag.observe(self._clock.now() - self._begun)
        self._empty(self._translator)
        await asyncio.sleep(0)  # a long replay lets requests through between two batches
        self._settle(outcome, batch)

    def _settle(self, outcome: Outcome, batch: Batch) -> None:
        if isinstance(outcome, Applied):
            self._gaps += batch.reset
            return
        if isinstance(outcome, Repeat) and not batch.reset:
            return  # the same batches mean the same rows, whoever wrote them
        reason = {Repeat: "repeat", StaleEpoch: "epoch"}.get(type(outcome), "gap")
        log.info("resync worker=%s batch=%d reason=%s", self.worker, batch.last, reason)
        raise Resync(reason)

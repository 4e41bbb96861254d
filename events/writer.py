"""Writer: one worker's batches into the store, in order, each once.

Edge: store calls with patience; judgement is in sequence.py, meaning in translation.py. Used by
subscriber.py. Open it to change how batches are gathered or what a refusal leads to.

    take(frame) ... take(frame) -> one Batch -> flush() -> Applied           go on
                                                           Repeat            another ingest was it
                                                           GapRefused, StaleEpoch -> Resync: load()
    StoreDown: the same Batch again after a pause; rows are absolute, so twice does no harm
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeVar

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
from kvplane.runtime import Clock, backoff
from kvplane.vocabulary import Change, ClearReason, Epoch, Knowledge, Known, Worker

from . import mark
from .dialects.base import BadBatch, Decoded, Dialect
from .errors import Resync
from .frames import Frame
from .metrics import EventsMetrics
from .settings import EventsSettings
from .translation import Translation, Translator

log = logging.getLogger(__name__)
T = TypeVar("T")
_KINDS = {"BlocksStored": "stored", "BlocksRemoved": "removed", "AllCleared": "cleared"}


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
    ) -> None:
        self.worker, self._dialect, self._store, self._model = worker, dialect, store, model
        self._clock, self._metrics, self._settings = clock, metrics, settings
        self.epoch = Epoch(0)  # 0 until load()
        self.last: int | None = None  # last batch taken; the store may be one flush behind
        self.known_from: int | None = None  # first batch known; None where nothing is missing
        self.doubt = ""  # why, in words
        self.caveat = ""  # of the kind of model, not of what was lost
        self._seen: OrderedDict[int, int] = OrderedDict()  # sequence -> digest of the newest
        self._told: tuple[Knowledge, str, Epoch] | None = None
        self._wanted: tuple[Knowledge, str] | None = None  # to be told, perhaps not heard yet
        self._empty(Translator(worker, self.epoch, model, {}))

    def _empty(self, translator: Translator) -> None:
        self._translator = translator
        self._first: int | None = None  # of what is gathered and not flushed
        self._changes: list[Change] = []
        self._rows: dict[bytes, Value | None] = {}
        self._reset = False
        self._ts = 0.0

    # -- where the store stands ------------------------------------------------------------------

    async def load(self) -> None:
        """Take over position and table of the living life; the first contact begins one."""
        position, table = await self._patiently(self._read)
        self.count_state(None)  # a store that was emptied has to be told again
        marked = mark.take(table)
        if position.epoch != self.epoch:
            self._seen.clear()
        self.epoch, self.last = position.epoch, position.last
        self.known_from = marked.known_from if marked else None
        earlier = f"batches before {self.known_from} are unknown since an earlier gap"
        self.doubt = "" if self.known_from is None else self.doubt or earlier
        if marked and self.last is not None:
            self._seen[self.last] = marked.digest
        copies = self._dialect.copies
        self._empty(Translator(self.worker, self.epoch, self._model, table, copies))

    async def _read(self) -> tuple[Position, dict[bytes, Value]]:
        """Position and table of one moment: another ingest may move both meanwhile."""
        position = await self._store.position(self.worker)
        while True:
            if position is None:
                await self._store.begin_life(self.worker, None)
            table = await self._store.table(self.worker)
            again = await self._store.position(self.worker)
            if again is not None and again == position:
                return again, table
            position = again

    async def check(self) -> None:
        """Does the store stand where we left it? Raises Resync where it lost something.

        Nobody writes while an engine is silent, so an emptied or older store shows only here.
        """
        assert self._first is None, "flush() comes before check()"
        try:
            position = await self._store.position(self.worker)
        except StoreDown:
            self._metrics.store_errors.inc()
            return
        if position is None or position.epoch != self.epoch:
            raise Resync("lost")
        if self.last is not None and (position.last is None or position.last < self.last):
            raise Resync("lost")
        if self._wanted is not None:
            await self.know(*self._wanted)

    async def begin_life(self) -> None:
        """The engine was restarted: everything of its old life is void."""
        await self.flush()
        old = self.epoch
        new = await self._patiently(lambda: self._store.begin_life(self.worker, old))
        self._metrics.restarts.inc()
        log.info("restart detected worker=%s epoch=%d action=clear", self.worker, new)
        await self.load()

    # -- batches ---------------------------------------------------------------------------------

    def digest(self, sequence: int) -> int | None:
        """Digest of a batch taken before; None where we do not remember it."""
        return self._seen.get(sequence)

    def lose(self, known_from: int, doubt: str) -> None:
        """What came before the next batch cannot be had: clear, and know only what follows."""
        assert self._first is None, "flush() comes before lose()"
        self._translator.table.clear()
        out = Translation()
        self._translator.clear(ClearReason.GAP, out)
        self._changes, self._rows, self._reset = out.changes, {}, True
        self.known_from, self.doubt = known_from, doubt
        log.warning("batches lost worker=%s doubt=%r action=clear", self.worker, doubt)

    async def take(self, frame: Frame) -> None:
        """Translate the next batch of the life; flushed with its neighbours, or when many."""
        decoded, doubt = self._decode(frame)
        if doubt:
            await self.flush()
            self.lose(frame.sequence + 1, doubt)
        out = self._translator.translate(decoded.events)
        if out.cleared:
            self.known_from, self.doubt = None, ""
        self.caveat = out.caveat or self.caveat
        for reason, count in out.left_out.items():
            self._metrics.left_out.labels(reason).inc(count)
        self._first = frame.sequence if self._first is None else self._first
        self.last = frame.sequence
        self._changes += out.changes
        self._rows |= out.rows
        self._ts = decoded.ts
        self._remember(frame)
        settings = self._settings
        many = self.last - self._first + 1 >= settings.apply_batches
        if many or len(self._rows) >= settings.apply_rows:
            await self.flush()

    def _decode(self, frame: Frame) -> tuple[Decoded, str]:
        """Events of a batch, and a doubt where one may have taken blocks away unread."""
        doubt = ""
        try:
            decoded = self._dialect.decode(frame.payload)
        except BadBatch as error:
            self._metrics.undecodable.inc()
            log.warning("undecodable worker=%s batch=%d %s", self.worker, frame.sequence, error)
            return Decoded(0.0, (), None), f"batch {frame.sequence} could not be decoded"
        for drop in decoded.dropped:
            self._metrics.dropped.labels(drop.kind).inc()
            if drop.kind in ("BlockRemoved", "AllBlocksCleared"):
                doubt = f"a {drop.kind} in batch {frame.sequence} could not be read"
        for event in decoded.events:
            self._metrics.events.labels(_KINDS[type(event).__name__]).inc()
        self._metrics.batches.inc()
        return decoded, doubt

    def _remember(self, frame: Frame) -> None:
        self._seen[frame.sequence] = frame.digest
        while len(self._seen) > self._settings.remembered:
            self._seen.popitem(last=False)

    async def flush(self) -> None:
        """Write what is gathered as one batch; raises Resync where the store stands elsewhere."""
        if self._first is None:
            return
        assert self.last is not None, "a gathered batch has a number"
        marked = mark.Mark(self._seen[self.last], self.known_from).note()
        rows: dict[bytes, Value | None] = {**self._rows, mark.KEY: marked}
        changes = tuple(self._changes)
        batch = Batch(self.worker, self.epoch, self._first, self.last, changes, rows, self._reset)
        outcome = await self._patiently(lambda: self._store.apply(batch))
        ts = self._ts
        self._empty(self._translator)
        await asyncio.sleep(0)  # a long replay lets requests through between two batches
        self._settle(outcome, batch)
        if ts:
            self._metrics.lag.observe(max(0.0, self._clock.wall() - ts))

    def _settle(self, outcome: Outcome, batch: Batch) -> None:
        if isinstance(outcome, Applied):
            return
        if isinstance(outcome, Repeat) and not batch.reset:
            return  # the same batches mean the same rows, whoever wrote them
        reason = {Repeat: "repeat", StaleEpoch: "epoch"}.get(type(outcome), "gap")
        log.info("resync worker=%s batch=%d reason=%s", self.worker, batch.last, reason)
        raise Resync(reason)

    # -- knowledge -------------------------------------------------------------------------------

    async def know(self, state: Knowledge, reason: str) -> None:
        """Tell how far we may be believed, once per change; a store that is down hears it later."""
        self._wanted, told = (state, reason), (state, reason, self.epoch)
        if told == self._told:
            return
        known = Known(self.worker, self.epoch, state, reason, self._clock.wall())
        try:
            await self._store.known(known)
        except StoreDown as error:
            self._metrics.store_errors.inc()
            log.warning("knowledge not told worker=%s %s", self.worker, error)
            return
        if self._told is None or self._told[0] is not state:
            log.info("knowledge worker=%s state=%s reason=%r", self.worker, state, reason)
        self.count_state(state)
        self._told = told

    def count_state(self, state: Knowledge | None) -> None:
        """Move this worker in the gauge of states; None takes it out."""
        if self._told is not None:
            self._metrics.workers.labels(self._told[0].value).dec()
            self._told = None
        if state is not None:
            self._metrics.workers.labels(state.value).inc()

    @property
    def state(self) -> Knowledge | None:
        """What was told last."""
        return self._told[0] if self._told else None

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Until the store answers. Meanwhile the socket's bounded queue fills, then gaps tell."""
        settings = self._settings
        waits = backoff(settings.store_retry_s, most_s=settings.store_retry_most_s)
        while True:
            try:
                return await call()
            except StoreDown as error:
                self._metrics.store_errors.inc()
                wait = next(waits)
                log.warning("store down worker=%s %s retry_in_s=%.1f", self.worker, error, wait)
                await self._clock.sleep(wait)

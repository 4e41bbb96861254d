"""Instances: what is remembered of every address, until another life answers there.

Edge: logs and tells. Owned by resolver.py, which asks the questions. Open it to change how many
addresses are remembered or what happens when a life is over.

    answer of the same life   kept          answer of another   the old record is dropped, who
    answer that comes late    NewLife       ranks missing       watches is told, a new one begins
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvplane.runtime import Clock, backoff
from kvplane.vocabulary import Generation, Stage

from .client import Endpoint
from .errors import BootstrapError, NewLife, NotRegistered, RankUnknown, Refused, Silent
from .lives import Life, Rank, Verdict
from .metrics import BootstrapMetrics
from .roomline import RoomLine
from .settings import ResolverSettings
from .standing import AddressState, Standing
from .topology import Topology

log = logging.getLogger(__name__)

Listener = Callable[[str, Generation | None, str], None]  # address, the life that is over, why


@dataclass(frozen=True, slots=True)
class Resolved:
    """What an instance looks like and which life of it said so (None: it does not tell)."""

    topology: Topology
    generation: Generation | None
    checked_at: float  # when the question was sent; monotonic seconds


@dataclass(slots=True)
class Record:
    """What is remembered of one life behind an address."""

    address: str
    standing: Standing
    life: Life = field(default_factory=Life)
    resolved: Resolved | None = None
    ranks: dict[Rank, tuple[Endpoint, float]] = field(default_factory=dict)  # and when asked
    epoch: int = 0  # raised when all is forgotten: answers to earlier questions are not kept
    over: BootstrapError | None = None  # why it is gone; answers that come late are nobody's
    line: RoomLine = field(init=False)


class Instances:
    """Records by address; `dropped` is called where calls that are out lose their meaning."""

    def __init__(
        self,
        line: Callable[[Record], RoomLine],
        dropped: Callable[[str], None],
        clock: Clock,
        settings: ResolverSettings,
        metrics: BootstrapMetrics | None,
    ) -> None:
        self._line, self._dropped, self._clock = line, dropped, clock
        self._settings, self._metrics = settings, metrics
        self._records: OrderedDict[str, Record] = OrderedDict()
        self._listeners: list[Listener] = []

    def use(self, address: str) -> Record:
        """The record of an address somebody wants to know about."""
        now = self._clock.now()
        record = self._records.get(address)
        if record is None:
            record = self._records[address] = self._begin(address, Standing(now, self._waits))
        record.standing.used_at = now
        self._records.move_to_end(address)
        if len(self._records) > self._settings.most_addresses:
            self._records.popitem(last=False)
        return record

    def find(self, address: str) -> Record | None:
        """The record of an address that is known."""
        return self._records.get(address)

    def forget(self, address: str) -> None:
        """Nothing that was answered is reused."""
        record = self._records.get(address)
        if record is not None:
            record.resolved, record.epoch = None, record.epoch + 1
            record.ranks.clear()
            self._dropped(address)

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Call it when a life is over. Returns the undo."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def states(self) -> Mapping[str, AddressState]:
        """How every address that is remembered has been doing."""
        now = self._clock.now()
        return {a: r.standing.view(now, r.life.generation) for a, r in self._records.items()}

    def lately(self) -> Sequence[str]:
        """Addresses with something to lose that were used within `idle_s`."""
        since = self._clock.now() - self._settings.idle_s
        records = self._records.items()
        return [a for a, r in records if r.life.heard and r.standing.used_at >= since]

    async def close(self) -> None:
        """End what waits for rooms."""
        for record in self._records.values():
            await record.line.close()

    def hear(
        self, record: Record, generation: Generation | None, judge: Callable[[Life], Verdict]
    ) -> Record:
        """The record that an answer belongs to. Raises where the answer is void."""
        if record.over is not None:
            raise copy.copy(record.over)
        known = record.life.generation
        verdict = judge(record.life)
        if verdict is Verdict.LATE:
            raise NewLife(record.address, generation, known)
        if verdict is Verdict.NEW:
            record = self.end(record, NewLife(record.address, known, generation))
            judge(record.life)
        return record

    def failed(self, record: Record, error: BootstrapError, sent_at: float) -> None:
        """A question was not answered, or not as it should be."""
        if isinstance(error, RankUnknown | Refused | NewLife):
            return  # the directory itself is well
        settings = self._settings
        told = not isinstance(error, Silent)
        most_s = settings.most_wait_told_s if told else settings.most_wait_s
        record.standing.failed(error, sent_at, self._clock.now(), most_s)
        if isinstance(error, NotRegistered) and record.life.lost(sent_at):
            self.end(record, error)

    def end(self, record: Record, error: BootstrapError) -> Record:
        """A life is over: drop it, tell who watches; the record of the next one."""
        address, life = record.address, record.life.generation
        record.over = error
        record.line.end(error)
        new = self._begin(address, record.standing)
        new.epoch = record.epoch
        if self._records.get(address) is not record:
            return new  # it was pushed out of memory
        self._records[address] = new
        self._dropped(address)
        if record.life.heard:
            log.info("instance gone address=%s life=%s why=%s", address, life, error)
            self._tell(address, life, error)
        return new

    def watched(self, record: Record, stage: Stage, timed: bool = True) -> _Watched:
        """Around one call: its outcome is counted and remembered."""
        return _Watched(self, record, stage, timed)

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.now()

    def count(self, stage: Stage, error: BaseException | None, took_s: float | None) -> None:
        """One question was answered or not."""
        if self._metrics is None:
            return
        outcome = "ok" if error is None else type(error).__name__
        self._metrics.resolutions.labels(stage.value, outcome).inc()
        if took_s is not None:
            self._metrics.resolve_s.labels(stage.value).observe(took_s)

    def _tell(self, address: str, life: Generation | None, error: BootstrapError) -> None:
        if self._metrics is not None:
            self._metrics.gone.labels(type(error).__name__).inc()
        for listener in tuple(self._listeners):
            try:
                listener(address, life, str(error))
            except Exception:
                log.exception("listener failed address=%s action=go on", address)

    def _begin(self, address: str, standing: Standing) -> Record:
        record = Record(address, standing)
        record.line = self._line(record)
        return record

    def _waits(self) -> Iterator[float]:
        return backoff(self._settings.first_wait_s, most_s=self._settings.most_wait_s)


class _Watched:
    """Around one call."""

    def __init__(self, instances: Instances, record: Record, stage: Stage, timed: bool) -> None:
        self._instances, self._record, self._stage = instances, record, stage
        self._timed, self._began = timed, instances.now()

    async def __aenter__(self) -> None:
        """Nothing to prepare."""

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        now = self._instances.now()
        if error is None:
            self._record.standing.went_well(now)
        elif isinstance(error, BootstrapError):
            self._instances.failed(self._record, error, self._began)
        # A question that was to wait there says nothing of the directory's speed.
        self._instances.count(self._stage, error, now - self._began if self._timed else None)

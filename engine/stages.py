"""Stages: what several ranks saw of a stage, told as one.

Pure. transfer/ records each stage for every rank of a room; a reader wants the room's. team.py says
when a room begins and ends here. Open it to change what is told of a stage that ranks share.

    all ranks ok          -> ok, the longest duration, every rank's detail
    the first that fails  -> failed, at once, with its name; what follows from it is not told
    not all of them       -> nothing: the stage was not reached
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvplane.vocabulary import Room, Stage, StageRecord

Record = Callable[[StageRecord], None]
OK = "ok"


@dataclass(slots=True)
class _Heard:
    stages: dict[Stage, dict[str, StageRecord]] = field(default_factory=dict)
    failed: bool = False


class Stages:
    """Of the ranks of one dp rank that are here; a rank without a name is all there is."""

    def __init__(self, names: Sequence[str], record: Record) -> None:
        self._names, self._record = tuple(names), record
        self._rooms: dict[Room, _Heard] = {}

    def of(self, name: str) -> Record:
        """The recorder of one rank, or of who has others: `node 1`. "" = as it is."""
        if not name:
            return self._record
        return lambda record: self._hear(name, record)

    @contextmanager
    def room(self, room: Room) -> Iterator[None]:
        """While it lasts the records of this room are gathered."""
        self._rooms[room] = _Heard()
        try:
            yield
        finally:
            del self._rooms[room]

    def _hear(self, name: str, record: StageRecord) -> None:
        heard = self._rooms.get(record.room)
        if heard is None:
            self._record(_named(name, record))
        elif record.outcome != OK:
            if not heard.failed:
                self._record(_named(name, record))
            heard.failed = True
        else:
            told = heard.stages.setdefault(record.stage, {})
            told[name] = record
            if len(told) == len(self._names):
                self._record(self._all(told))

    def _all(self, told: dict[str, StageRecord]) -> StageRecord:
        records = [told[name] for name in self._names]
        details = list(dict.fromkeys(record.detail for record in records))
        if len(details) > 1:
            details = [f"{name}: {told[name].detail}" for name in self._names]
        last = max(records, key=lambda record: record.at)
        longest = max(record.duration_s for record in records)
        return replace(last, duration_s=longest, detail="; ".join(details))


def _named(name: str, record: StageRecord) -> StageRecord:
    said = record.detail if record.detail.startswith(name) else f"rank {name}: {record.detail}"
    return replace(record, detail=said)

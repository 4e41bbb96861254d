"""Faults: switches that break this engine on purpose, for tests.

Door: POST /fault arms one, GET lists, DELETE disarms. transfer/ calls the Tamper hooks *after* it
computed checksums, so whatever is changed here must be noticed by the receiver. Served on loopback
only, unless a flag says otherwise. Open it to add a way to break.

    stage on a prefill   policy-input   before POST /tokenize is answered (also role both)
                         register   before a room's prompt is computed (the HTTP leg)
                         connect    when a decode binds a room
                         verify     before and while pages and record leave
    stage on a decode    resolve-topology, resolve-rank   before the directory is asked
                         consume    before the first answer token (the HTTP leg; also role both)
    kind  delay hang error reset: at every stage     the others: at verify of a prefill
    rank  of several, which one (`tp=1 pp=0`); stages of all ranks together: register, consume
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane.runtime import Clock
from kvplane.transfer import (
    Metadata,
    PageOut,
    drop_last,
    flip_byte,
    foreign_room,
    stale_generation,
    swap_pages,
)
from kvplane.vocabulary import Generation, Role, Room, Stage

from .errors import BadRequest, InjectedFault
from .metrics import EngineMetrics

HOLDING = ("delay", "hang", "error", "reset")
CHANGING = ("flip-byte", "swap-pages", "foreign-room", "short", "stale-generation")
STAGES = {
    Role.PREFILL: (Stage.POLICY_INPUT, Stage.REGISTER, Stage.CONNECT, Stage.VERIFY),
    Role.DECODE: (Stage.RESOLVE_TOPOLOGY, Stage.RESOLVE_RANK, Stage.CONSUME),
    Role.BOTH: (Stage.POLICY_INPUT, Stage.CONSUME),
}
BY_RANK = (Stage.CONNECT, Stage.VERIFY, Stage.RESOLVE_TOPOLOGY, Stage.RESOLVE_RANK)
MOST_COUNT = 1_000_000
MOST_SECONDS = 600.0


@dataclass(slots=True)
class Fault:
    """One armed switch."""

    stage: Stage
    kind: str
    left: int  # times it still breaks: a room of one rank, one rank of a room of several
    seconds: float = 1.0  # of a delay
    rank: str = ""  # `tp=1 pp=0`; "" = whichever comes first

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "stage": self.stage.value,
            "kind": self.kind,
            "count": self.left,
            "seconds": self.seconds,
            "rank": self.rank,
        }


class Faults:
    """All armed switches; `of` gives each rank's Tamper for transfer/."""

    def __init__(
        self, role: Role, clock: Clock, metrics: EngineMetrics, ranks: Sequence[str] = ()
    ) -> None:
        self._role, self._clock, self._metrics = role, clock, metrics
        self._ranks = tuple(rank for rank in ranks if rank)
        self._armed: list[Fault] = []
        self._place = itertools.count(7919, 104_729)  # primes: another byte each time

    def arm(self, body: object) -> Fault:
        """Read {stage, kind, count, seconds?, rank?}; BadRequest names what would be right."""
        if not isinstance(body, dict):
            raise BadRequest("body", "must be an object: {stage, kind, count}")
        stage = self._stage(body.get("stage"))
        kind = body.get("kind")
        kinds = (*HOLDING, *CHANGING) if stage is Stage.VERIFY else HOLDING
        if kind not in kinds:
            want = f"at stage {stage.value} must be one of {', '.join(kinds)}"
            raise BadRequest("kind", f"kind = {kind!r}: {want}")
        count = _number(body, "count", 1, MOST_COUNT, whole=True)
        seconds = _number(body, "seconds", 1.0, MOST_SECONDS)
        fault = Fault(stage, str(kind), int(count), seconds, self._rank(stage, body.get("rank")))
        self._armed.append(fault)
        return fault

    def armed(self) -> list[dict[str, Any]]:
        """What will still break."""
        return [fault.shown() for fault in self._armed]

    def disarm(self) -> None:
        """Break nothing any more. What hangs already goes on hanging."""
        self._armed.clear()

    def of(self, rank: str) -> RankFaults:
        """What breaks one rank."""
        return RankFaults(self, rank)

    async def before(self, stage: Stage, room: Room, rank: str = "") -> None:
        """Delay, hang, or raise; ConnectionResetError = cut the connection without a word."""
        fault = self.take(stage, HOLDING, rank)
        if fault is None:
            return
        if fault.kind == "delay":
            await self._clock.sleep(fault.seconds)
        elif fault.kind == "hang":
            await self._clock.sleep(MOST_SECONDS)  # whoever waits for us gives up before
            raise InjectedFault(f"fault injected at {stage.value}: hung {MOST_SECONDS:g} s")
        elif fault.kind == "reset":
            raise ConnectionResetError(f"fault injected at {stage.value}: reset")
        else:
            raise InjectedFault(f"fault injected at {stage.value}: error")

    def take(self, stage: Stage, kinds: Sequence[str], rank: str) -> Fault | None:
        """The first switch that fits breaks once."""
        for fault in self._armed:
            if fault.stage is stage and fault.kind in kinds and fault.rank in ("", rank):
                fault.left -= 1
                if fault.left == 0:
                    self._armed.remove(fault)
                self._metrics.faults.labels(fault.kind).inc()
                return fault
        return None

    def place(self) -> int:
        """Where the next byte is flipped."""
        return next(self._place)

    def _rank(self, stage: Stage, given: object) -> str:
        if given is None or given == "":
            return ""
        if stage not in BY_RANK:
            raise BadRequest("rank", f"rank = {given!r}: stage {stage.value} is of all ranks")
        if not isinstance(given, str) or given not in self._ranks:
            names = ", ".join(self._ranks) or "absent, this engine has one rank"
            raise BadRequest("rank", f"rank = {given!r}: must be {names}")
        return given

    def _stage(self, given: object) -> Stage:
        stages = STAGES[self._role]
        if isinstance(given, str) and given in [stage.value for stage in stages]:
            return Stage(given)
        names = ", ".join(stage.value for stage in stages)
        want = f"on role {self._role.value} must be one of {names}"
        raise BadRequest("stage", f"stage = {given!r}: {want}")


class RankFaults:
    """A Tamper for one rank."""

    def __init__(self, faults: Faults, rank: str) -> None:
        self._faults, self._rank = faults, rank

    async def before(self, stage: Stage, room: Room) -> None:
        """As of Faults."""
        await self._faults.before(stage, room, self._rank)

    def pages(self, room: Room, pages: list[PageOut]) -> list[PageOut]:
        """Pages as they leave."""
        if self._take("flip-byte"):
            place = self._faults.place()
            pages = flip_byte(pages, place, place % 8)
        if len(pages) > 1 and self._take("swap-pages"):  # one page: stays armed
            pages = swap_pages(pages)
        if self._take("short"):
            pages = drop_last(pages)
        return pages

    def metadata(self, room: Room, metadata: Metadata) -> Metadata:
        """The record as it leaves."""
        if self._take("foreign-room"):
            metadata = foreign_room(metadata)
        if self._take("stale-generation"):
            metadata = stale_generation(metadata)
        return metadata

    def generation(self, room: Room, generation: Generation) -> Generation:
        """Untouched: stale-generation lies in the record."""
        return generation

    def _take(self, kind: str) -> bool:
        return self._faults.take(Stage.VERIFY, (kind,), self._rank) is not None


class DisturbedResolver:
    """A resolver that can be broken; decode.py's way to the directory."""

    def __init__(self, inner: Any, faults: RankFaults) -> None:
        self._inner, self._faults = inner, faults

    async def topology(self, address: str) -> Any:
        """As the inner one."""
        await self._faults.before(Stage.RESOLVE_TOPOLOGY, Room(0))
        return await self._inner.topology(address)

    async def endpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As the inner one."""
        await self._faults.before(Stage.RESOLVE_RANK, Room(0))
        return await self._inner.endpoint(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _number(
    body: Mapping[str, Any], field: str, default: float, most: float, whole: bool = False
) -> float:
    value = body.get(field, default)
    right = isinstance(value, int) or (isinstance(value, float) and not whole)
    if not right or isinstance(value, bool) or not 0 < value <= most:
        kind = "a whole number" if whole else "a number"
        raise BadRequest(field, f"{field} = {value!r}: must be {kind} above 0, at most {most:g}")
    return float(value)

"""Meeting: one attempt, its stages, and how it is shown.

Pure: times are arguments. While a request runs only tuples and numbers are kept; texts are made
when somebody asks. evidence.py remembers Meetings, facts.py makes them. Open it to change what is
shown of an attempt.

    worker-pool availability policy-input pair |----------- first-byte -----------|---- end ----|
                                                register resolve ... verify consume
    the gateway's stages: each ends where the next begins, so they add up to the whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvplane.vocabulary import MEETING, Room, Stage, StageRecord

ORDER = {stage: number for number, stage in enumerate(Stage)}
GATEWAY = "gateway"
LATE = (Stage.FIRST_BYTE.value, Stage.END.value)  # which end after all that the engines tell
ENDS = {"ok": "ok", "open": "open", "client_gone": "client gone"}  # of the stage it ended in


class Trail:
    """When each of the gateway's own stages began."""

    __slots__ = ("_now", "steps")

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.steps: list[tuple[Stage, float]] = []

    def begin(self, stage: Stage) -> None:
        """The stage before ends here."""
        self.steps.append((stage, self._now()))


@dataclass(frozen=True, slots=True)
class Leg:
    """What could be seen of one engine from outside, whoever made it."""

    status: int  # 0 = no answer came
    received_bytes: int
    complete: bool
    error: str = ""

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "status": self.status or None,
            "bytes": self.received_bytes,
            "complete": self.complete,
            "error": self.error or None,
        }


@dataclass(eq=False, slots=True)
class Meeting:
    """One attempt: its rooms, its pair, what was expected and what came of it."""

    request_id: str
    attempt: int  # from 1
    path: str
    model: str
    rooms: tuple[Room, ...]  # empty with a unified worker, and where nobody was chosen
    prefill: dict[str, Any] | None  # worker, url, epoch; later status
    decode: dict[str, Any] | None  # None where nobody was chosen
    why: dict[str, Any]  # depth, load, policy, knowledge, candidates
    predicted_tokens: int | None = None  # cached tokens the index foretold; None = not known
    actual_tokens: int | None = None  # as prefill told; None = it did not
    triple: dict[str, Any] | None = None
    outcome: str = "open"  # open | ok | failed | rejected | client_gone
    error: dict[str, Any] | None = None
    stopped: str = ""  # why it was not tried again; "" where it was, or need not be
    opened_at: float = 0.0  # wall clock
    begun: float = 0.0  # monotonic, as all below
    first_byte: float | None = None
    prefill_ended: float | None = None
    ended: float | None = None
    trail: list[tuple[Stage, float]] = field(default_factory=list)
    stages: dict[Room, list[StageRecord]] = field(default_factory=dict)  # of the engines
    legs: dict[str, Leg] = field(default_factory=dict)
    sides: tuple[Any, ...] = ()  # whom its engines' stages can be asked of
    silent: tuple[str, ...] = ()  # makers of its engines that tell no stages
    collected: bool = False  # nothing more will be told
    traceparent: str = ""  # of the client, as W3C writes it

    @property
    def first_byte_s(self) -> float | None:
        """From its begin."""
        return _after(self.begun, self.first_byte)

    @property
    def duration_s(self) -> float | None:
        """From its begin; None while it is open."""
        return _after(self.begun, self.ended)

    def walked(self) -> Iterator[tuple[Stage, str, float]]:
        """The gateway's own stages of an attempt that is over: outcome and seconds of each."""
        until, outcome = self.ended or self.begun, ENDS.get(self.outcome, "failed")
        for stage, begun in reversed(self.trail):
            yield stage, outcome, until - begun
            until, outcome = begun, "ok"

    def shown(self, room: Room | None = None, now: float = 0.0) -> dict[str, Any]:
        """As JSON; of one room, or of the attempt as a whole. Rooms are text: 64-bit numbers
        break JavaScript."""
        found: dict[str, Any] = {"room": str(room)} if room is not None else {}
        return found | {
            "rooms": [str(one) for one in self.rooms],
            "request_id": self.request_id,
            "traceparent": self.traceparent or None,
            "attempt": self.attempt,
            "path": self.path,
            "model": self.model,
            "outcome": self.outcome,
            "error": self.error,
            "stopped": self.stopped or None,
            "current": self.current(room, now) if self.outcome == "open" else None,
            "opened_at": self.opened_at,
            "first_byte_s": self.first_byte_s,
            "duration_s": self.duration_s,
            "prefill": self.prefill,
            "decode": self.decode,
            "triple": self.triple,
            "why": self.why,
            "cached_tokens": {"predicted": self.predicted_tokens, "actual": self.actual_tokens},
            "legs": self._legs(),
            "collected": self.collected,
            "stages": list(self.timeline(room, now)),
        }

    def current(self, room: Room | None, now: float) -> dict[str, Any] | None:
        """Where an open attempt is: the gateway's own stage, and how far its engines told."""
        if not self.trail:
            return None
        stage, begun = self.trail[-1]
        rooms = self.stages if room is None else (room,)
        records = (record for one in rooms for record in self.stages.get(one, ()))
        told = max(records, key=_order, default=None)
        sides = (("decode", self.decode), ("prefill", self.prefill))
        peers = {name: side["worker"] for name, side in sides if side is not None}
        return {
            "stage": stage.value,
            "for_s": round(max(0.0, now - begun), 6),
            "waits_for": peers,
            "last_told": None if told is None else told.stage.value,
        }

    def timeline(self, room: Room | None = None, now: float = 0.0) -> Iterator[dict[str, Any]]:
        """Every stage in order: the gateway's, the engines', and which of these nobody told of."""
        told = list(self.stages.get(room, ())) if room is not None else []
        own = list(self._own(now))
        found = [self._told(record) for record in told]
        if room is not None and self.collected and self.outcome not in ("open", "client_gone"):
            missing = [stage for stage in MEETING if all(one.stage is not stage for one in told)]
            found += [self._unseen(stage) for stage in missing]
        found.sort(key=lambda one: (ORDER[Stage(one["stage"])], one["at"] or 0.0))
        late = next((at for at, one in enumerate(own) if one["stage"] in LATE), len(own))
        return iter([*own[:late], *found, *own[late:]])

    def _own(self, now: float) -> Iterator[dict[str, Any]]:
        last = len(self.trail) - 1
        end = self.ended if self.ended is not None else now
        for number, (stage, begun) in enumerate(self.trail):
            outcome, until = "ok", end if number == last else self.trail[number + 1][1]
            if number == last:
                outcome = ENDS.get(self.outcome, "failed")
            detail = self._said(number, stage) if outcome != "failed" else self._failure
            begin_s, end_s = _after(self.begun, begun) or 0.0, _after(self.begun, until) or 0.0
            yield {
                "stage": stage.value,
                "outcome": outcome,
                "begin_s": begin_s,
                "duration_s": round(end_s - begin_s, 6),
                "detail": detail,
                "by": GATEWAY,
                "at": round(self.opened_at + end_s, 6),
            }

    @property
    def _failure(self) -> str:
        return str((self.error or {}).get("message") or "no reason given")

    def _said(self, number: int, stage: Stage) -> str:
        """What the gateway knew at the end of one of its stages that went well."""
        why = self.why
        if stage is Stage.POLICY_INPUT and number == 0:
            tokens = why.get("prompt_tokens")
            return f"{tokens} tokens" if tokens else "no tokens"
        if stage is Stage.POLICY_INPUT and why:
            known = why["knowledge"] + (f": {why['reason']}" if why["reason"] else "")
            return f"{why['depth_blocks']} of {why['asked_blocks']} blocks held, {known}"
        if stage is Stage.AVAILABILITY and why:
            return f"{why['candidates']} could be chosen"
        if stage is Stage.PAIR and self.decode is not None:
            both = [side["worker"] for side in (self.prefill, self.decode) if side is not None]
            return " and ".join(both)
        return ""

    def _told(self, record: StageRecord) -> dict[str, Any]:
        begin_s = record.at - record.duration_s - self.opened_at if record.at else None
        return {
            "stage": record.stage.value,
            "outcome": record.outcome,
            "begin_s": None if begin_s is None else round(max(0.0, begin_s), 6),
            "duration_s": record.duration_s,
            "detail": record.detail,
            "by": record.by,
            "at": record.at,
        }

    def _unseen(self, stage: Stage) -> dict[str, Any]:
        makers = " and ".join(self.silent)
        detail = f"{makers} tells nothing of it" if makers else "no engine told of it"
        return {
            "stage": stage.value,
            "outcome": "not observed",
            "begin_s": None,
            "duration_s": None,
            "detail": detail,
            "by": "",
            "at": None,
        }

    def _legs(self) -> dict[str, Any]:
        found = {side: leg.shown() for side, leg in self.legs.items()}
        if "prefill" in found:
            found["prefill"]["end_s"] = _after(self.begun, self.prefill_ended)
        return found


def _after(begun: float, at: float | None) -> float | None:
    return None if at is None else round(at - begun, 6)


def _order(record: StageRecord) -> tuple[int, float]:
    return ORDER[record.stage], record.at

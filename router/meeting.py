"""Meeting: one attempt, its stages, and how it is shown.

Pure: times are arguments. While a request runs only tuples and numbers are kept; texts are made
when somebody asks. evidence.py remembers Meetings, facts.py makes them. Open it to change what is
shown of an attempt.

    worker-pool availability policy-input pair |----------- first-byte -----------|---- end ----|
                                                register resolve ... verify consume
    the gateway's stages: each ends where the next begins, so they add up to the whole
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from kvplane.vocabulary import MEETING, Room, Stage, StageRecord

from .remembered import Leg, Party, Why

INPUT, POOL = Stage.POLICY_INPUT, Stage.POOL  # named once: every request passes them
FIRST_BYTE, END = Stage.FIRST_BYTE, Stage.END
ORDER = {stage: number for number, stage in enumerate(Stage)}
GATEWAY = "gateway"
NONE: Mapping[Any, Any] = MappingProxyType({})
LATE_S = 60.0  # after an attempt nothing of it begins; or not by a clock that agrees with ours
LATE = (FIRST_BYTE.value, END.value)  # which end after all that the engines tell
ENDS = {"ok": "ok", "open": "open", "client_gone": "client gone"}  # of the stage it ended in


class Trail:
    """When each of the gateway's own stages began."""

    __slots__ = ("now", "steps")

    def __init__(self, now: Callable[[], float], *steps: Any) -> None:
        self.now, self.steps = now, [*steps]  # stage, when it began, stage, ...

    def begin(self, stage: Stage) -> None:
        """The stage before ends here."""
        self.steps += (stage, self.now())


class Meeting(msgspec.Struct, eq=False, gc=False):
    """One attempt: its rooms, its pair, what was expected and what came of it. No cycle goes
    through it: what it holds does not know it."""

    request_id: str
    attempt: int  # from 1
    path: str
    model: str
    rooms: tuple[Room, ...]  # empty with a unified worker, and where nobody was chosen
    prefill: Party | None
    decode: Party | None  # None where nobody was chosen
    why: Why | None  # None as well
    predicted_tokens: int | None = None  # cached tokens the index foretold; None = not known
    actual_tokens: int | None = None  # as prefill told; None = it did not
    directory: tuple[str, int] | None = None  # host and port of prefill's, where it is looked at
    sides: tuple[Any, ...] = ()  # whom its engines' stages can be asked of
    silent: tuple[str, ...] = ()  # makers of its engines that tell no stages
    traceparent: str = ""  # of the client, as W3C writes it
    steps: Sequence[Any] = ()  # its trail's; once it is over and counted, only when each began
    begun: float = 0.0  # monotonic, as all but the next
    opened_at: float = 0.0  # wall clock
    decode_tokens: int = 0  # booked on each when it was chosen
    decode_requests: int = 0
    prefill_tokens: int = 0
    prefill_requests: int = 0
    outcome: str = "open"  # open | ok | failed | rejected | client_gone
    error: dict[str, Any] | None = None
    stopped: str = ""  # why it was not tried again; "" where it was, or need not be
    first_byte: float | None = None
    prefill_ended: float | None = None
    ended: float | None = None
    walk: tuple[Stage, ...] | None = None  # its stages, once counted; one object for all alike
    stages: Mapping[Room, list[StageRecord]] = NONE  # of the engines
    prefill_leg: Leg | None = None  # once they ended
    decode_leg: Leg | None = None
    collected: bool = False  # nothing more will be told

    @property
    def first_byte_s(self) -> float | None:
        """From its begin."""
        return _after(self.begun, self.first_byte)

    @property
    def duration_s(self) -> float | None:
        """From its begin; None while it is open."""
        return _after(self.begun, self.ended)

    @property
    def parties(self) -> list[Party]:
        """Prefill, where there is one, and decode, where somebody was chosen."""
        return [one for one in (self.prefill, self.decode) if one is not None]

    @property
    def trail(self) -> list[tuple[Stage, float]]:
        """Its own stages, and when each began."""
        if self.walk is not None:
            return list(zip(self.walk, self.steps, strict=True))
        return list(zip(self.steps[::2], self.steps[1::2], strict=True))

    def began(self, now: float) -> None:
        """The answer began to leave."""
        assert self.walk is None, "it is over"
        self.first_byte = now
        self.steps += (END, now)  # type: ignore[operator]  # a list, or nothing yet

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
            "prefill": self.prefill
            and self.prefill.shown(self.prefill_tokens, self.prefill_requests),
            "decode": self.decode and self.decode.shown(self.decode_tokens, self.decode_requests),
            "triple": self._triple(),
            "why": {} if self.why is None else msgspec.structs.asdict(self.why),
            "cached_tokens": {"predicted": self.predicted_tokens, "actual": self.actual_tokens},
            "legs": self._legs(),
            "collected": self.collected,
            "stages": list(self.timeline(room, now)),
        }

    def current(self, room: Room | None, now: float) -> dict[str, Any] | None:
        """Where an open attempt is: the gateway's own stage, and how far its engines told."""
        trail = self.trail
        if not trail:
            return None
        stage, begun = trail[-1]
        rooms = self.stages if room is None else (room,)
        records = (record for one in rooms for record in self.stages.get(one, ()))
        told = max(records, key=_order, default=None)
        sides = (("decode", self.decode), ("prefill", self.prefill))
        peers = {name: side.worker for name, side in sides if side is not None}
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
        trail = self.trail
        last, end = len(trail) - 1, self.ended if self.ended is not None else now
        for number, (stage, begun) in enumerate(trail):
            outcome, until = "ok", end if number == last else trail[number + 1][1]
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
        if stage is INPUT and number == 0:
            return f"{why.prompt_tokens} tokens" if why and why.prompt_tokens else "no tokens"
        if stage is INPUT and why:
            known = why.knowledge + (f": {why.reason}" if why.reason else "")
            return f"{why.depth_blocks} of {why.asked_blocks} blocks held, {known}"
        if stage is Stage.AVAILABILITY and why:
            return f"{why.candidates} could be chosen"
        if stage is Stage.PAIR:
            return " and ".join([party.worker for party in self.parties])
        return ""

    def _told(self, record: StageRecord) -> dict[str, Any]:
        begin_s = record.at - record.duration_s - self.opened_at if record.at else None
        took_s = self.duration_s
        if begin_s is not None and took_s is not None and begin_s > took_s + LATE_S:
            begin_s = None  # by another clock than ours: nobody knows
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

    def _triple(self) -> dict[str, Any] | None:
        if self.directory is None:
            return None
        host, port = self.directory
        return {"host": host, "port": port}

    def _legs(self) -> dict[str, Any]:
        both = (("prefill", self.prefill_leg), ("decode", self.decode_leg))
        found = {side: leg.shown() for side, leg in both if leg is not None}
        if "prefill" in found:
            found["prefill"]["end_s"] = _after(self.begun, self.prefill_ended)
        return found


def _after(begun: float, at: float | None) -> float | None:
    return None if at is None else round(at - begun, 6)


def _order(record: StageRecord) -> tuple[int, float]:
    return ORDER[record.stage], record.at

"""Breaker: is this worker given requests, or left alone for a while?

Pure: time is an argument. The gateway asks before it picks and reports after each leg, on the side
that caused what happened. Open it to change when a circuit opens or who may probe it.

    CLOSED   --tripped-->     OPEN       requests flow; outcomes are counted in a sliding window
    OPEN     --pause over-->  PROBING    none flow
    PROBING  --enough-->      CLOSED     exactly one at a time does
    PROBING  --fault-->       OPEN       and the pause doubles
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvplane.vocabulary import Pod, Worker

from .settings import BreakerSettings


class State(StrEnum):
    """Of one circuit."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Outcome(StrEnum):
    """Of one leg, as the circuit sees it."""

    SUCCESS = "success"
    NEUTRAL = "neutral"  # the caller's mistake, an abort, backpressure: says nothing of health
    FAULT = "fault"


class Cause(StrEnum):
    """What moves a circuit."""

    TRIPPED = "tripped"
    PAUSE_OVER = "pause over"
    ENOUGH = "enough"
    FAULT = "fault"


NEXT: dict[tuple[State, Cause], State] = {
    (State.CLOSED, Cause.TRIPPED): State.OPEN,
    (State.OPEN, Cause.PAUSE_OVER): State.PROBING,
    (State.PROBING, Cause.ENOUGH): State.CLOSED,
    (State.PROBING, Cause.FAULT): State.OPEN,
}

BUCKETS = 12  # the window moves in this many steps


def outcome(status: int | None, retry_after: bool = False) -> Outcome:
    """Judge an engine's answer; `status` None = no answer: refused, cut, stalled.

    200 success    400 404 422 neutral    429, and 503 that says when to come back: busy, neutral
    """
    if status is None:
        return Outcome.FAULT
    if status < 400:
        return Outcome.SUCCESS
    if status < 500 or (status == 503 and retry_after):
        return Outcome.NEUTRAL
    return Outcome.FAULT


@dataclass(frozen=True, slots=True)
class Ticket:
    """Leave to send one request; given back with its outcome. Void once the circuit moved on."""

    life: int
    probe: bool


class Breaker:
    """The circuit of one worker."""

    def __init__(self, settings: BreakerSettings) -> None:
        self._settings = settings
        self._state = State.CLOSED
        self._life = 0  # counts moves and probes: only a ticket of now counts
        self._until = 0.0  # OPEN: end of the pause; PROBING: when a lost probe gives its place back
        self._pause_s = settings.pause_s
        self._probing = False
        self._good = 0  # good probes in a row
        self._row = 0  # faults in a row
        self._window: deque[list[float]] = deque(maxlen=BUCKETS + 1)  # [start, successes, faults]

    def state(self, now: float) -> State:
        """The state now; a pause that is over is noticed here."""
        if self._state is State.OPEN and now >= self._until:
            self._move(Cause.PAUSE_OVER)
        return self._state

    def admits(self, now: float) -> bool:
        """Would `admit` say yes?"""
        state = self.state(now)
        return state is State.CLOSED or (
            state is State.PROBING and (not self._probing or now >= self._until)
        )

    def admit(self, now: float) -> Ticket | None:
        """Leave to send one request now, or None. While probing there is one place."""
        if not self.admits(now):
            return None
        if self._state is State.PROBING:
            self._probing, self._until = True, now + self._settings.probe_s
            self._life += 1  # a probe that was lost cannot report any more
            return Ticket(self._life, True)
        return Ticket(self._life, False)

    def book(self, ticket: Ticket, what: Outcome, now: float) -> bool:
        """Report what became of a request. True where the state changed by it."""
        if ticket.life != self._life:
            return False
        if ticket.probe:
            return self._judge_probe(what, now)
        if what is Outcome.NEUTRAL:
            return False
        self._count(what, now)
        if not self._tripped(now):
            return False
        self._pause_s = self._settings.pause_s
        self._open(Cause.TRIPPED, now)
        return True

    def wait_s(self, now: float) -> float:
        """Seconds until a request may flow; 0 where one may now; 1 where a probe is under way,
        since nobody knows how long it takes."""
        if self.admits(now):
            return 0.0
        return 1.0 if self._state is State.PROBING else self._until - now

    def _judge_probe(self, what: Outcome, now: float) -> bool:
        self._probing = False
        self._life += 1  # one report per probe
        if what is Outcome.FAULT:
            self._pause_s = min(self._pause_s * 2, self._settings.most_pause_s)
            self._open(Cause.FAULT, now)
            return True
        self._good += what is Outcome.SUCCESS
        if self._good < self._settings.successes:
            return False
        self._move(Cause.ENOUGH)
        return True

    def _open(self, cause: Cause, now: float) -> None:
        self._move(cause)
        self._until = now + self._pause_s

    def _move(self, cause: Cause) -> None:
        self._state = NEXT[self._state, cause]
        self._life += 1
        self._probing, self._good, self._row = False, 0, 0
        self._window.clear()

    def _count(self, what: Outcome, now: float) -> None:
        step = self._settings.window_s / BUCKETS
        if not self._window or now >= self._window[-1][0] + step:
            self._window.append([now, 0, 0])
        fault = what is Outcome.FAULT
        self._window[-1][2 if fault else 1] += 1
        self._row = self._row + 1 if fault else 0

    def _tripped(self, now: float) -> bool:
        """Enough faults in a row, or enough in the window and a large share of it."""
        if self._row >= self._settings.faults:
            return True
        recent = [b for b in self._window if b[0] > now - self._settings.window_s]
        faults = sum(bucket[2] for bucket in recent)
        judged = faults + sum(bucket[1] for bucket in recent)
        return faults >= self._settings.faults and faults >= self._settings.share * judged


class Breakers:
    """One circuit per worker, made at first use."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._all: dict[Worker, Breaker] = {}

    def of(self, worker: Worker) -> Breaker:
        """The circuit of a worker."""
        found = self._all.get(worker)
        if found is None:
            found = self._all[worker] = Breaker(self._settings)
        return found

    def admits(self, worker: Worker, now: float) -> bool:
        """May this worker be picked? Makes no circuit for one that never failed."""
        found = self._all.get(worker)
        return found is None or found.admits(now)

    def wait_s(self, workers: Iterable[Worker], now: float) -> float:
        """Seconds until the first of them takes a request again: what Retry-After says."""
        return min((self.of(worker).wait_s(now) for worker in workers), default=0.0)

    def forget(self, pod: Pod) -> None:
        """A pod left, or began a new life: its past is not held against it."""
        self._all = {worker: one for worker, one in self._all.items() if worker.pod != pod}

    def states(self, now: float) -> dict[Worker, State]:
        """All circuits, for metrics and admin routes."""
        return {worker: one.state(now) for worker, one in self._all.items()}

"""Breaker: is this worker given requests, or left alone for a while?

Pure: time is an argument. availability.py asks before somebody is picked, journey.py reports each
leg, on the side that caused what happened (blame.py). Open it to change when a circuit opens, how
long it stays so, or who may probe it.

    CLOSED   --tripped-->     OPEN       requests flow; outcomes are counted in a sliding window
    OPEN     --pause over-->  PROBING    none flow
    PROBING  --enough-->      CLOSED     exactly one at a time does
    PROBING  --fault-->       OPEN       and the pause doubles

Two signs make the pause a short one: a health check that says well, and that nobody else is left.
It doubles with every probe that fails like the long one does, so that a worker whose health lies
gets ever fewer requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from kvplane.vocabulary import Pod, Worker

from .pairs import Pairs
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
    PEER = "peer_fault"  # the other leg's worker failed: neutral, counted apart
    FAULT = "fault"


SUCCESS, NEUTRAL, PEER = Outcome.SUCCESS, Outcome.NEUTRAL, Outcome.PEER  # asked for with every leg


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
ALWAYS = float("-inf")


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


@dataclass(slots=True, eq=False)
class Ticket:
    """Leave to send one request; given back with its outcome. Void once the circuit moved on.

    While a circuit is CLOSED all have one. Before `full` a success only has to be counted here.
    A probe reports success with its first byte, and may report a fault behind it.
    """

    life: int
    probe: bool
    moves: int = 0  # of the circuit, before a probe
    successes: int = 0
    full: float = ALWAYS  # when the window's last bucket is


Moved = Callable[["Breaker", float], None]


class Breaker:
    """The circuit of one worker."""

    def __init__(
        self, settings: BreakerSettings, on_move: Moved = lambda breaker, now: None
    ) -> None:
        self._settings, self._on_move = settings, on_move
        self._state = State.CLOSED
        self._life = self._moves = 0  # a life is also a probe's: only a ticket of now counts
        self._until = 0.0  # OPEN: end of the pause; PROBING: when a lost probe gives its place back
        self._opened = 0.0
        self._pause_s = self._quick_s = 0.0
        self._first_pauses()
        self._probing = False
        self._good = 0  # good probes in a row
        self._row, self._row_at = 0, 0  # faults in a row, and the successes before it
        self._window: deque[list[float]] = deque(maxlen=BUCKETS + 1)  # see _step
        self.leave: Ticket | None = Ticket(0, False)  # for all while CLOSED, of this life

    def state(self, now: float) -> State:
        """The state now; a pause that is over is noticed here."""
        if self._state is State.OPEN and now >= self._until:
            self._move(Cause.PAUSE_OVER, now)
        return self._state

    @property
    def closed(self) -> bool:
        """Do requests flow? Needs no time: only a request or a probe closes a circuit."""
        return self._state is State.CLOSED

    def admits(self, now: float) -> bool:
        """Would `admit` say yes?"""
        state = self.state(now)
        return state is State.CLOSED or (
            state is State.PROBING and (not self._probing or now >= self._until)
        )

    def admit(self, now: float) -> Ticket | None:
        """Leave to send one request now, or None. While probing there is one place."""
        if self.leave is not None or not self.admits(now):
            return self.leave
        self._probing, self._until = True, now + self._settings.probe_s
        self._life += 1  # a probe that was lost cannot report any more
        return Ticket(self._life, True, self._moves)

    def book(self, ticket: Ticket, what: Outcome, now: float) -> bool:
        """Report what became of a request. True where the state changed by it."""
        if ticket.life != self._life:
            return what is Outcome.FAULT and self._broke(ticket, now)
        if ticket.probe:
            ticket.successes += what is SUCCESS
            return self._judge_probe(what, now)
        if what is NEUTRAL or what is PEER:
            return False
        if now >= ticket.full:
            self._step(ticket, now)
        if what is SUCCESS:
            ticket.successes += 1
            return False
        self._window[-1][2] += 1
        self._row = 1 if self._row_at != ticket.successes else self._row + 1
        self._row_at = ticket.successes
        if not self._tripped(ticket, now):
            return False
        self._first_pauses()
        self._open(Cause.TRIPPED, now)
        return True

    def hasten(self, now: float) -> None:
        """There is a reason to believe in it, or no other choice: the short pause is enough."""
        if self._state is State.OPEN and now >= self._opened:
            self._until = min(self._until, self._opened + self._quick_s)

    def wait_s(self, now: float) -> float:
        """Seconds until a request may flow; 0 where one may now; 1 where a probe is under way,
        since nobody knows how long it takes."""
        if self.admits(now):
            return 0.0
        return 1.0 if self._state is State.PROBING else self._until - now

    def _broke(self, ticket: Ticket, now: float) -> bool:
        """A probe whose answer began well and broke off: a few of them would close the circuit."""
        same = ticket.probe and ticket.successes > 0 and ticket.moves == self._moves
        return same and self._judge_probe(Outcome.FAULT, now)

    def _judge_probe(self, what: Outcome, now: float) -> bool:
        self._probing = False
        self._life += 1  # one report per probe
        if what is Outcome.FAULT:
            most = self._settings.most_pause_s
            self._pause_s = min(self._pause_s * 2, most)
            self._quick_s = min(self._quick_s * 2, most)
            self._open(Cause.FAULT, now)
            return True
        self._good += what is Outcome.SUCCESS
        if self._good < self._settings.successes:
            return False
        self._move(Cause.ENOUGH, now)
        return True

    def _first_pauses(self) -> None:
        self._pause_s = self._settings.pause_s
        self._quick_s = min(self._settings.quick_s, self._pause_s)

    def _open(self, cause: Cause, now: float) -> None:
        self._move(cause, now)
        self._opened, self._until = now, now + self._pause_s

    def _move(self, cause: Cause, now: float) -> None:
        self._state = NEXT[self._state, cause]
        self._life, self._moves = self._life + 1, self._moves + 1
        self._probing, self._good, self._row = False, 0, 0
        self._window.clear()
        self.leave = Ticket(self._life, False) if self.closed else None
        self._on_move(self, now)

    def _step(self, leave: Ticket, now: float) -> None:
        """A new bucket: its begin, successes before it, faults; the last one is full."""
        leave.full = now + self._settings.window_s / BUCKETS
        self._window.append([now, leave.successes, 0])

    def _tripped(self, leave: Ticket, now: float) -> bool:
        """Enough faults in a row, or enough in the window and a large share of it."""
        if self._row >= self._settings.faults:
            return True
        recent = [b for b in self._window if b[0] > now - self._settings.window_s]
        if not recent:  # it is shorter than this clock can tell
            return False
        faults = sum(bucket[2] for bucket in recent)
        judged = faults + leave.successes - recent[0][1]
        return faults >= self._settings.faults and faults >= self._settings.share * judged


class Circuits(dict[Worker, Breaker]):
    """By worker, made at first use; to look up one that is there calls nothing."""

    def __init__(self, make: Callable[[Worker], Breaker]) -> None:
        self._make: Callable[[Worker], Breaker] = make

    def __missing__(self, worker: Worker) -> Breaker:
        made = self[worker] = self._make(worker)
        return made


class Breakers:
    """One circuit per worker, made at first use; and what failed in pairs."""

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self.pairs = Pairs(self._settings)
        self.circuits = Circuits(lambda who: Breaker(self._settings, partial(self._moved, who)))
        self.shut: dict[Worker, Breaker] = {}  # those that are not closed: usually none
        self.on_closed: Callable[[Worker, float], None] = lambda worker, now: None

    def of(self, worker: Worker) -> Breaker:
        """The circuit of a worker."""
        return self.circuits[worker]

    def admits(self, worker: Worker, now: float) -> bool:
        """May this worker be picked? Makes no circuit for one that never failed."""
        found = self.shut.get(worker)
        return found is None or found.admits(now)

    def wait_s(self, workers: Iterable[Worker], now: float) -> float:
        """Seconds until the first of them takes a request again: what Retry-After says."""
        return min((self.of(worker).wait_s(now) for worker in workers), default=0.0)

    def hasten(self, workers: Iterable[Worker], now: float) -> None:
        """Nobody else is left: the short pause is enough for these."""
        for worker in workers:
            if (one := self.shut.get(worker)) is not None:
                one.hasten(now)

    def well(self, pod: Pod, now: float) -> bool:
        """A health check of a pod said well: its open circuits are probed soon. False where it has
        any, so that its health is looked at more often."""
        mine = [worker for worker in self.shut if worker.pod == pod]
        self.hasten(mine, now)
        return not mine

    def forget(self, pod: Pod) -> None:
        """A pod left, or began a new life: its past is not held against it."""
        for worker in [worker for worker in self.circuits if worker.pod == pod]:
            del self.circuits[worker]
        self.shut = {worker: one for worker, one in self.shut.items() if worker.pod != pod}
        self.pairs.forget(pod)

    def states(self, now: float) -> dict[Worker, State]:
        """All circuits, for metrics and admin routes."""
        return {worker: one.state(now) for worker, one in self.circuits.items()}

    def _moved(self, worker: Worker, breaker: Breaker, now: float) -> None:
        if self.circuits.get(worker) is not breaker:
            return  # of a pod that left meanwhile
        if not breaker.closed:
            self.shut[worker] = breaker
        elif self.shut.pop(worker, None) is not None:
            self.on_closed(worker, now)

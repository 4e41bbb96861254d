"""Account: what one attempt takes of its workers, and what it tells of them.

Pure: time is an argument. journey.py opens one per attempt and closes it on every path: load and
leave of both circuits are taken together and given back once. blame.py says what a failure means;
it is booked here, on the side that caused it, on both, or on the pair. Open it to change what a
first byte proves, or who is left out of the next attempt.

    first byte     both work: success at once, not when a long stream has ended
    a fault        one side's; the other leg's is a peer fault, which counts for nothing
    shared         the pair's (pairs.py), until one of them fails with others too
    4xx, busy, client gone, stale connection, no free connection     nobody's
"""

from __future__ import annotations

from collections.abc import Callable

from kvplane.vocabulary import Worker

from .blame import DECODE, PREFILL, LegFailed, Side
from .breaker import NEUTRAL, SUCCESS, Breaker, Breakers, Outcome, Ticket, outcome
from .fleet import Fleet
from .target import Booking, Target

MOST_BUSY_S = 30.0  # a worker that asks to be left alone is, for this long, while others serve


class Stake(Booking, eq=False, gc=False):
    """One side's part: its load, and its circuit, which is its own: a later life has another."""

    side: Side
    circuit: Breaker
    ticket: Ticket | None
    laid: Outcome | None = None  # by the failure of the attempt; else it went as far as it went


class Account:
    """Load and circuits of one attempt: leave to send, and load until each side is released."""

    __slots__ = ("_breakers", "_fleet", "_told", "decode", "prefill", "without")

    def __init__(
        self,
        fleet: Fleet,
        breakers: Breakers,
        now: float,
        decode: Target,
        kept: int,
        prefill: Target | None = None,
        computed: int = 0,
    ) -> None:
        """`decode` may be a unified worker; `kept` and `computed` are tokens."""
        self._fleet, self._breakers = fleet, breakers
        self._told = False  # success was booked already
        self.without: tuple[Worker, ...] = ()  # who is left out of the next attempt
        self.prefill: Stake | None = None
        circuit = breakers.circuits[decode.worker]
        fleet.load(decode, kept)
        ticket = circuit.leave or circuit.admit(now)
        self.decode = Stake(decode, kept, True, True, DECODE, circuit, ticket)
        if prefill is not None:
            circuit = breakers.circuits[prefill.worker]
            fleet.load(prefill, computed)
            ticket = circuit.leave or circuit.admit(now)
            self.prefill = Stake(prefill, computed, True, True, PREFILL, circuit, ticket)

    def release_prefill(self) -> None:
        """Where there is one: its work is over. Idempotent, as `decode.release` is."""
        if self.prefill is not None:
            self.prefill.release()

    def began(self, now: float) -> None:
        """The answer begins to leave: what prefill had to do is done, and decode works."""
        self._told, prefill = True, self.prefill
        for stake in (self.decode,) if prefill is None else (self.decode, prefill):
            target = stake.target
            if stake.open:
                stake.waiting = False
                target.waiting_requests -= 1
            if target.pulse.sound:
                target.signs += 1
            else:
                self._fleet.answered(target, now)
            if (ticket := stake.ticket) is None:
                continue
            if now < ticket.full:
                ticket.successes += 1
            else:
                stake.circuit.book(ticket, SUCCESS, now)
        if self._breakers.pairs.faults and (pair := self._pair()) is not None:
            self._breakers.pairs.succeeded(*pair)

    def judge(self, failed: LegFailed, both_silent: bool, now: float) -> Side:
        """Whose fault was it? Returns the side that is named to the operator."""
        what = outcome(failed.status or None, failed.cause.retry_after is not None)
        self._signs(failed, now)
        side = failed.guilty if self._stake(failed.guilty) is not None else Side.DECODE
        pair = self._pair()
        if failed.nobodys_fault:
            self.without = self._worker(side) if failed.crowded else ()
            return side
        if pair is None or what is not Outcome.FAULT or not (failed.shared or both_silent):
            self._lay(side, what)
            return side
        if (sick := self._sick()) is not None:
            self._lay(sick, what)
            return sick
        blamed = self._breakers.pairs.failed(*pair, now)
        for stake in self._stakes:
            mine = stake.target.worker in blamed
            stake.laid = what if mine else Outcome.PEER if blamed else Outcome.NEUTRAL
        self.without = blamed or pair
        return side if not blamed or len(blamed) == 2 else self._side_of(blamed[0])

    def close(
        self,
        now: float,
        count: Callable[[Side, Target, Outcome], None],
        opened: Callable[[Target], None],
    ) -> None:
        """Report to both circuits; everything is counted once, on every path. Load is given back
        apart: prefill may be at work yet."""
        told = SUCCESS if self._told else NEUTRAL
        for stake in self._stakes:
            what = stake.laid or told
            count(stake.side, stake.target, what)
            if (what is SUCCESS and self._told) or (ticket := stake.ticket) is None:
                continue
            if stake.circuit.book(ticket, what, now) and not stake.circuit.closed:
                opened(stake.target)

    def _lay(self, side: Side, what: Outcome) -> None:
        """On one side alone."""
        for stake in self._stakes:
            if stake.side is side:
                stake.laid = what
            elif not self._told:  # what worked until the first byte has worked
                stake.laid = Outcome.PEER if what is Outcome.FAULT else Outcome.NEUTRAL
        self.without = self._worker(side)

    def _signs(self, failed: LegFailed, now: float) -> None:
        """What a failure says of a worker's health: a refusal in words is a sign of life."""
        stake = self._stake(failed.side)
        if stake is None:
            return
        if failed.status in (429, 503) and (later_s := failed.retry_after_s):
            self._fleet.uneasy.busy(stake.target, now + min(later_s, MOST_BUSY_S))
        if 0 < failed.status < 500:
            self._fleet.answered(stake.target, now)
        elif failed.unreached:
            self._fleet.refused(stake.target, now, failed.cause.message)

    def _sick(self) -> Side | None:
        """The one of two whose health is in doubt, where it is one."""
        doubt = [stake.side for stake in self._stakes if not stake.target.pulse.sound]
        return doubt[0] if len(doubt) == 1 else None

    @property
    def _stakes(self) -> tuple[Stake, ...]:
        """One or two."""
        return (self.decode,) if self.prefill is None else (self.decode, self.prefill)

    def _pair(self) -> tuple[Worker, Worker] | None:
        if self.prefill is None:
            return None
        return self.prefill.target.worker, self.decode.target.worker

    def _stake(self, side: Side) -> Stake | None:
        return self.decode if side is DECODE else self.prefill

    def _worker(self, side: Side) -> tuple[Worker, ...]:
        return tuple(stake.target.worker for stake in self._stakes if stake.side is side)

    def _side_of(self, worker: Worker) -> Side:
        return next(stake.side for stake in self._stakes if stake.target.worker == worker)

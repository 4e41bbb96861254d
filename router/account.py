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

from .blame import LegFailed, Side
from .breaker import NEUTRAL, SUCCESS, Breaker, Breakers, Outcome, Ticket, outcome
from .fleet import Fleet
from .target import Booking, Target

MOST_BUSY_S = 30.0  # a worker that asks to be left alone is, for this long, while others serve


class _Stake(Booking, eq=False):
    """One side's part: its load, and its circuit, which is its own: a later life has another."""

    circuit: Breaker
    ticket: Ticket | None
    side: Side
    what: Outcome = NEUTRAL
    told: bool = False  # success was booked already


class Account:
    """Load and circuits of one attempt."""

    __slots__ = ("_breakers", "_fleet", "_stakes", "without")

    def __init__(self, fleet: Fleet, breakers: Breakers) -> None:
        self._fleet, self._breakers = fleet, breakers
        self._stakes: tuple[_Stake, ...] = ()  # one or two
        self.without: tuple[Worker, ...] = ()  # who is left out of the next attempt

    def take(self, side: Side, target: Target, tokens: int, now: float) -> None:
        """Leave to send, and load until `release`."""
        circuit = self._breakers.of(target.worker)
        self._fleet.load(target, tokens)
        ticket = circuit.leave or circuit.admit(now)
        self._stakes += (_Stake(target, tokens, True, True, circuit, ticket, side),)

    def release(self, side: Side) -> None:
        """The work of one side is over. Idempotent."""
        for stake in self._stakes:
            if stake.side is side and stake.open:
                stake.release()

    def began(self, now: float) -> None:
        """The answer begins to leave: what prefill had to do is done, and decode works."""
        for stake in self._stakes:
            stake.what, stake.told = SUCCESS, True
            if stake.waiting:
                stake.began()
            self._fleet.answered(stake.target, now)
            if (ticket := stake.ticket) is not None:
                stake.circuit.succeeded(ticket, now)
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
            stake.what = what if mine else Outcome.PEER if blamed else Outcome.NEUTRAL
        self.without = blamed or pair
        return side if not blamed or len(blamed) == 2 else self._side_of(blamed[0])

    def close(
        self,
        now: float,
        count: Callable[[Side, Target, Outcome], None],
        opened: Callable[[Target], None],
    ) -> None:
        """Report to both circuits; everything is counted once, on every path. Decode's load ends
        here; prefill may be at work yet."""
        for stake in self._stakes:
            what, ticket = stake.what, stake.ticket
            count(stake.side, stake.target, what)
            if stake.open and stake.side is Side.DECODE:
                stake.release()
            if ticket is None or (stake.told and what is SUCCESS):
                continue
            if stake.circuit.book(ticket, what, now) and not stake.circuit.closed:
                opened(stake.target)

    def _lay(self, side: Side, what: Outcome) -> None:
        """On one side alone."""
        for stake in self._stakes:
            if stake.side is side:
                stake.what = what
            elif not stake.told:  # what worked until the first byte has worked
                stake.what = Outcome.PEER if what is Outcome.FAULT else Outcome.NEUTRAL
        self.without = self._worker(side)

    def _signs(self, failed: LegFailed, now: float) -> None:
        """What a failure says of a worker's health: a refusal in words is a sign of life."""
        stake = self._stake(failed.side)
        if stake is None:
            return
        if failed.status in (429, 503) and (later_s := failed.retry_after_s):
            stake.target.busy_until = now + min(later_s, MOST_BUSY_S)
            self._fleet.uneasy.add(stake.target)
        if 0 < failed.status < 500:
            self._fleet.answered(stake.target, now)
        elif failed.unreached:
            self._fleet.refused(stake.target, now, failed.cause.message)

    def _sick(self) -> Side | None:
        """The one of two whose health is in doubt, where it is one."""
        doubt = [
            stake.side
            for stake in self._stakes
            if stake.target.pulse.streak < 0 or not stake.target.pulse.healthy
        ]
        return doubt[0] if len(doubt) == 1 else None

    def _pair(self) -> tuple[Worker, Worker] | None:
        prefill, decode = self._stake(Side.PREFILL), self._stake(Side.DECODE)
        if prefill is None or decode is None:
            return None
        return prefill.target.worker, decode.target.worker

    def _stake(self, side: Side) -> _Stake | None:
        return next((stake for stake in self._stakes if stake.side is side), None)

    def _worker(self, side: Side) -> tuple[Worker, ...]:
        return tuple(stake.target.worker for stake in self._stakes if stake.side is side)

    def _side_of(self, worker: Worker) -> Side:
        return next(stake.side for stake in self._stakes if stake.target.worker == worker)

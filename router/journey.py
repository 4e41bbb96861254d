"""Journey: one attempt, and everything that is taken for it.

Edge: sets out (rooms, load, circuits, ledger), travels (both legs) and arrives: what was taken is
given back in one place, on every path. gateway.py makes one per attempt. Open it to change what an
attempt takes or how its outcome is booked.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvplane.runtime import Clock
from kvplane.vocabulary import Binding, Stage

from . import facts
from .account import Account
from .aftermath import Aftermath, Ended
from .attempt import Attempt, is_stream
from .blame import LegFailed, Side
from .breaker import Breakers
from .choice import Choice
from .dispatch import Client, ClientGone, dispatch, honest_end
from .evidence import Ledger
from .fleet import Fleet
from .meeting import Meeting, Trail
from .metrics import RouterMetrics
from .request import Ask
from .sending import Sending, Sent, bind
from .target import Target


@dataclass(frozen=True, slots=True)
class Means:
    """What every journey uses."""

    fleet: Fleet
    breakers: Breakers
    ledger: Ledger
    sending: Sending
    aftermath: Aftermath
    metrics: RouterMetrics
    clock: Clock


@dataclass
class Journey:
    """One attempt under way."""

    means: Means
    ask: Ask
    choice: Choice
    bindings: list[Binding]
    meeting: Meeting
    account: Account
    sent: Sent | None = None

    @staticmethod
    def set_out(means: Means, ask: Ask, choice: Choice, number: int, trail: Trail) -> Journey:
        """Mint rooms, open the meeting, take places and load; no await since the choice."""
        bindings = bind(ask, choice)
        meeting = means.ledger.open(facts.meeting(ask, choice, bindings, number), trail)
        account = Account(means.fleet, means.breakers)
        journey, now = Journey(means, ask, choice, bindings, meeting, account), means.clock.now()
        for side in journey.sides:
            tokens = facts.load_tokens(ask, choice, side)
            account.take(side, journey.target(side), tokens, now)
        trail.begin(Stage.FIRST_BYTE)
        return journey

    @property
    def sides(self) -> tuple[Side, ...]:
        """Whose workers take part; a unified worker is the decode."""
        return (Side.DECODE,) if self.choice.prefill is None else (Side.DECODE, Side.PREFILL)

    @property
    def attempt(self) -> Attempt | None:
        """Its legs, once they were begun."""
        return self.sent.attempt if self.sent is not None else None

    def target(self, side: Side) -> Target:
        """The worker of a side; a unified worker is the decode."""
        prefill = self.choice.prefill
        return prefill if side is Side.PREFILL and prefill is not None else self.choice.decode

    @property
    def headers(self) -> facts.HeaderList:
        """What the answer carries, also where it is an error."""
        return facts.headers(self.ask, self.choice, self.bindings)

    async def travel(self, client: Client) -> None:
        """Send both legs and pass the answer on. Raises LegFailed before the first byte only;
        after it the answer ends honestly."""
        try:
            self.sent = await self.means.sending.begin(
                self.ask, self.choice, self.bindings, client.bell
            )
            attempt = self.sent.attempt
            attempt.on_start, attempt.on_prefill_end = self._began, self._prefill_ended
            await dispatch(attempt, client, self.headers)
        except LegFailed as failed:
            self._judge(failed)
            if not failed.started:
                raise
            assert self.attempt is not None, "what started was sent"
            await honest_end(client, failed, is_stream(self.attempt.decode))
        except ClientGone:
            self.means.ledger.close(self.meeting, "client_gone")
            raise
        else:
            self.means.ledger.close(self.meeting, "ok")

    def arrive(self, client: Client) -> None:
        """Give everything back; what can wait goes into the aftermath."""
        self.means.ledger.close(self.meeting, "failed", {"message": "ended by the gateway"})
        metrics = self.means.metrics
        self.account.close(
            self.means.clock.now(),
            lambda side, target, what: metrics.legs.labels(side, target.name, what).inc(),
            lambda target: metrics.opened.labels(target.name).inc(),
        )
        self.account.release(Side.DECODE)
        if self.sent is None:
            self.account.release(Side.PREFILL)
            self.meeting.collected = True
            return
        if why := self.means.sending.ended(self.sent):
            self.meeting.why["without_transfer"] = why
        sides = [self.target(side) for side in self.sides]
        after = [lambda: self.account.release(Side.PREFILL)]
        told = self.choice.foretold
        ended = Ended(self.sent.attempt, client.bell, self.meeting, sides, told, after)
        self.means.aftermath.begin(ended)

    def _began(self) -> None:
        self.means.ledger.first_byte(self.meeting)
        self.account.began(self.means.clock.now())

    def _prefill_ended(self) -> None:
        self.account.release(Side.PREFILL)
        self.meeting.prefill_ended = self.means.clock.now()

    def _judge(self, failed: LegFailed) -> None:
        """Book the failure on the side that caused it, and on no other."""
        attempt = self.attempt
        silent = failed.silent and attempt is not None and attempt.silent
        guilty = self.account.judge(failed, silent, self.means.clock.now())
        failed.cause.room = ",".join(str(binding.room) for binding in self.bindings) or None
        failed.cause.headers, failed.cause.request_id = self.headers, self.ask.request_id
        shape = failed.cause.shape()["error"] | {"side": guilty.value, "status": failed.status}
        shape["leg"] = None if failed.leg is None else type(failed.leg).__name__
        ended = "rejected" if failed.callers_mistake else "failed"
        self.means.ledger.close(self.meeting, ended, shape)

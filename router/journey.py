"""Journey: one attempt, and everything that is taken for it.

Edge: sets out (rooms, load, circuits, ledger), travels (both legs) and arrives: what was taken is
given back in one place, on every path. gateway.py makes one per attempt. Open it to change what an
attempt takes or how its outcome is booked.
"""

from __future__ import annotations

import msgspec

from kvplane.runtime import Clock

from . import facts
from .account import Account
from .aftermath import Aftermath
from .attempt import is_stream
from .blame import LegFailed, Side
from .breaker import Breakers, Outcome
from .choice import Choice
from .dispatch import Client, ClientGone, dispatch, honest_end
from .errors import let_go
from .evidence import Ledger
from .fleet import Fleet
from .looks import Looks
from .meeting import END, FIRST_BYTE, Trail
from .metrics import RouterMetrics
from .request import Ask
from .sending import Sending, Sent, bind
from .target import Target


class Means:
    """What every journey uses."""

    __slots__ = (
        "_legs", "_opened", "aftermath", "breakers", "fleet", "ledger", "looks", "now", "sending",
        "wall",
    )  # fmt: skip

    def __init__(
        self,
        fleet: Fleet,
        breakers: Breakers,
        ledger: Ledger,
        sending: Sending,
        aftermath: Aftermath,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self.fleet, self.breakers, self.ledger = fleet, breakers, ledger
        self.sending, self.aftermath, self.looks = sending, aftermath, Looks(metrics.legs.of)
        self.now, self.wall = clock.now, clock.wall
        self._legs, self._opened = metrics.legs, metrics.opened

    def count(self, side: Side, target: Target, what: Outcome) -> None:
        """How a leg ended."""
        self._legs.of[side, target.name, what].value += 1

    def opened(self, target: Target) -> None:
        """Its circuit did."""
        self._opened.labels(target.name).inc()


class Journey:
    """One attempt under way."""

    __slots__ = (
        "__weakref__", "account", "ask", "bindings", "choice", "look", "means", "meeting", "sent",
    )  # fmt: skip

    def __init__(self, means: Means, ask: Ask, choice: Choice, number: int, trail: Trail) -> None:
        """Mint rooms, open the meeting, take places and load; no await since the choice."""
        self.means, self.ask, self.choice = means, ask, choice
        self.bindings = bindings = bind(ask, choice)
        self.look = look = means.looks[choice]
        now, steps = means.now(), trail.steps
        steps += (FIRST_BYTE, now)
        opened_at = means.wall() - now + steps[1]
        self.meeting = means.ledger.add(
            facts.meeting(ask, choice, look, bindings, number, steps, opened_at)
        )
        self.sent: Sent | None = None
        kept, computed = facts.loads(ask, choice)
        self.account = Account(
            means.fleet, means.breakers, now, choice.decode, kept, choice.prefill, computed
        )

    async def travel(self, client: Client) -> None:
        """Send both legs and pass the answer on. Raises LegFailed before the first byte only;
        after it the answer ends honestly."""
        means, ask, bindings = self.means, self.ask, self.bindings
        try:
            self.sent = sent = await means.sending.begin(ask, self.choice, bindings, client.bell)
            attempt = sent.attempt
            attempt.on_start, attempt.on_prefill_end = self._began, self._prefill_ended
            await dispatch(attempt, client, facts.headers(ask, self.look, bindings))
        except LegFailed as failed:
            self._judge(failed)
            if not failed.started:
                raise
            assert self.sent is not None, "what started was sent"
            await honest_end(client, failed, is_stream(self.sent.attempt.decode))
            let_go(failed)
        except ClientGone:
            means.ledger.close(self.meeting, "client_gone")
            raise
        else:
            means.ledger.close(self.meeting, "ok")

    def arrive(self, client: Client) -> None:
        """Give everything back; what can wait goes into the aftermath."""
        means, meeting, account = self.means, self.meeting, self.account
        if meeting.outcome == "ok" and meeting.first_byte is not None:
            for count in self.look.served:  # circuits were told at the first byte: no more is left
                count.value += 1
        else:
            if meeting.outcome == "open":
                means.ledger.close(meeting, "failed", {"message": "ended by the gateway"})
            account.close(meeting.ended or means.now(), means.count, means.opened)
        account.decode.release()
        if (sent := self.sent) is None:
            account.release_prefill()
            meeting.collected = True
            return
        attempt = sent.attempt
        if attempt.keeps and (why := means.sending.ended(sent)) and meeting.why is not None:
            meeting.why = msgspec.structs.replace(meeting.why, without_transfer=why)
        foretold = self.choice.foretold
        means.aftermath.begin(attempt, client.bell, meeting, account, foretold)

    def _began(self) -> None:
        now = self.means.now()
        self.meeting.began(now)
        self.account.began(now)

    def _prefill_ended(self) -> None:
        stake = self.account.prefill
        assert stake is not None, "no prefill ended"
        stake.release()
        self.meeting.prefill_ended = self.means.now()

    def _judge(self, failed: LegFailed) -> None:
        """Book the failure on the side that caused it, and on no other."""
        silent = failed.silent and self.sent is not None and self.sent.attempt.silent
        guilty = self.account.judge(failed, silent, self.means.now())
        failed.cause.room = ",".join(str(binding.room) for binding in self.bindings) or None
        failed.cause.headers = facts.headers(self.ask, self.look, self.bindings)
        failed.cause.request_id = self.ask.request_id
        shape = failed.cause.shape()["error"] | {"side": guilty.value, "status": failed.status}
        shape["leg"] = None if failed.leg is None else type(failed.leg).__name__
        ended = "rejected" if failed.callers_mistake else "failed"
        self.means.ledger.close(self.meeting, ended, shape)
        if failed.cause.stage is None and self.bindings:  # no engine named one: the gateway's own
            failed.cause.stage = (END if failed.started else FIRST_BYTE).value

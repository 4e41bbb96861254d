"""Journey: one attempt, and everything that is taken for it.

Edge: sets out (rooms, load, circuits, ledger), travels (both legs) and arrives: what was taken is
given back in one place, on every path. gateway.py makes one per attempt. Open it to change what an
attempt takes or how its outcome is booked.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from kvplane.bootstrap import mint
from kvplane.runtime import Clock
from kvplane.vocabulary import Binding, BootstrapTriple, Room, Stage

from . import facts
from .aftermath import Aftermath, Ended
from .blame import LegFailed, Side
from .breaker import Breakers, Outcome, Ticket, outcome
from .choice import Choice
from .dispatch import Attempt, Client, ClientGone, dispatch, honest_end, is_stream
from .evidence import Ledger
from .fleet import Fleet
from .handoffs import HANDOFFS
from .legs import Legs
from .legs_exchange import Exchange
from .legs_wire import Origin, forwarded
from .meeting import Meeting, Trail
from .metrics import RouterMetrics
from .request import Ask
from .target import Booking, Target


@dataclass(frozen=True, slots=True)
class Means:
    """What every journey uses."""

    fleet: Fleet
    breakers: Breakers
    ledger: Ledger
    legs: Legs
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
    bookings: dict[Side, Booking] = field(default_factory=dict)
    tickets: dict[Side, Ticket] = field(default_factory=dict)
    judged: dict[Side, Outcome] = field(default_factory=dict)
    attempt: Attempt | None = None

    @staticmethod
    def set_out(means: Means, ask: Ask, choice: Choice, number: int, trail: Trail) -> Journey:
        """Mint rooms, open the meeting, take places and load; no await since the choice."""
        bindings = _bind(ask, choice)
        meeting = means.ledger.open(facts.meeting(ask, choice, bindings, number), trail)
        journey = Journey(means, ask, choice, bindings, meeting)
        for side in (Side.DECODE, Side.PREFILL)[: 1 if choice.prefill is None else 2]:
            worker = journey.target(side).worker
            if (ticket := means.breakers.of(worker).admit(means.clock.now())) is not None:
                journey.tickets[side] = ticket
            tokens = facts.load_tokens(ask, choice, side)
            journey.bookings[side] = means.fleet.book(worker, tokens)
        trail.begin(Stage.FIRST_BYTE)
        return journey

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
        self.attempt = attempt = self._begin(client)
        try:
            await dispatch(attempt, client, self.headers)
        except LegFailed as failed:
            self._judge(failed)
            if not failed.started:
                raise
            await honest_end(client, failed, is_stream(attempt.decode))
        except ClientGone:
            self.means.ledger.close(self.meeting, "client_gone")
            raise
        else:
            self.judged = dict.fromkeys(self.bookings, Outcome.SUCCESS)
            self.means.ledger.close(self.meeting, "ok")

    def arrive(self, client: Client) -> None:
        """Give everything back; what can wait goes into the aftermath."""
        self.means.ledger.close(self.meeting, "failed", {"message": "ended by the gateway"})
        for side in self.bookings:
            self._book_outcome(side)
        self.bookings[Side.DECODE].release()
        prefill = self.bookings.get(Side.PREFILL)
        if self.attempt is None:
            if prefill is not None:
                prefill.release()
            self.meeting.collected = True
            return
        sides = [self.target(side) for side in self.bookings]
        after = [prefill.release] if prefill is not None else []
        told = self.choice.foretold
        ended = Ended(self.attempt, client.bell, self.meeting, sides, told, after)
        self.means.aftermath.begin(ended)

    def _begin(self, client: Client) -> Attempt:
        """Both requests leave now, in one step."""
        prefill, decode = self.choice.prefill, self.choice.decode
        handoff = HANDOFFS["none" if prefill is None else prefill.up.engine]
        sizes = (prefill.up.dp_size if prefill else 1, decode.up.dp_size)
        bodies = handoff.write(self.ask, self.bindings, *sizes)
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", self.ask.request_id.encode()),
            *forwarded(self.ask.headers),
        ]

        def leg(target: Target, body: bytes) -> Exchange:
            origin = Origin.parse(target.url)
            return self.means.legs.begin(origin, self.ask.path, headers, body, client.bell)

        attempt = Attempt(leg(decode, bodies.decode), str(decode.worker))
        attempt.on_start = lambda: self.means.ledger.first_byte(self.meeting)
        if prefill is not None and bodies.prefill is not None:
            attempt.prefill = leg(prefill, bodies.prefill)
            attempt.prefill_worker = str(prefill.worker)
            attempt.on_prefill_end = self._prefill_ended
        return attempt

    def _prefill_ended(self) -> None:
        self.bookings[Side.PREFILL].release()
        self.meeting.prefill_ended = self.means.clock.now()

    def _judge(self, failed: LegFailed) -> None:
        """Book the failure on the side that caused it, and on no other."""
        guilty = failed.guilty if failed.guilty in self.bookings else Side.DECODE
        what = outcome(failed.status or None, failed.cause.retry_after is not None)
        what = Outcome.NEUTRAL if failed.nobodys_fault else what
        self.judged = dict.fromkeys(self.bookings, Outcome.NEUTRAL) | {guilty: what}
        failed.cause.room = ",".join(str(binding.room) for binding in self.bindings) or None
        failed.cause.headers, failed.cause.request_id = self.headers, self.ask.request_id
        shape = failed.cause.shape()["error"] | {"side": guilty.value, "status": failed.status}
        ended = "rejected" if failed.callers_mistake else "failed"
        self.means.ledger.close(self.meeting, ended, shape)

    def _book_outcome(self, side: Side) -> None:
        what = self.judged.get(side, Outcome.NEUTRAL)
        worker = self.target(side).worker
        self.means.metrics.legs.labels(side, str(worker), what).inc()
        ticket, now = self.tickets.get(side), self.means.clock.now()
        if ticket is not None and self.means.breakers.of(worker).book(ticket, what, now):
            self.means.metrics.opened.labels(str(worker)).inc()


def _bind(ask: Ask, choice: Choice) -> list[Binding]:
    """A room for each prompt and sample, all congruent to the prefill's dp rank."""
    prefill, decode = choice.prefill, choice.decode
    if prefill is None:
        return []
    host, port = prefill.bootstrap_host, prefill.up.bootstrap_port or facts.BOOTSTRAP_PORT
    rooms: dict[Room, None] = {}
    while len(rooms) < HANDOFFS[prefill.up.engine].rooms(ask):
        rooms[mint(lambda: secrets.randbits(63), prefill.worker.dp_rank, prefill.up.dp_size)] = None
    return [
        Binding(
            room,
            prefill.worker,
            decode.worker,
            BootstrapTriple(host, port, room),
            choice.prefill_epoch,
            choice.decode_epoch,
        )
        for room in rooms
    ]

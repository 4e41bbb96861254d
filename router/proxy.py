"""Proxy: engine routes that are no hand-off go to one worker that serves them.

Edge: one leg to the least loaded, booked, judged and tried again as the legs of inference are;
bytes untouched. proxied.py says which routes; api.py calls it. Open it to change how a request that
is passed on is placed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Sequence

from kvplane.vocabulary import Knowledge, Role, Worker

from .blame import LegFailed, Side
from .breaker import Outcome, Ticket, outcome
from .dispatch import Attempt, Client, ClientGone, dispatch, honest_end, is_stream
from .errors import GatewayError
from .gateway import Gateway
from .legs_wire import Origin, forwarded
from .plans import REASONS
from .proxied import ANY, Call
from .retry import Again, Budget, Failed, decide
from .target import Target

HeaderList = list[tuple[bytes, bytes]]


class Proxy:
    """Passes requests on for one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._budget = Budget(gateway.settings.retry)

    async def handle(self, call: Call, client: Client) -> None:
        """Answer one request. Raises GatewayError and what dispatch raises."""
        settings, clock = self._gateway.settings, self._gateway.clock
        deadline = clock.now() + settings.request_timeout_s
        guilty: tuple[Worker, ...] = ()
        self._budget.earn()
        for number in range(1, settings.retry.retries + 2):
            target = self._pick(call, guilty)
            try:
                await self._travel(call, target, client)
                return
            except LegFailed as failed:
                again = self._again(failed, target, number, deadline - clock.now())
                if again is None:
                    raise failed.cause from None
            guilty += again.without
            await _pause(again.wait_s, client)

    def _pick(self, call: Call, guilty: Collection[Worker]) -> Target:
        """The least loaded of those that serve this model; of prefills and decodes the first kind
        there is. Raises GatewayError."""
        gateway, now = self._gateway, self._gateway.clock.now()
        well = [t for t in self._serving(call) if gateway.breakers.admits(t.worker, now)]
        if not well:
            wait_s = gateway.breakers.wait_s([t.worker for t in self._serving(call)], now)
            text = f"every worker that serves {call.path} failed too often lately"
            code = f"no_{_side(self._serving(call)[0])}_available"
            raise GatewayError(code, text, retry_after=str(max(1, round(wait_s))))
        gateway.metrics.undisaggregated.labels("passed on").inc()
        if call.roles is not ANY:  # generates, and nobody looked who holds the prompt
            gateway.metrics.knowledge.labels(Knowledge.DARK, "unsupported_route").inc()
        left = [target for target in well if target.worker not in guilty] or well
        return min(left, key=lambda t: (t.inflight_tokens, t.inflight_requests, t.worker))

    def _serving(self, call: Call) -> Sequence[Target]:
        fleet, errors = self._gateway.fleet, list[GatewayError]()
        for role in call.roles:
            error = fleet.lack(role, call.model)
            if error is None:
                return fleet.selectable(role, call.model)
            says_more = error.code != "no_prefill_available" or fleet.targets(role)
            errors.insert(0 if says_more else len(errors), error)
        if call.roles is not ANY and not fleet.targets(Role.BOTH) and fleet.targets():
            raise GatewayError(
                "unsupported_route",
                f"{call.path} needs a worker that prefills and decodes, and here are none: "
                "use /v1/chat/completions, /v1/completions or /generate",
            )
        raise errors[0]

    async def _travel(self, call: Call, target: Target, client: Client) -> None:
        """One leg, booked on its worker. Raises LegFailed before the first byte only."""
        gateway, worker = self._gateway, str(target.worker)
        ticket = gateway.breakers.of(target.worker).admit(gateway.clock.now())
        headers, judged = _answered_by(call, target), Outcome.NEUTRAL
        with gateway.fleet.book(target.worker, call.tokens):
            origin = Origin.parse(target.url)
            leg = gateway.legs.begin(origin, call.path, _sent(call), call.raw, client.bell)
            try:
                await dispatch(Attempt(leg, worker), client, headers)
                judged = Outcome.SUCCESS
            except LegFailed as failed:
                judged = _judged(failed)
                _name(failed, target, headers)
                if not failed.started:
                    raise
                await honest_end(client, failed, is_stream(leg))
            finally:
                leg.abort()
                self._book(target, ticket, judged)

    def _book(self, target: Target, ticket: Ticket | None, what: Outcome) -> None:
        gateway, worker = self._gateway, target.worker
        gateway.metrics.legs.labels(_side(target), str(worker), what).inc()
        now = gateway.clock.now()
        if ticket is not None and gateway.breakers.of(worker).book(ticket, what, now):
            gateway.metrics.opened.labels(str(worker)).inc()

    def _again(
        self, failed: LegFailed, target: Target, number: int, left_s: float
    ) -> Again | None:
        told = failed.cause.retry_after or ""
        guilty = () if failed.nobodys_fault else (target.worker,)
        later = float(told) if told.isdecimal() else None
        how = Failed(guilty, failed.status or None, failed.started, later)
        verdict = decide(how, number, self._gateway.settings.retry, self._budget, left_s)
        if isinstance(verdict, Again):
            self._gateway.metrics.retries.labels(failed.cause.code).inc()
            return verdict
        self._gateway.metrics.stops.labels(verdict.why).inc()
        return None


async def _pause(wait_s: float, client: Client) -> None:
    """A client that leaves ends it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while not client.gone:
                await client.bell.wait()
    if client.gone:
        raise ClientGone


def _sent(call: Call) -> HeaderList:
    return [
        (b"content-type", call.kind),
        (b"x-request-id", call.request_id.encode()),
        *forwarded(call.headers),
    ]


def _answered_by(call: Call, target: Target) -> HeaderList:
    """Who answered, by its role: a unified worker is both."""
    worker = str(target.worker).encode("latin-1", "replace")
    own = [(b"x-request-id", call.request_id.encode())]
    if target.role is not Role.DECODE:
        own.append((b"x-kvplane-prefill", worker))
    if target.role is not Role.PREFILL:
        own.append((b"x-kvplane-decode", worker))
    if call.roles is not ANY:
        own.append((b"x-kvplane-knowledge", Knowledge.DARK.encode()))
        own.append((b"x-kvplane-reason", REASONS["unsupported_route"].encode()))
    return own


def _side(target: Target) -> Side:
    return Side.PREFILL if target.role is Role.PREFILL else Side.DECODE


def _judged(failed: LegFailed) -> Outcome:
    if failed.nobodys_fault:
        return Outcome.NEUTRAL
    return outcome(failed.status or None, failed.cause.retry_after is not None)


def _name(failed: LegFailed, target: Target, headers: HeaderList) -> None:
    """dispatch.py calls the only leg a decode; the client hears what it was."""
    cause, side = failed.cause, _side(target)
    if side is not Side.DECODE:
        cause.code = cause.code.replace("decode_failed", "prefill_failed")
        cause.message = cause.message.replace(f"decode {target.worker}", f"{side} {target.worker}")
    cause.headers = headers

"""Proxy: engine routes that are no hand-off go to one worker that serves them.

Edge: one leg to the least loaded, booked, judged and tried again as the legs of inference are;
bytes untouched. proxied.py says which routes; api.py calls it. Open it to change how a request that
is passed on is placed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvplane.vocabulary import Knowledge, Role, Worker

from .account import Account
from .attempt import Attempt, is_stream
from .availability import available
from .blame import LegFailed, Side
from .breaker import Outcome
from .dispatch import Client, dispatch, honest_end, pause
from .errors import GatewayError, let_go
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
        number, spared = 0, False
        while True:
            target = self._pick(call, guilty)
            try:
                await self._travel(call, target, client)
                return
            except LegFailed as failed:
                spared = spared or failed.stale  # no attempt at all, once
                number += 1
                left_s, others = (
                    deadline - clock.now(),
                    self._others(call, (*guilty, target.worker)),
                )
                again = self._again(failed, target, number - spared, left_s, others)
                if again is None:
                    raise failed.cause from None
                let_go(failed)
            guilty += again.without
            await pause(again.wait_s, client)

    def _pick(self, call: Call, guilty: Collection[Worker]) -> Target:
        """The least loaded of those that serve this model; of prefills and decodes the first kind
        of which somebody is left. Raises GatewayError."""
        gateway, now = self._gateway, self._gateway.clock.now()
        serving = self._serving(call, guilty)
        left = available(serving, gateway.breakers, gateway.fleet.settings, now, guilty)
        gateway.metrics.undisaggregated.labels("passed on").inc()
        if call.roles is not ANY:  # generates, and nobody looked who holds the prompt
            gateway.metrics.knowledge.labels(Knowledge.DARK, "unsupported_route").inc()
        return min(left, key=lambda t: (t.inflight_tokens, t.inflight_requests, t.turn))

    def _others(self, call: Call, without: Collection[Worker]) -> bool:
        """Can somebody serve who is none of these?"""
        try:
            return self._left(self._serving(call, without), without)
        except GatewayError:
            return False

    def _left(self, serving: Sequence[Target], without: Collection[Worker]) -> bool:
        admits, now = self._gateway.breakers.admits, self._gateway.clock.now()
        return any(one.worker not in without and admits(one.worker, now) for one in serving)

    def _serving(self, call: Call, without: Collection[Worker]) -> Sequence[Target]:
        """All of the first role of which somebody may be asked; else of the first there is."""
        fleet, errors = self._gateway.fleet, list[GatewayError]()
        first: Sequence[Target] = ()
        for role in call.roles:
            error = fleet.lack(role, call.model)
            if error is None:
                serving = fleet.selectable(role, call.model)
                if self._left(serving, without):
                    return serving
                first = first or serving
                continue
            says_more = not error.code.startswith("no_") or fleet.targets(role)
            errors.insert(0 if says_more else len(errors), error)
        if first:
            return first
        served = [t for t in fleet.targets() if not call.model or t.serves(call.model)]
        if call.roles is not ANY and served and all(t.role is not Role.BOTH for t in served):
            raise GatewayError(
                "unsupported_route",
                f"{call.path} needs a worker that prefills and decodes, and {_whose(call)} none: "
                "use /v1/chat/completions, /v1/completions or /generate",
            )
        raise errors[0]

    async def _travel(self, call: Call, target: Target, client: Client) -> None:
        """One leg, booked on its worker. Raises LegFailed before the first byte only."""
        gateway, clock = self._gateway, self._gateway.clock
        headers = _answered_by(call, target)
        account = Account(gateway.fleet, gateway.breakers, clock.now(), target, call.tokens)
        try:
            origin = Origin.parse(target.url)
            leg = gateway.legs.begin(origin, call.path, _sent(call), call.raw, client.bell)
            attempt = Attempt(leg, target.name, on_start=lambda: account.began(clock.now()))
            try:
                await dispatch(attempt, client, headers)
            except LegFailed as failed:
                account.judge(failed, False, clock.now())
                _name(failed, target, headers)
                if not failed.started:
                    raise
                await honest_end(client, failed, is_stream(leg))
                let_go(failed)
            finally:
                leg.abort()
        finally:
            account.close(clock.now(), self._count, self._opened)
            account.decode.release()  # as dispatch.py calls the only leg

    def _count(self, side: Side, target: Target, what: Outcome) -> None:
        self._gateway.metrics.legs.labels(_side(target), target.name, what).inc()

    def _opened(self, target: Target) -> None:
        self._gateway.metrics.opened.labels(target.name).inc()

    def _again(
        self, failed: LegFailed, target: Target, number: int, left_s: float, others: bool
    ) -> Again | None:
        guilty = () if failed.nobodys_fault and not failed.crowded else (target.worker,)
        how = Failed(
            guilty, failed.status or None, failed.started, failed.retry_after_s, others=others
        )
        verdict = decide(how, number, self._gateway.settings.retry, self._budget, left_s)
        if isinstance(verdict, Again):
            self._gateway.metrics.retries.labels(failed.cause.code).inc()
            return verdict
        self._gateway.metrics.stops.labels(verdict.why).inc()
        return None


def _whose(call: Call) -> str:
    return f"model {call.model!r} has" if call.model else "here are"


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


def _name(failed: LegFailed, target: Target, headers: HeaderList) -> None:
    """dispatch.py calls the only leg a decode; the client hears what it was."""
    cause, side = failed.cause, _side(target)
    if side is not Side.DECODE:
        cause.code = cause.code.replace("decode_failed", "prefill_failed")
        cause.message = cause.message.replace(f"decode {target.worker}", f"{side} {target.worker}")
    cause.headers = headers

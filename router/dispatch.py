"""Dispatch: both legs at once, one answer; the first failure of either ends the other.

Edge: one waiter over two legs and a client (a Bell, no tasks). gateway.py begins it per attempt;
legs.py carries the bytes; blame.py says what a failure means. Open it to change what the client
sees of two engines. Rules: decode's bytes pass untouched; not a byte of decode leaves after a
failure of prefill; before the first byte a failure is raised, after it the stream ends honestly.

    both begun -> decode has a first byte (or a whole plain answer) -> copy -> decode's end
         |                 prefill failed / decode failed / client gone: abort both, at once
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from .blame import LegFailed, Side, engine_refused, leg_broke, stream_said
from .legs_errors import TimedOut
from .legs_exchange import Bell, Exchange
from .legs_wire import passed_back
from .usage import Usage

MOST_ERROR_BYTES = 1024 * 1024  # of an engine's error body
ERROR_BODY_S = 2.0  # an engine that said 4xx or 5xx has this long to say why

HeaderList = list[tuple[bytes, bytes]]


class ClientGone(Exception):
    """The client left; both legs are closed."""


class BrokenBody(Exception):
    """A plain answer broke after its head left: all that is left is to cut the connection."""


class Client(Protocol):
    """What dispatch needs of the one who asked."""

    bell: Bell  # rung when it leaves; both legs ring it too
    gone: bool

    async def start(self, status: int, headers: HeaderList) -> None: ...
    async def write(self, data: bytes, more: bool) -> None: ...


@dataclass
class Attempt:
    """Two legs that belong together; no prefill leg with a unified worker."""

    decode: Exchange
    decode_worker: str
    prefill: Exchange | None = None
    prefill_worker: str = ""
    on_prefill_end: Callable[[], None] = lambda: None  # called once, when its answer is complete
    on_start: Callable[[], None] = lambda: None  # called once, when the answer begins to leave
    usage: Usage = field(default_factory=Usage)  # read off prefill's answer, or the only one
    started: bool = False  # the client has the head of an answer
    _prefill_ended: bool = False

    def abort(self) -> None:
        """Close what is still open. Idempotent."""
        self.decode.abort()
        if self.prefill is not None:
            self.prefill.abort()

    def look_at_prefill(self) -> None:
        """Raise LegFailed where prefill failed; read what came of its answer."""
        leg = self.prefill
        if leg is None or self._prefill_ended:
            return
        if leg.status and not 200 <= leg.status < 300:
            raise _Refusal(Side.PREFILL, self.prefill_worker, leg)
        if leg.error is not None:
            raise leg_broke(Side.PREFILL, self.prefill_worker, leg.error)
        if leg.status:
            self.usage.feed(leg.take())
        if leg.complete:
            self._prefill_ended = True
            self.on_prefill_end()
            if (said := self.usage.error()) is not None:
                raise stream_said(Side.PREFILL, self.prefill_worker, *said)

    def look_at_decode(self) -> None:
        """Raise LegFailed where decode failed; tokens of a stream that came before go out first."""
        leg = self.decode
        if leg.status and not 200 <= leg.status < 300:
            raise _Refusal(Side.DECODE, self.decode_worker, leg)
        if leg.error is not None and not (leg.buffered_bytes and is_stream(leg)):
            raise leg_broke(Side.DECODE, self.decode_worker, leg.error)


class _Refusal(Exception):
    """An engine answered no; its body is still to be read."""

    def __init__(self, side: Side, worker: str, leg: Exchange) -> None:
        super().__init__(str(side))
        self.side, self.worker, self.leg = side, worker, leg


async def dispatch(attempt: Attempt, client: Client, headers: HeaderList) -> None:
    """Answer the client from both legs. `headers` go out beside the engine's.

    Raises LegFailed (see its `started`), ClientGone, BrokenBody. Returns when decode's answer is
    with the client; prefill's may still be under way then. On every other way out both are closed.
    """
    try:
        await _answer(attempt, client, headers)
    except _Refusal as refusal:
        _close_other(attempt, refusal.leg)
        try:
            body = await _error_body(refusal.leg, client)
        finally:
            attempt.abort()
        failed = engine_refused(
            refusal.side, refusal.worker, refusal.leg.status, refusal.leg.headers, body
        )
        failed.started = attempt.started
        raise failed from None
    except LegFailed as failed:
        attempt.abort()
        failed.started = attempt.started
        raise
    except BaseException:
        attempt.abort()
        raise


async def _answer(attempt: Attempt, client: Client, headers: HeaderList) -> None:
    decode = attempt.decode
    while True:
        _look(attempt, client)
        if _ready(decode):
            break
        await client.bell.wait()
    attempt.started = True
    attempt.on_start()
    await client.start(decode.status, [*passed_back(decode.headers, is_stream(decode)), *headers])
    while True:
        _look(attempt, client)
        data = decode.take()
        last = decode.complete
        if attempt.prefill is None:
            attempt.usage.feed(data)  # a unified worker tells its cached tokens itself
        if data or last:
            await client.write(data, more=not last)
        if last:
            return
        if not decode.buffered_bytes and not decode.over:
            await client.bell.wait()


def _ready(decode: Exchange) -> bool:
    """May the head leave? A stream at its first byte; a plain answer when it is whole, so that
    one which breaks off can still become an error, or when it is more than we hold back."""
    if not 200 <= decode.status < 300:
        return False
    if is_stream(decode):
        return decode.buffered_bytes > 0 or decode.complete
    return decode.complete or decode.paused


def is_stream(decode: Exchange) -> bool:
    """Is the answer server-sent events?"""
    return decode.header(b"content-type").startswith(b"text/event-stream")


def _look(attempt: Attempt, client: Client) -> None:
    if client.gone:
        raise ClientGone
    attempt.look_at_prefill()
    attempt.look_at_decode()


def _close_other(attempt: Attempt, failed: Exchange) -> None:
    """The loser is closed before anything else is waited for."""
    for leg in (attempt.prefill, attempt.decode):
        if leg is not None and leg is not failed:
            leg.abort()


async def _error_body(leg: Exchange, client: Client) -> bytes:
    """What the engine has to say; b"" where it takes too long or breaks off."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(ERROR_BODY_S):
            while size < MOST_ERROR_BYTES:
                data = leg.take()
                parts.append(data)
                size += len(data)
                if leg.over:
                    break
                if client.gone:
                    raise ClientGone
                await client.bell.wait()
    except TimeoutError:
        return b""
    return b"".join(parts) if leg.complete else b""


def settled(attempt: Attempt) -> bool:
    """Is nothing of prefill's answer left to wait for? What came of it is read on the way."""
    leg = attempt.prefill
    with contextlib.suppress(LegFailed, _Refusal):
        attempt.look_at_prefill()
    return leg is None or leg.over


async def finish_prefill(attempt: Attempt, bell: Bell, deadline_s: float) -> None:
    """After decode's end: let prefill's answer end too, for its usage. Never raises LegFailed."""
    leg = attempt.prefill
    try:
        if leg is None:
            return
        async with asyncio.timeout(deadline_s):
            attempt.look_at_prefill()
            while not leg.over:
                await bell.wait()
                attempt.look_at_prefill()
    except (LegFailed, _Refusal):
        return
    except TimeoutError:
        if leg is not None:
            leg.fail(TimedOut, f"prefill not finished {deadline_s:g} s after decode")
    finally:
        attempt.abort()


async def honest_end(client: Client, failed: LegFailed, stream: bool) -> None:
    """Part of an answer left, then a leg failed: say so in the stream and end it without [DONE].

    Raises BrokenBody where the answer is no stream: only a cut tells the client then.
    """
    if not stream:
        raise BrokenBody(str(failed))
    await client.write(b"\n\n" + failed.cause.event(), more=False)

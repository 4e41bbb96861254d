"""Dispatch: both legs at once, one answer; the first failure of either ends the other.

Edge: one waiter over two legs and a client (a Bell, no tasks). sending.py begins the legs,
attempt.py says how they stand, blame.py what a failure means. Open it to change what the client
sees of two engines. Rules: decode's bytes pass untouched, unless prefill's log-probabilities belong
among them; not a byte of decode leaves after a failure of prefill; before the first byte a failure
is raised, after it the stream ends honestly.

    both begun -> decode has a first byte (or a whole plain answer) -> copy -> decode's end
         |                 prefill failed / decode failed / client gone: abort both, at once
    pull: prefill begun -> its whole answer -> decode begun -> the same
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Protocol

from .attempt import Attempt, Refusal
from .blame import LegFailed, Side, engine_refused
from .errors import GatewayError
from .legs_errors import TimedOut
from .legs_exchange import Bell, Exchange
from .logprobs import MOST_BYTES

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
    # All of an answer, or a part of one, at once; False where it must be waited for.
    def answer(self, status: int, headers: HeaderList, data: bytes) -> bool: ...
    @property
    def put(self) -> Callable[[bytes], bool]: ...
    @property
    def relay(self) -> Callable[[bytes], bool]: ...  # the same of whole chunks, framing and all


async def dispatch(attempt: Attempt, client: Client, headers: HeaderList) -> None:
    """Answer the client from both legs. `headers` go out beside the engine's.

    Raises LegFailed (see its `started`), ClientGone, BrokenBody. Returns when decode's answer is
    with the client; prefill's may still be under way then. On every other way out both are closed.
    """
    try:
        while True:
            if not client.gone:
                await client.bell.wait()  # rung already where there was news
            if _ready(attempt, client):
                break
        if not attempt.decode.complete or attempt.merge is not None:
            await _answer(attempt, client, headers)
        elif (left := _whole(attempt, client, headers)) is not None:
            await client.start(attempt.decode.status, left[0])
            await client.write(left[1], more=False)
    except Refusal as refusal:
        attempt.give_up(Side.DECODE if refusal.side is Side.PREFILL else Side.PREFILL)
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


def _whole(
    attempt: Attempt, client: Client, headers: HeaderList
) -> tuple[HeaderList, bytes] | None:
    """Most plain answers are here whole, and leave before anything is booked: it need not wait for
    that. Head and body, where the client has to be waited for."""
    decode = attempt.decode
    theirs, data, attempt.started = decode.passed_back(), decode.take(), True
    theirs += headers
    left = None if client.answer(decode.status, theirs, data) else (theirs, data)
    attempt.on_start()
    if attempt.prefill is None or attempt.decode_usage is not None:
        _listen(attempt, data)
    return left


async def _answer(attempt: Attempt, client: Client, headers: HeaderList) -> None:
    """Copied as it comes."""
    decode, merge = attempt.decode, attempt.merge
    if merge is not None and not decode.stream:
        await _merged(attempt, client, headers)
        return
    listens = attempt.prefill is None or attempt.decode_usage is not None
    theirs = _begun(attempt, headers)
    attempt.on_start()
    await client.start(decode.status, theirs)
    while True:
        data = decode.take()
        last = decode.complete
        if listens:
            _listen(attempt, data)
        if merge is not None:
            data = merge.stream(data, last)
        if data or last:
            await client.write(data, more=not last)
        if last:
            return
        if not decode.buffered_bytes and not decode.over:
            if merge is None and not attempt.news:
                _pass(attempt, client, listens)
            try:
                await client.bell.wait()
            finally:
                decode.tap = decode.relay = None
        _look(attempt, client)


def _pass(attempt: Attempt, client: Client, listens: bool) -> None:
    """While nothing else is under way parts go from one connection to the other in the step that
    read them; as soon as there is anything to look at, the attempt ends that."""
    decode, put = attempt.decode, client.put
    if not listens:
        decode.tap, decode.relay = put, client.relay
        return

    def heard(data: bytes) -> bool:
        if not put(data):
            return False
        _listen(attempt, data)
        return True

    decode.tap = heard


def _ready(attempt: Attempt, client: Client) -> bool:
    """May the head leave? A stream at its first byte; a plain answer when it is whole, so that
    one which breaks off can still become an error, or when it is more than we hold back."""
    decode = attempt.decode
    if decode.complete and attempt.prefill_ended and decode.status < 300 and not client.gone:
        return True  # as most: both said all, and well
    _look(attempt, client)
    decode = attempt.decode  # which may have begun only now
    if not decode.status or (attempt.merge is not None and not attempt.prefill_ended):
        return False
    if decode.stream:
        return decode.buffered_bytes > 0 or decode.complete
    return decode.complete or decode.paused


def _begun(attempt: Attempt, headers: HeaderList, length: int | None = None) -> HeaderList:
    """The head leaves; where the body is edited its length is ours to tell."""
    attempt.started, attempt.decode.calm = True, False
    theirs = attempt.decode.passed_back()
    if attempt.merge is not None:
        theirs = [(name, value) for name, value in theirs if name != b"content-length"]
    if length is not None:
        theirs.append((b"content-length", b"%d" % length))
    theirs += headers
    return theirs


def _listen(attempt: Attempt, data: bytes) -> None:
    if attempt.prefill is None:
        attempt.usage.feed(data)  # a unified worker tells its cached tokens itself
    elif attempt.decode_usage is not None:
        attempt.decode_usage.feed(data)


async def _merged(attempt: Attempt, client: Client, headers: HeaderList) -> None:
    """A plain answer that prefill's part is written into: held until it is whole."""
    decode, merge, held = attempt.decode, attempt.merge, bytearray()
    assert merge is not None, "only where something is merged"
    while True:
        _look(attempt, client)
        held += decode.take()
        if len(held) > MOST_BYTES:
            text = f"the answer is longer than {MOST_BYTES} bytes: ask for fewer log-probabilities"
            cause = GatewayError("invalid_request", text)
            raise LegFailed(Side.DECODE, attempt.decode_worker, cause, status=cause.status)
        if decode.complete:
            break
        if not decode.buffered_bytes:
            await client.bell.wait()
    body = merge.whole(bytes(held))
    attempt.on_start()
    await client.start(decode.status, _begun(attempt, headers, len(body)))
    await client.write(body, more=False)


def _look(attempt: Attempt, client: Client) -> None:
    if client.gone:
        raise ClientGone
    prefill, decode = attempt.prefill, attempt.decode
    if prefill is not None and not attempt.prefill_ended and (prefill.status or prefill.over):
        attempt.look_at_prefill()
        decode = attempt.decode  # another, where it could not begin before
    if decode.error is not None or decode.status >= 300:
        attempt.look_at_decode()


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
    if leg is not None and not attempt.prefill_ended:
        with contextlib.suppress(LegFailed, Refusal):
            attempt.look_at_prefill()
    return leg is None or leg.over


async def finish_prefill(attempt: Attempt, bell: Bell, deadline_s: float) -> None:
    """After decode's end: let prefill's answer end too, for its usage. Never raises LegFailed."""
    leg, attempt.awaited = attempt.prefill, True
    try:
        if leg is None:
            return
        leg.hurry()
        async with asyncio.timeout(deadline_s):
            attempt.look_at_prefill()
            while not leg.over:
                await bell.wait()
                attempt.look_at_prefill()
    except (LegFailed, Refusal):
        return
    except TimeoutError:
        if leg is not None:
            leg.fail(TimedOut, f"prefill not finished {deadline_s:g} s after decode")
    finally:
        attempt.abort()


async def pause(wait_s: float, client: Client) -> None:
    """Wait before another attempt; a client that leaves ends it: raises ClientGone."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while not client.gone:
                await client.bell.wait()
    if client.gone:
        raise ClientGone


async def honest_end(client: Client, failed: LegFailed, stream: bool) -> None:
    """Part of an answer left, then a leg failed: say so in the stream and end it without [DONE].

    Raises BrokenBody where the answer is no stream: only a cut tells the client then.
    """
    if not stream:
        raise BrokenBody(str(failed))
    await client.write(b"\n\n" + failed.cause.event(), more=False)

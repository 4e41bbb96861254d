"""Attempt: two legs that belong together, and what of prefill's answer is kept for decode.

Edge: looks at both exchanges as they stand, waits for nothing. sending.py begins it, dispatch.py
and aftermath.py follow it. Open it to change when a leg counts as failed, given up or ended.

    pull:  decode waits (not begun) --prefill's whole answer--> follow() begins it
    merge: decode's first byte is held until prefill's log-probabilities are known
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from .blame import LegFailed, Side, leg_broke, stream_said
from .errors import GatewayError
from .legs_errors import Phase, TimedOut
from .legs_exchange import Exchange
from .logprobs import MOST_BYTES, Merge
from .usage import Usage


class Refusal(Exception):
    """An engine answered no; its body is still to be read."""

    def __init__(self, side: Side, worker: str, leg: Exchange) -> None:
        super().__init__(str(side))
        self.side, self.worker, self.leg = side, worker, leg


def nothing(*_: object) -> None:
    """Nobody wants to know."""


class Attempt(msgspec.Struct, eq=False):
    """Two legs; no prefill leg with a unified worker. Prefill's bell, so that nobody wakes for its
    usual end."""

    decode: Exchange
    decode_worker: str
    prefill: Exchange | None = None
    prefill_worker: str = ""
    on_prefill_end: Callable[[], None] = nothing  # called once, when its answer is complete
    on_start: Callable[[], None] = nothing  # called once, when the answer begins to leave
    on_given_up: Callable[[Side], None] = nothing  # its engine may be at work for us
    follow: Callable[[bytes], Exchange] | None = None  # begins decode with prefill's answer
    merge: Merge | None = None  # prefill's part of decode's answer
    keeps: bool = False  # prefill's answer is needed whole
    without: str = ""  # why decode had nothing to fetch
    usage: Usage = msgspec.field(default_factory=Usage)  # off prefill's answer, or the only one
    decode_usage: Usage | None = None  # read off decode's, where that tells of the transfer
    started: bool = False  # the client has the head of an answer
    prefill_ended: bool = False
    awaited: bool = False  # somebody waits for prefill's end
    _closed: bool = False
    _given_up: tuple[Side, ...] = ()
    _heard: list[bytes] = []  # prefill's answer, where it is kept
    _heard_bytes: int = 0

    @property
    def answer(self) -> bytes:
        """What came of prefill's answer, where it is kept."""
        return b"".join(self._heard)

    def ring(self) -> None:
        """Prefill's leg has news. An end that only has to be booked is booked, all else wakes, and
        no part of decode's answer passes before somebody looked."""
        leg, decode = self.prefill, self.decode
        if leg is not None and leg.complete and not self.keeps and 200 <= leg.status < 300:
            usage = self.usage
            usage.feed(leg.take())
            if usage.error() is None and not self.prefill_ended:
                self.prefill_ended = True
                self.on_prefill_end()
                if not self.awaited:
                    return
        decode.tap = decode.relay = None
        decode.bell.ring()

    def wait(self) -> asyncio.Future[None]:
        """Until either leg or the client has news."""
        return self.decode.bell.wait()

    def abort(self) -> None:
        """Close what is still open. Idempotent."""
        leg = self.prefill
        if self.keeps and leg is not None and leg.complete and _fine(leg):
            self._hear(leg)  # it tells what is to be cleaned up
        self._closed = True
        self.give_up(Side.DECODE)
        self.give_up(Side.PREFILL)

    def let_go(self) -> None:
        """It is over, and nobody is called any more: whoever was holds this one, and the whole body
        would stay until the next look for garbage."""
        self.on_prefill_end = self.on_start = self.on_given_up = nothing
        self.follow = None
        if self.prefill is not None:
            self.prefill.bell = self.decode.bell

    def give_up(self, side: Side) -> None:
        """Close one leg; an engine that may still be at work for it is told, once."""
        leg = self.decode if side is Side.DECODE else self.prefill
        if leg is None:
            return
        open_end = leg.error is None or isinstance(leg.error, TimedOut)
        at_work = leg.phase is not Phase.CONNECT and not leg.complete and open_end
        leg.abort()
        if at_work and side not in self._given_up and (not leg.status or _fine(leg)):
            self._given_up += (side,)
            self.on_given_up(side)

    def look_at_prefill(self) -> None:
        """Raise where prefill failed; read what came of its answer, and pass on what decode
        needs of it."""
        leg = self.prefill
        if leg is None or self.prefill_ended:
            return
        if leg.status and not _fine(leg):
            raise Refusal(Side.PREFILL, self.prefill_worker, leg)
        if leg.error is not None:
            raise leg_broke(Side.PREFILL, self.prefill_worker, leg.error)
        if leg.status:
            self._hear(leg)
            if self._heard_bytes > MOST_BYTES:
                raise self._too_long()
        if leg.complete:
            self.prefill_ended = True
            self.on_prefill_end()
            if (said := self.usage.error()) is not None:
                raise stream_said(Side.PREFILL, self.prefill_worker, *said)
            if not self._closed:
                self._pass_on()

    def look_at_decode(self) -> None:
        """Raise where decode failed; tokens of a stream that came before go out first."""
        leg = self.decode
        if leg.status and not _fine(leg):
            raise Refusal(Side.DECODE, self.decode_worker, leg)
        if leg.error is not None and not (leg.buffered_bytes and is_stream(leg)):
            raise leg_broke(Side.DECODE, self.decode_worker, leg.error)

    @property
    def news(self) -> bool:
        """Did prefill fail or end, and nobody looked?"""
        leg = self.prefill
        if leg is None or self.prefill_ended:
            return False
        return leg.over or leg.status >= 300

    @property
    def silent(self) -> bool:
        """Have both engines the request, and did neither say a byte?"""
        legs = (self.prefill, self.decode)
        asked = [leg for leg in legs if leg is not None and leg.phase is not Phase.CONNECT]
        return len(asked) == 2 and not any(leg.received_bytes for leg in asked)

    @property
    def taken(self) -> bool:
        """Did a decode get to know of what prefill keeps for it? Then it frees it, whatever came
        of its leg: one that is closed lets go of it too."""
        leg = self.decode
        if leg.status:
            return _fine(leg)
        return leg.phase is not Phase.CONNECT and (leg.error is None or self._closed_by_us(leg))

    def _closed_by_us(self, leg: Exchange) -> bool:
        return Side.DECODE in self._given_up or isinstance(leg.error, TimedOut)

    def _hear(self, leg: Exchange) -> None:
        if not (data := leg.take()):
            return
        self.usage.feed(data)
        if self.keeps:
            self._heard.append(data)
            self._heard_bytes += len(data)

    def _pass_on(self) -> None:
        if self.merge is not None:
            self.merge.prefill(self.answer)
            self._heard.clear()  # it may be large
        if self.follow is not None:
            self.decode = self.follow(self.answer)

    def _too_long(self) -> LegFailed:
        """It would be too long at any prefill: the caller must ask for less."""
        text = f"prefill {self.prefill_worker} told more than {MOST_BYTES} bytes of this prompt"
        cause = GatewayError("invalid_request", f"{text}: ask for fewer log-probabilities")
        return LegFailed(Side.PREFILL, self.prefill_worker, cause, status=cause.status)


def is_stream(leg: Exchange) -> bool:
    """Is the answer server-sent events?"""
    return leg.stream


def _fine(leg: Exchange) -> bool:
    return 200 <= leg.status < 300

"""Blame: a leg failed; whose fault is it, and what is the client told?

Pure: facts of a leg in, a LegFailed out. dispatch.py raises what this file makes; journey.py books
it on the `guilty` side, or on the pair where it is `shared`. Open it to change how an engine's
failure is shown, or by which words of an engine a fault is laid on its peer.

    4xx of either leg     reaches the client as it is
    refused, 503          503 prefill_failed | decode_failed      (refused: stage connect)
    5xx, cut, malformed   502 prefill_failed | decode_failed     (transfer_failed where the engine
    a deadline            504 deadline_exceeded                   names the stage that failed)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvplane.vocabulary import Stage

from .errors import GatewayError, engine_said
from .legs_errors import LegError, Phase, PoolFull, Refused, Stale, TimedOut, TlsFailed


class Side(StrEnum):
    """Which of the two legs."""

    PREFILL = "prefill"
    DECODE = "decode"


PREFILL, DECODE = Side.PREFILL, Side.DECODE  # a member is looked up ten times as long as a name

# What engines say of a transfer without naming its stage; source: SGLang's and vLLM's own servers.
OF_PEER = {  # said by the one, about the other
    Side.DECODE: (
        "prefill instance", "with prefill", "prefill parallel info", "fetch bootstrap info",
    ),
    Side.PREFILL: ("decode instance", "with decode"),
}  # fmt: skip
OF_BOTH = (
    "transfer failed", "transfer error", "kvtransfer", "kv transfer", "handshake failed",
    "bootstrap failed", "kvpoll.", "kvcache from",
)  # fmt: skip


@dataclass(eq=False)
class LegFailed(Exception):
    """One leg failed first; the other was cancelled and is not to blame."""

    side: Side
    worker: str
    cause: GatewayError  # what the client is told where nothing reached it yet
    leg: LegError | None = None  # the leg's own error, None where the engine answered
    status: int = 0  # the engine's answer, 0 where there was none
    started: bool = False  # part of an answer reached the client
    said: str = ""  # the engine's own words, where it failed in words

    def __str__(self) -> str:
        return f"{self.side} {self.worker}: {self.cause}"

    @property
    def guilty(self) -> Side:
        """Who caused it. A transfer that failed before its blocks were verified is prefill's: it
        was not found, not reached, or sent what nobody may use. Whoever reported it."""
        if self.leg is not None:
            return self.side  # no engine said anything
        if self.cause.stage is not None:
            return Side.DECODE if self.cause.stage == Stage.CONSUME else Side.PREFILL
        if _holds(self.said, OF_PEER[self.side]):
            return Side.DECODE if self.side is Side.PREFILL else Side.PREFILL
        return self.side

    @property
    def shared(self) -> bool:
        """A transfer failed, and nothing tells on which side."""
        if self.leg is not None or self.cause.stage is not None:
            return False
        if _holds(self.said, OF_PEER[self.side]):
            return False
        return _holds(self.said, OF_BOTH)

    @property
    def unreached(self) -> bool:
        """Nobody listened there: nothing was sent."""
        return isinstance(self.leg, Refused)

    @property
    def silent(self) -> bool:
        """Not a byte of an answer came in time."""
        return isinstance(self.leg, TimedOut) and self.leg.phase is Phase.SENT

    @property
    def stale(self) -> bool:
        """A kept connection was dead already, as far as can be told: the engine never began."""
        return isinstance(self.leg, Stale)

    @property
    def crowded(self) -> bool:
        """No connection to it was free: no fault, but no place for the next attempt either."""
        return isinstance(self.leg, PoolFull)

    @property
    def retry_after_s(self) -> float | None:
        """The engine's own word, where it is a number of seconds."""
        told = self.cause.retry_after or ""
        return float(told) if told.isascii() and told.isdecimal() else None

    @property
    def nobodys_fault(self) -> bool:
        """A kept connection that died on reuse, or a full pool of ours: says nothing of health."""
        return isinstance(self.leg, (Stale, PoolFull))

    @property
    def callers_mistake(self) -> bool:
        """A 4xx: the request is wrong, not the worker."""
        return 400 <= self.status < 500


def leg_broke(side: Side, worker: str, leg: LegError) -> LegFailed:
    """No answer, or only a part of one."""
    code, status = f"{side}_failed", 502
    stage = None
    if isinstance(leg, (Refused, TlsFailed, PoolFull)) or leg.phase is Phase.CONNECT:
        status = 503
        stage = None if isinstance(leg, PoolFull) else Stage.CONNECT.value  # a full pool is ours
    elif isinstance(leg, TimedOut):
        code, status = "deadline_exceeded", 504
    message = f"{side} {worker}: {leg.detail}"
    cause = GatewayError(code, message, status=status, stage=stage)
    if isinstance(leg, PoolFull):
        cause.retry_after = "1"
    return LegFailed(side, worker, cause, leg=leg)


def engine_refused(
    side: Side, worker: str, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> LegFailed:
    """An answer that is no success."""
    kind = next((v for k, v in headers if k == b"content-type"), b"application/json")
    later = next((v.decode("latin-1") for k, v in headers if k == b"retry-after"), None)
    said, stage = engine_said(body)
    message = f"{side} {worker} answered {status}: {said}"
    if 400 <= status < 500:
        code = "overloaded" if status == 429 else "invalid_request"
        # Its own words; where it had none, or they did not come whole, ours.
        cause = GatewayError(code, message, status=status, raw=body or None, raw_type=kind)
    else:
        cause = GatewayError(
            _code(side, said, stage), message, status=503 if status == 503 else 502, stage=stage
        )
    cause.retry_after = later
    return LegFailed(side, worker, cause, status=status, said=said if status >= 500 else "")


def stream_said(side: Side, worker: str, message: str, stage: str | None) -> LegFailed:
    """The engine answered 200 and then an error event."""
    text = f"{side} {worker} broke off: {message}"
    cause = GatewayError(_code(side, message, stage), text, stage=stage)
    return LegFailed(side, worker, cause, status=500, said=message)


def _code(side: Side, said: str, stage: str | None) -> str:
    transfer = stage is not None or _holds(said, OF_BOTH) or _holds(said, OF_PEER[side])
    return "transfer_failed" if transfer else f"{side}_failed"


def _holds(text: str, words: tuple[str, ...]) -> bool:
    lower = text.lower()
    return any(word in lower for word in words)

"""Blame: a leg failed; whose fault is it, and what is the client told?

Pure: facts of a leg in, a LegFailed out. dispatch.py raises what this file makes; breaker.py and
retry.py read `side`, `status` and `leg`. Open it to change how an engine's failure is shown.

    4xx of either leg     reaches the client as it is
    refused, 503          503 prefill_failed | decode_failed
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


@dataclass(eq=False)
class LegFailed(Exception):
    """One leg failed first; the other was cancelled and is not to blame."""

    side: Side
    worker: str
    cause: GatewayError  # what the client is told where nothing reached it yet
    leg: LegError | None = None  # the leg's own error, None where the engine answered
    status: int = 0  # the engine's answer, 0 where there was none
    started: bool = False  # part of an answer reached the client

    def __str__(self) -> str:
        return f"{self.side} {self.worker}: {self.cause}"

    @property
    def guilty(self) -> Side:
        """Who caused it. A transfer that failed before its blocks were verified is prefill's: it
        was not found, not reached, or sent what nobody may use. Whoever reported it."""
        if self.cause.stage is None:
            return self.side
        return Side.DECODE if self.cause.stage == Stage.CONSUME else Side.PREFILL

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
    if isinstance(leg, (Refused, TlsFailed, PoolFull)) or leg.phase is Phase.CONNECT:
        status = 503
    elif isinstance(leg, TimedOut):
        code, status = "deadline_exceeded", 504
    message = f"{side} {worker}: {leg.detail}"
    return LegFailed(side, worker, GatewayError(code, message, status=status), leg=leg)


def engine_refused(
    side: Side, worker: str, status: int, headers: list[tuple[bytes, bytes]], body: bytes
) -> LegFailed:
    """An answer that is no success."""
    kind = next((v for k, v in headers if k == b"content-type"), b"application/json")
    later = next((v.decode("latin-1") for k, v in headers if k == b"retry-after"), None)
    message, stage = engine_said(body)
    message = f"{side} {worker} answered {status}: {message}"
    if 400 <= status < 500:
        code = "overloaded" if status == 429 else "invalid_request"
        # Its own words; where it had none, or they did not come whole, ours.
        cause = GatewayError(code, message, status=status, raw=body or None, raw_type=kind)
    else:
        code = "transfer_failed" if stage is not None else f"{side}_failed"
        cause = GatewayError(code, message, status=503 if status == 503 else 502, stage=stage)
    cause.retry_after = later
    return LegFailed(side, worker, cause, status=status)


def stream_said(side: Side, worker: str, message: str, stage: str | None) -> LegFailed:
    """The engine answered 200 and then an error event."""
    code = "transfer_failed" if stage is not None else f"{side}_failed"
    text = f"{side} {worker} broke off: {message}"
    return LegFailed(side, worker, GatewayError(code, text, stage=stage), status=500)

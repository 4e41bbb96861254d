"""Leg errors: what went wrong on the way to one engine, and how far the leg had come.

Pure: exceptions that carry facts. Raised by legs.py and its parts; breaker.py and retry.py read
`phase`, `received_bytes` and `reused`, and nothing else, to blame and to decide about a retry.

    CONNECT (nothing was sent) -> SENT (request out) -> HEAD (first byte came) -> BODY (head came)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """How far a leg had come when it failed."""

    CONNECT = "connect"  # nothing was sent
    SENT = "sent"  # the request is out, not a byte came back; the engine may have acted on it
    HEAD = "head"  # an incomplete head came
    BODY = "body"  # the head came, the body did not end


CONNECT, SENT, HEAD, BODY = Phase  # every leg comes by


@dataclass(eq=False)
class LegError(Exception):
    """Base of everything a leg raises on purpose."""

    origin: str
    phase: Phase
    detail: str
    received_bytes: int = 0
    reused: bool = False

    def __str__(self) -> str:
        return f"{self.origin}: {self.detail} (phase {self.phase})"

    def again(self) -> LegError:
        """The same, to be raised: what is raised holds every frame on its way, and these the leg;
        a leg that held it in turn would stay until the next look for garbage."""
        return type(self)(self.origin, self.phase, self.detail, self.received_bytes, self.reused)


class Refused(LegError):
    """Nobody listens there, or the name or the route leads nowhere. Nothing was sent."""


class TlsFailed(LegError):
    """The TLS handshake failed: certificate, name or protocol. Nothing was sent."""


class TimedOut(LegError):
    """A deadline passed; `phase` tells which."""


class Cut(LegError):
    """The engine closed or reset the connection before its answer ended."""


class Stale(Cut):
    """A kept connection died soon on reuse without a byte. No proof that the engine did nothing."""


class Malformed(LegError):
    """What came is not HTTP, is ambiguous, or passes a cap of the head."""


class TooLarge(LegError):
    """An answer that had to be read whole is longer than allowed."""


class PoolFull(LegError):
    """All connections of this engine are taken and too many legs wait already."""


class Aborted(LegError):
    """We ended the leg ourselves."""

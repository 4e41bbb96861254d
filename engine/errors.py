"""Errors: what an engine refuses or fails, one class per thing a caller can do about it.

api.py turns them into OpenAI-shaped answers; `status` and `code` are what a client sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvplane.vocabulary import Room, Stage


class EngineError(Exception):
    """Base of everything engine/ raises on purpose."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"


class BadSetting(ValueError):
    """A setting that cannot be: the process must not start. Names field, value, what is right."""

    def __init__(self, field: str, value: object, want: str) -> None:
        super().__init__(f"{field} = {value!r}: {want}")


class PortTaken(OSError):
    """Nobody can listen there. Names the address."""


@dataclass(eq=False)
class BadRequest(EngineError):
    """The body is wrong; trying again changes nothing."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"
    field: str
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class UnknownModel(EngineError):
    """Another model than the one served here."""

    status: ClassVar[int] = 404
    code: ClassVar[str] = "model_not_found"
    asked: str
    served: str

    def __str__(self) -> str:
        return f"model {self.asked!r} is not served here; this engine serves {self.served!r}"


@dataclass(eq=False)
class Overloaded(EngineError):
    """No pages within the time allowed, or too many wait. Another engine may have room."""

    status: ClassVar[int] = 503
    code: ClassVar[str] = "overloaded"
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class NotReady(EngineError):
    """No request can be served now; `stage` where a step of a meeting is what is missing."""

    status: ClassVar[int] = 503
    code: ClassVar[str] = "not_ready"
    reason: str
    stage: Stage | None = None

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class RoomFailed(EngineError):
    """One stage of one room failed. Retry in a fresh room."""

    status: ClassVar[int] = 502
    code: ClassVar[str] = "transfer_failed"
    room: Room
    stage: Stage
    reason: str

    def __str__(self) -> str:
        return f"room {self.room}, {self.stage.value}: {self.reason}"


class InjectedFault(EngineError):
    """A fault switch said so."""

    code: ClassVar[str] = "injected_fault"


class CutConnection(EngineError):
    """A fault switch wants the client's connection cut without an answer."""


class Stopping(EngineError):
    """The process ends."""

    status: ClassVar[int] = 503
    code: ClassVar[str] = "overloaded"

"""Errors: what can go wrong in events/ that a caller can do something about.

Pure. BadBatch (a payload that is no batch) lives with the decoders in dialects/base.py. Open it to
add a failure that somebody handles in a way of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


class EventsError(Exception):
    """Base of what events/ raises on purpose."""


@dataclass(eq=False)
class BadFrames(EventsError):
    """A ZMQ message that is neither a batch nor an end mark. Count it, go on."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class Resync(EventsError):
    """The store stands elsewhere than we thought: read it again and continue from there."""

    reason: str  # closed set: gap, epoch, repeat, lost, evicted, failed, empty

    def __str__(self) -> str:
        return f"store stands elsewhere: {self.reason}"


@dataclass(eq=False)
class Mistaken(EventsError):
    """A batch of another worker than the one that is followed. Never take it; say so."""

    what: str  # closed set: topic, rank, replay
    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(eq=False)
class BadEndpoint(EventsError, ValueError):
    """An events or replay endpoint that cannot be used. Raised before anything is started."""

    value: str
    want: str

    def __str__(self) -> str:
        return f"endpoint {self.value!r}: must be {self.want}"

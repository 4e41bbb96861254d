"""Errors: what can go wrong between two engines, one class per thing a caller can do about it.

Pure. Every error carries the stage it belongs to and a closed `kind` for metrics and verdicts;
`str()` is the sentence that ends up in the ledger. Retry always means: a fresh room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kvplane.vocabulary import Stage


class TransferError(Exception):
    """Base of everything transfer/ raises on purpose."""

    kind: ClassVar[str] = "other"
    stage: Stage = Stage.VERIFY
    part: str = ""  # `prefill tp=1`: where it began, if a room has several prefill ranks
    where: str = ""  # host:port of that rank

    def sentence(self) -> str:
        """What happened, and at which of several ranks."""
        return f"{self.part}: {self}" if self.part else str(self)


@dataclass(eq=False)
class Unresolved(TransferError):
    """The bootstrap server did not tell where the prefill's ranks are."""

    kind: ClassVar[str] = "unresolved"
    address: str
    reason: str
    stage: Stage = Stage.RESOLVE_TOPOLOGY

    def __str__(self) -> str:
        return f"bootstrap {self.address}: {self.reason}"


@dataclass(eq=False)
class LayoutMismatch(TransferError):
    """The two sides do not store KV alike; this pair can never work. `fields` names all of it."""

    kind: ClassVar[str] = "layout"
    peer: str
    fields: tuple[str, ...]
    stage: Stage = Stage.CONNECT

    def __str__(self) -> str:
        return f"{self.peer} does not fit: {', '.join(self.fields)}"


@dataclass(eq=False)
class Refused(TransferError):
    """The peer understood us and said no."""

    kind: ClassVar[str] = "refused"
    peer: str
    reason: str
    stage: Stage = Stage.CONNECT

    def __str__(self) -> str:
        return f"{self.peer} refused: {self.reason}"


@dataclass(eq=False)
class PeerGone(TransferError):
    """Connection refused, reset or closed before its time."""

    kind: ClassVar[str] = "peer-gone"
    peer: str
    reason: str
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"{self.peer} is gone: {self.reason}"


@dataclass(eq=False)
class Stalled(TransferError):
    """The peer is connected but nothing moved for the time allowed."""

    kind: ClassVar[str] = "stalled"
    peer: str
    reason: str
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"{self.peer} stalled: {self.reason}"


@dataclass(eq=False)
class DeadlineExceeded(TransferError):
    """The time for this room is over; `waiting_for` says what had not happened yet."""

    kind: ClassVar[str] = "deadline"
    peer: str
    waiting_for: str
    after_s: float
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"{self.peer}: {self.waiting_for} not within {self.after_s:g} s"


@dataclass(eq=False)
class PrefillFailed(TransferError):
    """The prefill told us that this room will never be delivered."""

    kind: ClassVar[str] = "prefill-failed"
    peer: str
    room: int
    reason: str
    stage: Stage = Stage.VERIFY
    clean: bool = False  # it also said that nothing of the room is under way any more

    def __str__(self) -> str:
        return f"prefill {self.peer} gave up room {self.room}: {self.reason}"


@dataclass(eq=False)
class LeaseExpired(TransferError):
    """The prefill kept the room's KV as long as it had promised, and nobody came or renewed."""

    kind: ClassVar[str] = "lease"
    peer: str
    room: int
    after_s: float
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"{self.peer}: lease expired, room {self.room} was kept for {self.after_s:g} s"


@dataclass(eq=False)
class NotRegistered(TransferError):
    """A page lies outside the memory that was registered; a mistake on our own side."""

    kind: ClassVar[str] = "not-registered"
    page: int
    pages: int
    stage: Stage = Stage.CONNECT

    def __str__(self) -> str:
        return f"page {self.page} is not registered, pages are 0 to {self.pages - 1}"


@dataclass(eq=False)
class NotAvailable(TransferError):
    """A backend that is known by name but cannot run in this process."""

    kind: ClassVar[str] = "not-available"
    backend: str
    reason: str
    stage: Stage = Stage.CONNECT

    def __str__(self) -> str:
        return f"backend {self.backend}: not available here: {self.reason}"


@dataclass(eq=False)
class NoRegion(TransferError):
    """A part of a page (head, layer) that this rank does not hold."""

    kind: ClassVar[str] = "no-region"
    name: str
    have: tuple[str, ...]
    stage: Stage = Stage.CONNECT

    def __str__(self) -> str:
        some = ", ".join(self.have[:4]) + (", ..." if len(self.have) > 4 else "")
        return f"region {self.name!r} is not held here, held are {some}"


@dataclass(eq=False)
class BadMetadata(TransferError):
    """The metadata record is torn, foreign, or was never written."""

    kind: ClassVar[str] = "metadata"
    reason: str
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"metadata record: {self.reason}"


@dataclass(eq=False)
class RoomMismatch(TransferError):
    """Metadata of another room arrived. Retry in a fresh room; never accept."""

    kind: ClassVar[str] = "room"
    expected: int
    received: int
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"room mismatch ({self.received} != {self.expected})"


@dataclass(eq=False)
class GenerationMismatch(TransferError):
    """Another life of the peer, or another attempt, than the one we met."""

    kind: ClassVar[str] = "generation"
    expected: str
    received: str
    peer: str = "prefill"
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"{self.peer}: generation {self.received!r}, expected {self.expected!r}"


@dataclass(eq=False)
class ShortData(TransferError):
    """Fewer (or more) pages or tokens than agreed."""

    kind: ClassVar[str] = "short"
    what: str
    expected: int
    received: int
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"short data: {self.received} of {self.expected} {self.what}"


@dataclass(eq=False)
class OtherPrompt(TransferError):
    """Both sides have as many tokens, but not the same: their KV is no use to each other."""

    kind: ClassVar[str] = "prompt"
    peer: str
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        return f"{self.peer} has another prompt of as many tokens"


@dataclass(eq=False)
class ChecksumMismatch(TransferError):
    """Pages do not hold the bytes the prefill computed; `positions` count from the first sent."""

    kind: ClassVar[str] = "checksum"
    positions: Sequence[int] = field(default_factory=tuple)
    stage: Stage = Stage.VERIFY

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.positions[:8]))
        more = ", ..." if len(self.positions) > 8 else ""
        return f"checksum mismatch in {len(self.positions)} pages (positions {shown}{more})"


_ALL: list[type[TransferError]] = [TransferError, *TransferError.__subclasses__()]
KINDS = tuple(sorted(cls.kind for cls in _ALL))  # closed set of label values

"""Errors: what can go wrong between a rank, its directory and who asks it.

Pure. One class per thing a caller can do about it; `stage` says which step of a room it broke, and
`str()` is the sentence that ends up in the ledger. Foreign exceptions become these in client.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from kvplane.vocabulary import Generation, Stage

MOST_SHOWN = 100  # characters of a foreign value that are repeated in a sentence
SHORT = Repr()  # of a value that may be a million characters long or a thousand levels deep
SHORT.maxlevel, SHORT.maxstring, SHORT.maxlong, SHORT.maxother = 4, 2 * MOST_SHOWN, 200, 200


class BootstrapError(Exception):
    """Base of everything bootstrap/ raises on purpose."""

    stage: Stage = Stage.RESOLVE_TOPOLOGY


@dataclass(eq=False)
class BadAddress(BootstrapError):
    """A text that names no host and port; a configuration error, trying again is useless."""

    text: str
    why: str

    def __str__(self) -> str:
        return f"address {self.text[:MOST_SHOWN]!r}: {self.why}"


@dataclass(eq=False)
class NotRoutable(BootstrapError):
    """A host that others cannot dial; a configuration error."""

    host: str
    why: str

    def __str__(self) -> str:
        return f"host {self.host[:MOST_SHOWN]}: {self.why}; set --advertise-host"


@dataclass(eq=False)
class BadInput(BootstrapError):
    """A request to a directory that cannot be meant; names the field. The caller must change it."""

    field: str
    value: Any
    want: str
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        shown = SHORT.repr(self.value)
        if len(shown) > MOST_SHOWN:
            shown = shown[:MOST_SHOWN] + "..."
        return f"{self.field} {shown}: must be {self.want}"


class BadRegistration(BadInput):
    """A registration that cannot be meant; the table is unchanged."""


@dataclass(eq=False)
class Inconsistent(BootstrapError):
    """A rank that cannot belong to the instance that is registering; the table is unchanged."""

    text: str  # as SGLang words it where SGLang refuses too, else what differs
    differing: tuple[str, ...] = ()  # each member with both values
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class LateLife(BootstrapError):
    """A rank of a life that has been replaced; it must not put its addresses back."""

    sent: Generation
    current: Generation
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return f"generation {self.sent} was replaced by {self.current}"


@dataclass(eq=False)
class NoDirectory(BootstrapError):
    """Nobody listens at the address, so no rank can have registered there."""

    address: str
    why: str
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return f"no bootstrap server at {self.address}: {self.why}"


@dataclass(eq=False)
class Silent(BootstrapError):
    """The directory accepted or swallowed the call and did not answer in time."""

    address: str
    waited_s: float
    stage: Stage = Stage.RESOLVE_TOPOLOGY

    def __str__(self) -> str:
        return f"bootstrap server {self.address}: no answer within {self.waited_s:.1f} s"


@dataclass(eq=False)
class NotRegistered(BootstrapError):
    """The directory is up but ranks are missing."""

    address: str
    text: str  # as the server counts them
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return f"bootstrap server {self.address}: {self.text}"


@dataclass(eq=False)
class RankUnknown(BootstrapError):
    """The table is complete and holds no such rank: the two sides disagree about sizes."""

    address: str
    text: str
    stage: Stage = Stage.RESOLVE_RANK

    def __str__(self) -> str:
        return f"bootstrap server {self.address}: {self.text}"


@dataclass(eq=False)
class Refused(BootstrapError):
    """The directory understood the call and said no; the same call will fail again."""

    address: str
    status: int
    text: str
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return f"bootstrap server {self.address} refused ({self.status}): {self.text}"


@dataclass(eq=False)
class BadAnswer(BootstrapError):
    """Something answers there that is no bootstrap server, or a broken one."""

    address: str
    why: str
    stage: Stage = Stage.RESOLVE_TOPOLOGY

    def __str__(self) -> str:
        return f"{self.address} does not answer like a bootstrap server: {self.why}"


@dataclass(eq=False)
class NewLife(BootstrapError):
    """The instance behind the address was replaced since its topology was read: read it again."""

    address: str
    expected: Generation | None
    received: Generation | None
    stage: Stage = Stage.RESOLVE_RANK

    def __str__(self) -> str:
        if self.received is None and self.expected is None:  # SGLang's own server tells none
            return f"instance at {self.address} was replaced: it tells another table"
        return f"instance at {self.address} is now {self.received}, was {self.expected}"


@dataclass(eq=False)
class NotWelcome(BootstrapError):
    """Node 0 refused a node, for a reason that dialling again does not change."""

    leader: str
    reason: str
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return f"node 0 at {self.leader} refused: {self.reason}"


@dataclass(eq=False)
class NodesMissing(BootstrapError):
    """An instance is not complete; the sentence names who is late or lost."""

    text: str
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class NodeLost(BootstrapError):
    """The node that was asked is not there, or went away before it answered."""

    node: str
    why: str
    stage: Stage = Stage.REGISTER

    def __str__(self) -> str:
        return f"{self.node}: {self.why}"


class NodeFailed(NodeLost):
    """The node that was asked could not do it; it is there."""


class NodeSilent(NodeLost):
    """The node that was asked is there and did not answer in time."""

"""Unavailable: backends that are known by name but cannot run in this process.

Edge, a member of this seam: it looks which packages are installed. Such a member is built like
any other and says why it cannot be used where it is first used, at start or connect, so that a
wrong choice ends in one sentence. Open it to change what is asked of the machine.

    BACKENDS["mori"](settings, metrics)   an UnavailableBackend
    await ....start("127.0.0.1", [...])   NotAvailable: backend mori: not available here: ...
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvplane.vocabulary import Generation

from ..errors import NotAvailable
from ..metrics import TransferMetrics
from ..regions import PageOut, Region, Regions
from ..settings import TransferSettings
from .base import Landing, MakeBackend, Offer, Peer, Ticket


class UnavailableBackend:
    """See base.Backend; refuses whatever would move or offer memory."""

    one_sided = False

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def _refuse(self) -> NoReturn:
        raise NotAvailable(self.name, self.reason)

    async def start(self, advertise: str, regions: Sequence[Region], host: str = "") -> None:
        """Raises NotAvailable."""
        self._refuse()

    @property
    def regions(self) -> Regions:
        """Raises NotAvailable."""
        self._refuse()

    def offer(self) -> Offer:
        """Raises NotAvailable."""
        self._refuse()

    def landing(self, ticket: Ticket, deadline_s: float) -> Landing:
        """Raises NotAvailable."""
        self._refuse()

    async def fence(self, landing: Landing, clean: bool = False) -> None:
        """Nothing ever lands."""

    async def connect(
        self, offer: Offer, ticket: Ticket, generation: Generation, deadline_s: float
    ) -> Peer:
        """Raises NotAvailable."""
        self._refuse()

    async def write(self, peer: Peer, pages: Sequence[PageOut], deadline_s: float) -> None:
        """Raises NotAvailable."""
        self._refuse()

    async def write_record(self, peer: Peer, record: bytes, deadline_s: float) -> None:
        """Raises NotAvailable."""
        self._refuse()

    async def close_peer(self, peer: Peer) -> None:
        """Nothing was opened."""

    async def stop(self) -> None:
        """Nothing was started."""

    def counts(self) -> dict[str, int]:
        """Nothing is ever held."""
        return {}


@dataclass(frozen=True, slots=True)
class Missing:
    """The place of such a backend in the table."""

    name: str
    reason: str  # one sentence: what it needs

    def __call__(self, settings: TransferSettings, metrics: TransferMetrics) -> UnavailableBackend:
        """A MakeBackend."""
        return UnavailableBackend(self.name, self.reason)


def where_installed(
    name: str, modules: Sequence[str], package: str, make: MakeBackend
) -> MakeBackend:
    """`make`, or Missing where none of these top-level modules can be imported."""
    if any(importlib.util.find_spec(module) is not None for module in modules):
        return make
    return Missing(name, f"it needs the package {package}, which is not installed")


def why_unavailable(make: MakeBackend) -> str | None:
    """Why this member of the table cannot run here; None = it can."""
    return make.reason if isinstance(make, Missing) else None

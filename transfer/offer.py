"""Offer, the prefill side: who wants which room, and delivering it. Edge (signatures first)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvplane.runtime import Clock
from kvplane.vocabulary import Generation, Room, StageRecord

from .backends.base import Backend
from .metadata import Layout, Metadata
from .metrics import TransferMetrics
from .settings import TransferSettings
from .tamper import UNTOUCHED, Tamper


class Offers:
    """One per prefill rank: its control port and all rooms it owes."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        generation: Generation,
        record: Callable[[StageRecord], None],
        clock: Clock,
        settings: TransferSettings,
        metrics: TransferMetrics,
        tamper: Tamper = UNTOUCHED,
        by: str = "",  # goes into every StageRecord
    ) -> None:
        raise NotImplementedError

    async def start(self, host: str, port: int = 0) -> int:
        """Listen for decodes; returns the rank port to register."""
        raise NotImplementedError

    async def deliver(
        self, room: Room, pages: Sequence[int], metadata: Metadata, deadline_s: float
    ) -> None:
        """Wait until a decode bound this room, send, and return on its good verdict.

        `pages` are ours, in prompt order, those a decode says it holds already included (they are
        skipped). room, generation, pages, page_sums, attempt of `metadata` are filled in here.
        Raises TransferError; the pages are not read any more when this returns or raises.
        """
        raise NotImplementedError

    def fail(self, room: Room, reason: str) -> None:
        """Tell the decode of this room, waiting or late, that it will never come."""
        raise NotImplementedError

    async def close(self) -> None:
        """End every room, close every socket. Does not stop the backend."""
        raise NotImplementedError

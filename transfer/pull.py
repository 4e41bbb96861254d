"""Pull, the decode side: resolve, connect, verify. Edge (signatures first)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvplane.runtime import Clock
from kvplane.vocabulary import BootstrapTriple, Generation, Shape, StageRecord

from .backends.base import Backend
from .metadata import Layout, Metadata
from .metrics import TransferMetrics
from .settings import TransferSettings


class Puller:
    """One per decode rank."""

    def __init__(
        self,
        backend: Backend,
        layout: Layout,
        resolver: Any,
        generation: Generation,
        record: Callable[[StageRecord], None],
        clock: Clock,
        settings: TransferSettings,
        metrics: TransferMetrics,
        shape: Shape,
        by: str = "",  # goes into every StageRecord
    ) -> None:
        raise NotImplementedError

    async def pull(
        self,
        triple: BootstrapTriple,
        pages: Sequence[int],
        tokens: int,
        *,
        deadline_s: float,
        released: Callable[[Sequence[int]], None],
        dp_rank: int | None = None,
        held_pages: int = 0,
    ) -> Metadata:
        """Fill `pages` with the KV of this room; returns only what was verified.

        `pages` are ours, in prompt order, without the first `held_pages` of the prompt that we hold
        already; `tokens` = prompt tokens. On any failure (cancel included) raises, and the pages
        come back through `released(pages)`, exactly once, as soon as no late byte can hit them:
        before this raises, or later. On success they are the caller's.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End every pull; waits for fences, bounded. Does not stop the backend."""
        raise NotImplementedError

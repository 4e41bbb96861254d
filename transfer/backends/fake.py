"""fake backend. Edge (signatures first)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..metrics import TransferMetrics
from ..settings import TransferSettings


class FakeBackend:
    """See base.Backend."""

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        raise NotImplementedError

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

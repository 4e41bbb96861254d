"""Showing: evidence for others: readers of other gateways, and OpenTelemetry, where that is wanted.

Edge of the roof. plane.py calls it once for each gateway. Open it to bring evidence somewhere else.
"""

from __future__ import annotations

from kvplane.composite import Composite
from kvplane.index import Lasting
from kvplane.router import Gateway, SharedEvidence, Spans
from kvplane.runtime import Clock
from kvplane.settings import Settings


async def show(gateway: Gateway, told: Settings, clock: Clock, plane: Composite) -> None:
    """Begin what the flags ask for. Raises NoSpans where a library for it is missing."""
    unshared = gateway.metrics.evidence_unshared.inc
    if lifetime_s := told.values.get("evidence_secs"):
        texts = Lasting(told["redis"], told["redis_prefix"])
        plane.closing(texts)
        gateway.shared = SharedEvidence(gateway.ledger, texts, clock, lifetime_s, unshared)
        await plane.begin(gateway.shared)
    if told.values.get("spans"):
        spans = Spans(on_dropped=unshared)
        gateway.ledger.on_close.append(spans.ended)
        await plane.begin(spans)

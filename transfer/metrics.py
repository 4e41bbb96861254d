"""Metrics of transfer/: what was moved, refused, failed and is kept away."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class TransferMetrics:
    """One set per process; both roles share it."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        own = registry if registry is not None else CollectorRegistry()
        self.quarantined = Gauge(
            "kvplane_transfer_quarantined_pages",
            "Pages of failed rooms that may still be hit by late bytes",
            registry=own,
        )
        self.rooms = Gauge(
            "kvplane_transfer_rooms", "Rooms open now, by side", ["side"], registry=own
        )
        self.bytes = Counter(
            "kvplane_transfer_bytes_total",
            "Page bytes confirmed (sent) or landed (received)",
            ["direction"],
            registry=own,
        )
        self._outcomes(own)

    def _outcomes(self, own: CollectorRegistry) -> None:
        """How writes and rooms went."""
        self.writes = Counter(
            "kvplane_transfer_writes_total", "Writes posted to a peer", ["outcome"], registry=own
        )
        self.abandoned = Counter(
            "kvplane_transfer_abandoned_writes_total",
            "Calls a transfer library had not ended when their source pages were given back",
            registry=own,
        )
        self.failures = Counter(
            "kvplane_transfer_failures_total",
            "Rooms that failed, by side and kind of failure",
            ["side", "kind"],
            registry=own,
        )
        self.refused = Counter(
            "kvplane_transfer_refused_connections_total",
            "Connections closed because of what they said: garbage, unknown session, too many",
            ["socket", "why"],
            registry=own,
        )
        self.seconds = Histogram(
            "kvplane_transfer_seconds",
            "From bound to agreed, by side",
            ["side"],
            buckets=BUCKETS,
            registry=own,
        )

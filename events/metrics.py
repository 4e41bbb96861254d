"""Metrics: what events/ counts.

Pure: counters over a registry that is passed in. Whatever is dropped, repaired or retried has one
here; label values come from closed sets. Open it to count something more.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

LAG_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)


class EventsMetrics:
    """Names: kvplane_events_<thing>_<unit|total>."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvplane_events_{name}", text, labels, registry=registry)

        self.batches = count("batches_total", "Engine batches taken in order")
        self.events = count("events_total", "Engine events understood", "kind")
        self.dropped = count("dropped_total", "Events dropped: unknown or malformed", "kind")
        self.left_out = count("left_out_total", "Blocks or events not indexed, why", "reason")
        self.undecodable = count("undecodable_total", "Payloads that are no batch; worker cleared")
        self.malformed = count("malformed_total", "ZMQ messages that are no batch")
        self.repeats = count("repeats_total", "Batches seen before and ignored")
        self.gaps = count("gaps_total", "Holes in a stream by how they ended", "outcome")
        self.replays = count("replays_total", "Replays asked for by answer", "outcome")
        self.restarts = count("restarts_total", "New lives of engines noticed")
        self.resyncs = count("resyncs_total", "Times the store stood elsewhere", "reason")
        self.store_errors = count("store_errors_total", "Store calls that failed and were retried")
        self.lag = Histogram(
            "kvplane_events_lag_seconds",
            "Engine's clock at a batch until it is in the store",
            buckets=LAG_S,
            registry=registry,
        )
        self.workers = Gauge(
            "kvplane_events_workers",
            "Subscribed workers by knowledge",
            ["state"],
            registry=registry,
        )

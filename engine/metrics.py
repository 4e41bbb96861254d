"""Metrics of engine/: what was asked, computed, told and kept."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
STAGE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
PREFIX = "kvplane_engine_"


class EngineMetrics:
    """One set per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, help_, labels, registry=registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, help_, labels, registry=registry)

        def seconds(name: str, help_: str, buckets: Sequence[float], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, help_, labels, registry=registry, buckets=buckets)

        self.samples = counter(
            "samples_total", "Samples that ended: ok, failed, refused, cancelled", "outcome"
        )
        self.tokens = counter(
            "tokens_total", "Tokens: prompt (computed here), cached, fetched, answer", "source"
        )
        self.pages = gauge("pages", "Pages by state: free, used, quarantined", "dp_rank", "state")
        self.evicted = gauge("evicted_blocks", "Blocks evicted since the start", "dp_rank")
        self.waiting = gauge("waiting_samples", "Samples that wait for pages", "dp_rank")
        self.compute = seconds(
            "compute_seconds", "One job of the compute thread, waiting included", STEP_BUCKETS
        )
        self.stages = seconds(
            "stage_seconds", "Stages of rooms as seen here", STAGE_BUCKETS, "stage", "outcome"
        )
        self.batches = counter("event_batches_total", "Event batches published")
        self.replays = counter(
            "replays_total", "Replay requests: served, ignored (no replay request)", "outcome"
        )
        self.registrations = counter(
            "registrations_total", "Tries to register all ranks at the directory", "outcome"
        )
        self.faults = counter("injected_faults_total", "Faults a switch injected", "kind")

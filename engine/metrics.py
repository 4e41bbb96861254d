"""Metrics of engine/: what was asked, computed, told and kept."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
STAGE_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


class EngineMetrics:
    """One set per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.samples = Counter(
            "kvplane_engine_samples_total",
            "Samples that ended: ok, failed, refused, cancelled",
            ["outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "kvplane_engine_tokens_total",
            "Tokens by source: prompt (computed here), cached, fetched, answer",
            ["source"],
            registry=registry,
        )
        self.pages = Gauge(
            "kvplane_engine_pages",
            "Pages of a dp rank by state: free, used, quarantined",
            ["dp_rank", "state"],
            registry=registry,
        )
        self.evicted = Gauge(
            "kvplane_engine_evicted_blocks",
            "Blocks evicted since the start",
            ["dp_rank"],
            registry=registry,
        )
        self.waiting = Gauge(
            "kvplane_engine_waiting_samples",
            "Samples that wait for pages",
            ["dp_rank"],
            registry=registry,
        )
        self.compute = Histogram(
            "kvplane_engine_compute_seconds",
            "One job of the compute thread, waiting included",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.stages = Histogram(
            "kvplane_engine_stage_seconds",
            "Stages of rooms as this engine saw them",
            ["stage", "outcome"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self.batches = Counter(
            "kvplane_engine_event_batches_total", "Event batches published", registry=registry
        )
        self.replays = Counter(
            "kvplane_engine_replays_total",
            "Replay requests, by outcome: served, ignored (no replay request)",
            ["outcome"],
            registry=registry,
        )
        self.registrations = Counter(
            "kvplane_engine_registrations_total",
            "Tries to register all ranks at the bootstrap server",
            ["outcome"],
            registry=registry,
        )
        self.faults = Counter(
            "kvplane_engine_injected_faults_total",
            "Faults that a switch injected",
            ["kind"],
            registry=registry,
        )

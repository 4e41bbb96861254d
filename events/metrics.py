"""Metrics: what events/ counts.

Pure: counters over a registry that is passed in. Whatever is dropped, repaired or retried has one
here; label values come from closed sets. Open it to count something more.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvplane.vocabulary import Change, Removed, Stored

from .dialects.base import AllCleared, BlocksRemoved, BlocksStored, Decoded
from .states import State

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
KINDS = {BlocksStored: "stored", BlocksRemoved: "removed", AllCleared: "cleared"}
UNKNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared", "medium")
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
        self._waiting = count("waiting_total", "Blocks told before what explains them", "outcome")
        self.undecodable = count("undecodable_total", "Payloads that are no batch; worker cleared")
        self.malformed = count("malformed_total", "ZMQ messages that are no batch")
        self.repeats = count("repeats_total", "Batches seen before and ignored")
        self.gaps = count("gaps_total", "Holes in a stream by how they ended", "outcome")
        self.replays = count("replays_total", "Replays asked for by answer", "outcome")
        self.restarts = count("restarts_total", "New lives of engines noticed")
        self.lives = count("lives_total", "Lives begun anew, by what showed the end of one", "by")
        self.mistaken = count("mistaken_total", "Batches of another worker, not taken", "what")
        self.portless = count("topics_without_port_total", "Streams whose topic names no port")
        self.evictions = count("evictions_total", "Times the store was seen to throw keys away")
        self.beats = count("beats_total", "Signs of life in the store", "outcome")
        self.resyncs = count("resyncs_total", "Times the store stood elsewhere", "reason")
        self.store_errors = count("store_errors_total", "Store calls that failed and were retried")
        self._unknown = count("unknown_fields_total", "New names of fields and media", "kind")
        self._kinds: dict[type, Counter] = {
            noun: self.events.labels(kind) for noun, kind in KINDS.items()
        }
        self._measures(registry)

    def _measures(self, registry: CollectorRegistry) -> None:
        """What is no plain count."""
        self.lag = Histogram(
            "kvplane_events_lag_seconds",
            "From a batch off the wire, waiting for more included, until it is in the store",
            buckets=LAG_S,
            registry=registry,
        )
        self._blocks, self._numbers = (
            Histogram(f"kvplane_events_apply_{what}", text, buckets=SIZES, registry=registry)
            for what, text in (
                ("blocks", "Blocks stored or removed in one write to the store"),
                ("batches", "Engine batches in one write to the store"),
            )
        )
        self.workers, self.streams = (
            Gauge(f"kvplane_events_{what}", text, ["state"], registry=registry)
            for what, text in (
                ("workers", "Subscribed workers by knowledge"),
                ("streams", "Subscribed streams by state"),
            )
        )
        for state in State:
            self.streams.labels(state.value)

    def heard(self, decoded: Decoded) -> None:
        """One batch in order."""
        self.batches.inc()
        events = decoded.events
        kinds = Tally(map(type, events)) if len(events) != 1 else {type(events[0]): 1}
        for kind, number in kinds.items():
            self._kinds[kind].inc(number + (decoded.joined if kind is BlocksRemoved else 0))
        for drop in decoded.dropped:
            self.dropped.labels(drop.kind).inc()
        for name in decoded.unknown:
            member = name.partition(".")[0].partition(":")[0]
            self._unknown.labels(member if member in UNKNOWN else "other").inc()

    def translated(self, left_out: Mapping[str, int], waiting: Mapping[str, int]) -> None:
        """What one batch had beside what was indexed."""
        for reason, number in left_out.items():
            self.left_out.labels(reason).inc(number)
        for outcome, number in waiting.items():
            self._waiting.labels(outcome).inc(number)

    def applied(self, changes: Iterable[Change], batches: int) -> None:
        """One write to the store."""
        told = (change for change in changes if isinstance(change, Stored | Removed))
        self._blocks.observe(sum(len(change.blocks) for change in told))
        self._numbers.observe(batches)

"""Metrics: what the index counts, in Prometheus' words.

Edge: writes into the registry it is given. Numbers per worker are read from the view when somebody
scrapes, so that applying changes pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.tallies import spreads

from . import answers
from .chains import Chains
from .view import TIERS, View


class IndexMetrics:
    """Counters of the follower and the query API."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.entries = Counter(
            "kvplane_index_entries_total", "Stream entries applied to the view", registry=registry
        )
        self.snapshots = Counter(
            "kvplane_index_snapshots_total", "Snapshots loaded into the view", registry=registry
        )
        self.store_errors = Counter(
            "kvplane_index_store_errors_total",
            "Failures of the store or its stream, or of the view over it, by kind",
            ["kind"],  # down | cursor_gone | row | broken
            registry=registry,
        )
        self.rank_seconds = spreads(
            registry,
            "kvplane_index_rank_seconds",
            "Time to hash and rank one question",
            (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
        )

    def watch(
        self, view: View, lag_ms: Callable[[], float], down_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        """From now on a scrape shows what this view holds and knows, and how late it is."""
        self.registry.register(ViewCollector(view, lag_ms, down_s))

    def watch_chains(self, chains: Chains) -> None:
        """From now on a scrape shows how much of what is asked was named before."""
        self.registry.register(ChainsCollector(chains))


class ChainsCollector(Collector):
    """Blocks that were hashed or remembered; read at scrape time."""

    def __init__(self, chains: Chains) -> None:
        self._chains = chains

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not scrape us to know our names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """A counter by source, and the bytes that are held."""
        text = "Blocks of prompts by where their names came from"
        blocks = CounterMetricFamily("kvplane_index_chain_blocks", text, labels=["source"])
        for source in ("recalled", "hashed"):
            blocks.add_metric([source], self._chains.blocks[source])
        yield blocks
        text = "Bytes of names and tokens that are remembered"
        yield GaugeMetricFamily("kvplane_index_chain_bytes", text, value=self._chains.held_bytes)


class ViewCollector(Collector):
    """Blocks per worker and tier, how far each is known, how far behind the view is; read at
    scrape time."""

    def __init__(
        self, view: View, lag_ms: Callable[[], float], down_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._view, self._lag_ms, self._down_s = view, lag_ms, down_s

    def collect(self) -> Iterator[Metric]:
        """One gauge family each, built now."""
        blocks = GaugeMetricFamily(
            "kvplane_index_blocks", "Blocks a worker holds", labels=["worker", "tier"]
        )
        known = GaugeMetricFamily(
            "kvplane_index_worker_knowledge",
            "1 for the state in which a worker is known: exact, partial, dark or off",
            labels=["worker", "state"],
        )
        for worker in self._view.workers():
            facts = self._view.facts(worker)
            for tier, count in zip(TIERS, facts.counts if facts else (), strict=False):
                blocks.add_metric([str(worker), tier.value], count)
            state, _ = answers.trust(self._view, {}, worker, self._down_s())
            known.add_metric([str(worker), state.value], 1)
        yield blocks
        yield known
        text = "Ingest processes that live; their words alone are believed"
        yield GaugeMetricFamily(
            "kvplane_index_ingests_living", text, value=len(self._view.living or ())
        )
        text = "Age of the last change when it was applied, and how long the store is away"
        yield GaugeMetricFamily("kvplane_index_lag_seconds", text, value=self._lag_ms() / 1000)

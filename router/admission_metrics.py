"""Admission metrics: who runs, who waits, and who was turned away.

Edge: read when somebody scrapes, so that a request pays for none of it. admission.py counts;
api.py registers this. Label values are names of keys, which a person chose, and closed sets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .admission import Admission
from .keys import Key


class AdmissionState(Collector):
    """Gauges and counters of one gateway's admission."""

    def __init__(self, admission: Admission, keys: Iterable[Key]) -> None:
        self._admission, self._keys = admission, tuple(keys)

    def describe(self) -> list[Any]:
        """Nothing: the registry need not scrape us to know our names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """One sample per key, reason or place."""
        places = self._admission.places
        yield _gauge("running", "Requests that have a place.", places.running)
        yield _gauge("waiting", "Requests that wait for one.", places.waiting)
        held = "Bytes of the bodies of requests under way."
        yield _gauge("body_bytes", held, self._admission.held_bytes)
        refused = _counter("refused", "Requests turned away, by key and why.", ["key", "reason"])
        for (key, why), count in list(self._admission.refused.items()):
            refused.add_metric([key, why], count)
        waited = _counter("waited", "Requests that had to wait, by what came of it.", ["outcome"])
        for outcome, count in list(self._admission.waited.items()):
            waited.add_metric([outcome], count)
        keyed = GaugeMetricFamily(
            "kvplane_router_key_running", "Requests of a key, waiting or not.", labels=["key"]
        )
        for one in self._keys:
            keyed.add_metric([one.name], one.running)
        yield from (refused, waited, keyed)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvplane_router_admission_{name}", text, value=value)


def _counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvplane_router_admission_{name}", text, labels=labels)

"""Prompt metrics: what asking engines for tokens, and comparing ours with theirs, came to.

Edge: a collector, read when somebody scrapes. Numbers are kept where they are made, in
engine_tokens.py and self_check.py. Open it to show another of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .engine_tokens import EngineTokens
from .self_check import OUTCOMES, SelfCheck

TOLD = ("told", "remembered", "no_route", "engine_silent", "engine_refused")


class TokensState(Collector):
    """Counters of both, and a line per worker that is compared."""

    def __init__(self, source: EngineTokens, checks: SelfCheck) -> None:
        self._source, self._checks = source, checks

    def describe(self) -> list[Any]:
        """Nothing: the registry need not scrape us to know our names."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Every outcome is there from the start, so that a rate can be made of it."""
        text = "Prompts whose tokens engines were asked for, by what came of it."
        asked = CounterMetricFamily("kvplane_router_engine_tokens", text, labels=["outcome"])
        for outcome in TOLD:
            asked.add_metric([outcome], self._source.counted[outcome])
        text = "Comparisons of our tokens with those of an engine, by what came of it."
        checks = CounterMetricFamily("kvplane_router_self_checks", text, labels=["outcome"])
        for outcome in OUTCOMES:
            checks.add_metric([outcome], self._checks.counted[outcome])
        text = "1 for what the last comparison of a worker's tokens came to."
        last = GaugeMetricFamily("kvplane_router_self_check", text, labels=["pod", "outcome"])
        for pod, state in self._checks.states().items():
            for outcome in OUTCOMES:
                last.add_metric([pod, outcome], float(state.outcome == outcome))
        yield from (asked, checks, last)

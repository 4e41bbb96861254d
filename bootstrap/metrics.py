"""Bootstrap metrics: registrations, lookups, lives, rooms and resolutions, for Prometheus.

Edge: counters on a registry that is given. Open it to count something new; label values come from
closed sets.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from .rooms import RoomTable

GRAIN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class BootstrapMetrics:
    """All counters of bootstrap/; one set per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvplane_bootstrap_{name}", text, labels, registry=registry)

        self.requests = counter(
            "requests_total", "Requests to the directory, by route and status.", "route", "status"
        )
        self.lives = counter("lives_total", "Instances that came back: a new generation began.")
        self.takeovers = counter(
            "takeovers_total", "Ranks that registered again under another address."
        )
        self.differing = counter(
            "differing_total", "Registrations whose sizes or facts are not the instance's."
        )
        self.resolutions = counter(
            "resolutions_total", "Answers of other directories, by stage and outcome.",
            "stage", "outcome",
        )  # fmt: skip
        self.resolve_s = Histogram(
            "kvplane_bootstrap_resolve_seconds",
            "Time until another directory answered, by stage.",
            ("stage",),
            registry=registry,
            buckets=GRAIN_S,
        )
        self._rooms = Gauge(
            "kvplane_bootstrap_rooms", "Rooms whose dp rank is remembered.", registry=registry
        )
        self._pushed_out = Gauge(
            "kvplane_bootstrap_rooms_pushed_out",
            "Rooms forgotten before their time because the table was full.",
            registry=registry,
        )

    def watch(self, rooms: RoomTable) -> None:
        """Read the room table's sizes whenever somebody scrapes."""
        self._rooms.set_function(lambda: float(len(rooms)))
        self._pushed_out.set_function(lambda: float(rooms.pushed_out))

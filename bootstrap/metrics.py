"""Bootstrap metrics: registrations, lookups, lives, rooms and resolutions, for Prometheus.

Edge: counters on a registry that is given. Open it to count something new; label values come from
closed sets.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

GRAIN_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
LEVELS = {
    "rooms": "Rooms whose dp rank is remembered.",
    "rooms_pushed_out": "Rooms forgotten before their time because the table was full.",
    "rooms_expired": "Rooms forgotten because their time was over.",
    "rooms_forgotten": "Rooms forgotten because their meeting was over.",
    "polls_waiting": "Questions that wait for rooms now.",
    "ranks_missing": "Ranks of the instance that are not in.",
    "engine_infos": "Ranks whose weights can be asked for.",
    "engine_infos_bytes": "Bytes that these answers hold.",
    "bodies_bytes": "Bytes of request bodies that are arriving now.",
}  # read whenever somebody scrapes


class BootstrapMetrics:
    """All counters of bootstrap/; one set per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._answered: dict[tuple[str, int], Counter] = {}  # routes x statuses, both closed sets
        count = self._counter
        self.requests = count("requests_total", "Requests to the directory.", "route", "status")
        self.refused = count("refused_total", "Requests that were refused, by reason.", "reason")
        self.lives = count("lives_total", "Instances that came back: a new generation began.")
        self.takeovers = count(
            "takeovers_total", "Ranks that registered again under another address."
        )
        self.differing = count(
            "differing_total", "Registrations whose sizes or facts are not the instance's."
        )
        self.polls = count(
            "polls_total", "Questions that would wait for rooms, by how they ended.", "outcome"
        )
        self._of_asking()
        self._of_meeting()

    def _of_asking(self) -> None:
        count = self._counter
        self.resolutions = count(
            "resolutions_total", "Answers of other directories.", "stage", "outcome"
        )
        self.resolve_s = Histogram(
            "kvplane_bootstrap_resolve_seconds",
            "Time until another directory answered, by stage.",
            ("stage",),
            registry=self._registry,
            buckets=GRAIN_S,
        )
        self.gone = count(
            "gone_total", "Lives of other directories that were over, by what told it.", "why"
        )
        self.beats = count(
            "beats_total", "Heartbeats of addresses in use, by how they ended.", "outcome"
        )

    def _of_meeting(self) -> None:
        count = self._counter
        self.strangers = count(
            "strangers_total", "Connections to the init address that were refused.", "reason"
        )
        self.nodes = count(
            "nodes_total", "Nodes of this instance that joined, restarted or were lost.", "change"
        )
        self.asks = count(
            "asks_total", "Questions to other nodes of this instance, by how they ended.", "outcome"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvplane_bootstrap_{name}", text, labels, registry=self._registry)

    def answered(self, route: str, status: int) -> None:
        """One more request; finding a labelled counter anew costs more than counting."""
        found = self._answered.get((route, status))
        if found is None:
            found = self._answered[route, status] = self.requests.labels(route, str(status))
        found.inc()

    def watch(self, **levels: Callable[[], float]) -> None:
        """Where to read some of LEVELS."""
        for name, read in levels.items():
            gauge = Gauge(f"kvplane_bootstrap_{name}", LEVELS[name], registry=self._registry)
            gauge.set_function(read)

"""Router metrics: what the gateway did, for Prometheus.

Edge: counters on a registry that is given. gateway.py, prompts.py and wiring.py count here; state
that lives elsewhere (load, health, circuits, rooms) is read when somebody scrapes. Open it to
count something new. Label values come from closed sets, or are workers and models we were told of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.recall import Recall
from kvplane.tallies import Counts, Spreads, counts, spreads
from kvplane.vocabulary import Worker, WorkerUp

from .breaker import Breakers, State
from .fleet import Fleet
from .readiness import readiness
from .suspicions import Cause
from .verdicts import Verdict

Errors = Callable[[], Mapping[Worker, tuple[float, float]]]
FAST_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
STAGE_S = (0.0001, 0.0005, 0.0025, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
SLOW_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class RouterMetrics:
    """All counters of router/; one set per process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._count_requests()
        self._count_workers()
        self._time()

    def _count_requests(self) -> None:
        counter = self._counter
        self.requests = counter("requests_total", "Answers by route and status.", "route", "status")
        self.retries = counter("retries_total", "Further attempts, by what failed.", "reason")
        self.stops = counter("retries_refused_total", "Failures not tried again, by why.", "reason")
        self.knowledge = counter(
            "knowledge_total", "Requests by how far the index was believed.", "state", "reason"
        )
        self.prompt_tokens = counter("prompt_tokens_total", "Tokens of all prompts.", "model")
        self.evidence_dropped = counter(
            "evidence_dropped_total", "Attempts whose stages were not collected: too many at once."
        )
        self.evidence_unshared = counter(
            "evidence_unshared_total",
            "Attempts others are not told of: too many at once, too long, or the store is away.",
        )
        self.undisaggregated = counter(
            "not_disaggregated_total", "Requests served without a transfer, by why.", "reason"
        )

    def _count_workers(self) -> None:
        counter = self._counter
        self.legs = counter(
            "legs_total", "Legs by side, worker and outcome.", "side", "worker", "outcome"
        )
        self.predicted = counter(
            "predicted_cached_tokens_total", "Tokens we said the prefill holds.", "worker"
        )
        self.actual = counter(
            "actual_cached_tokens_total", "Tokens the prefill says it held.", "worker"
        )
        self.comparisons = counter(
            "comparisons_total",
            "Requests by how the index's foresight and the prefill's cached tokens compare.",
            "worker",
            "outcome",  # equal | over | under | untold | doubted | skipped
        )
        self.opened = counter("circuit_opened_total", "Circuits that opened.", "worker")
        self.health = counter(
            "health_changes_total", "Workers that left or came back by health.", "worker", "state"
        )
        self.restarts = counter("worker_restarts_total", "New lives of known pods.", "pod")
        self.looks = counter(
            "directory_looks_total", "Looks at rank directories, by what came of them.", "outcome"
        )

    def _time(self) -> None:
        timer = self._timer
        self.request_s = timer("request_seconds", "Request in to last byte out.", SLOW_S, "route")
        each = self.request_s  # of which these are parts
        self.first_byte_s = timer(
            "first_byte_seconds", "Request in to first byte out.", SLOW_S, "route", along=each
        )
        self.choose_s = timer("choose_seconds", "Tokens in to a pair chosen.", FAST_S, along=each)
        self.tokenise_s = timer("tokenise_seconds", "A body to its token ids.", FAST_S, along=each)
        self.stage_s = timer(
            "stage_seconds", "Stages of attempts, as their doers say.", STAGE_S, "stage", "outcome"
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counts:
        return counts(self.registry, f"kvplane_router_{name}", text, *labels)

    def _timer(
        self,
        name: str,
        text: str,
        grain: tuple[float, ...],
        *labels: str,
        along: Spreads | None = None,
    ) -> Spreads:
        return spreads(self.registry, f"kvplane_router_{name}", text, grain, *labels, along=along)

    def watch(
        self,
        fleet: Fleet,
        breakers: Breakers,
        now: Callable[[], float],
        rooms_open: Callable[[], int] = lambda: 0,
    ) -> None:
        """Show the state of these at every scrape."""
        self.registry.register(_State(fleet, breakers, now, rooms_open))

    def watch_drift(self, errors: Errors, verdict: Callable[[Worker], Verdict | None]) -> None:
        """Show at every scrape how well the index foretells."""
        self.registry.register(_Drift(errors, verdict))

    def watch_open(self, open_now: Mapping[str, Callable[[], int]]) -> None:
        """Show at every scrape how many things of each kind are under way."""
        self.registry.register(_Open(open_now))


OPEN = {
    "legs_open": "Requests to engines that are neither complete nor failed.",
    "connections_busy": "Connections to engines that carry a request.",
    "connections_idle": "Connections to engines that wait for one.",
    "aftermath_open": "Answered requests whose prefill or evidence is still waited for.",
    "tasks": "Tasks of the process's event loop.",
}


class _Open(Collector):
    """Gauges of what must come back to where it was when nobody asks anything any more."""

    def __init__(self, open_now: Mapping[str, Callable[[], int]]) -> None:
        self._open_now = open_now

    def describe(self) -> list[Any]:
        """Nothing, as below."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample each."""
        for name, count in self._open_now.items():
            gauge = _gauge(name, OPEN[name], [])
            gauge.add_metric([], count())
            yield gauge


class RecallState(Collector):
    """What prompts have in common with earlier ones; read when somebody scrapes."""

    def __init__(self, recall: Recall) -> None:
        self._recall = recall

    def describe(self) -> list[Any]:
        """Nothing, as below."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Prompts and tokens by how they came about, bytes held, and what should stay 0."""
        text = "Texts by whether a beginning of theirs was known."
        prompts = _counter("recall_prompts", text, ["outcome"])
        for outcome in ("same", "hit", "miss", "short", "unsafe"):
            prompts.add_metric([outcome], self._recall.prompts[outcome])
        tokens = _counter("recall_tokens", "Tokens of those that were looked up.", ["source"])
        for source in ("reused", "tokenised"):
            tokens.add_metric([source], self._recall.tokens[source])
        text = "Tokenizers whose parts did not make the whole: cut no more."
        wrong = _counter("recall_wrong", text, [])
        wrong.add_metric([], self._recall.wrong)
        held = _gauge("recall_bytes", "Bytes of texts and token ids that are remembered.", [])
        held.add_metric([], self._recall.held_bytes)
        yield from (prompts, tokens, wrong, held)


class _Drift(Collector):
    """Error figure and alarm of every worker that was compared."""

    def __init__(self, errors: Errors, verdict: Callable[[Worker], Verdict | None]) -> None:
        self._errors, self._verdict = errors, verdict

    def describe(self) -> list[Any]:
        """Nothing, as below."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Over and under apart, for they tell different stories; one sample per cause."""
        text = "Tokens foretold wrong as a share of those foretold or found, over the window."
        ratio = _gauge("prediction_error_ratio", text, ["worker"])
        text = "The same of one kind: claimed too much (over), too little (under)."
        kinds = _gauge("prediction_error_kind_ratio", text, ["worker", "kind"])
        drift = _gauge("drift", "1 where the index and a worker disagree.", ["worker", "cause"])
        for worker, (over, under) in self._errors().items():
            name, verdict = str(worker), self._verdict(worker)
            ratio.add_metric([name], over + under)
            kinds.add_metric([name, "over"], over)
            kinds.add_metric([name, "under"], under)
            for cause in Cause:
                drift.add_metric(
                    [name, cause], float(verdict is not None and verdict.cause == cause)
                )
        yield from (ratio, kinds, drift)


class _State(Collector):
    """Gauges read when somebody scrapes: nothing to keep in step, nothing on the request's path."""

    def __init__(
        self,
        fleet: Fleet,
        breakers: Breakers,
        now: Callable[[], float],
        rooms_open: Callable[[], int],
    ) -> None:
        self._fleet, self._breakers, self._now, self._rooms = fleet, breakers, now, rooms_open

    def describe(self) -> list[Any]:
        """Nothing: the registry need not scrape us to know our names."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One sample per worker and gauge."""
        labels = ["worker", "role"]
        tokens = _gauge("inflight_tokens", "Tokens booked on a worker.", labels)
        requests = _gauge("inflight_requests", "Requests booked on a worker.", labels)
        healthy = _gauge("worker_healthy", "1 where new requests may go there.", labels)
        circuit = _gauge("circuit_state", "1 for the state a circuit is in.", ["worker", "state"])
        for target in self._fleet.targets():
            who = [str(target.worker), str(target.role)]
            tokens.add_metric(who, target.inflight_tokens)
            requests.add_metric(who, target.inflight_requests)
            healthy.add_metric(who, float(target.usable))
        for up in self._absent():
            healthy.add_metric([str(Worker(up.pod)), str(up.role)], 0.0)
        for worker, state in self._breakers.states(self._now()).items():
            for one in State:
                circuit.add_metric([str(worker), str(one)], float(one is state))
        rooms = _gauge("rooms_open", "Rooms of requests under way.", [])
        rooms.add_metric([], self._rooms())
        # Of no worker at all there is no sample above, and an alarm on none stays quiet.
        ready = _gauge(
            "ready", "1 where a request could be served now, as GET /readiness says.", []
        )
        can, _ = readiness(self._fleet, self._breakers, self._now(), 0.0)
        ready.add_metric([], float(can))
        yield from (tokens, requests, healthy, circuit, rooms, ready)

    def _absent(self) -> list[WorkerUp]:
        """Named, and never seen since this process began: away, and no alarm may end by that."""
        here = {target.worker.pod for target in self._fleet.targets()}
        return [one.declared for one in self._fleet.waiting() if one.declared.pod not in here]


def _gauge(name: str, text: str, labels: list[str]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvplane_router_{name}", text, labels=labels)


def _counter(name: str, text: str, labels: list[str]) -> CounterMetricFamily:
    return CounterMetricFamily(f"kvplane_router_{name}", text, labels=labels)

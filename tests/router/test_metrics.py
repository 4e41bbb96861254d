"""Metrics: names, and state that is read when somebody scrapes."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvplane.recall import Recall
from kvplane.router.breaker import Breakers, Outcome
from kvplane.router.discovery import Waiting
from kvplane.router.fleet import Fleet
from kvplane.router.metrics import RecallState, RouterMetrics
from kvplane.router.settings import BreakerSettings
from kvplane.router.suspicions import Cause
from kvplane.router.verdicts import silent
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

P1 = Worker(Pod("p1"))


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """name{labels} -> value, as a scraper reads them."""
    text = generate_latest(registry).decode()
    found = [one for family in text_string_to_metric_families(text) for one in family.samples]
    return {f"{one.name}{sorted(one.labels.values())}": one.value for one in found}


def test_load_health_circuits_and_rooms_are_read_at_each_scrape() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    fleet, breakers = Fleet(), Breakers(BreakerSettings(faults=1, pause_s=10))
    now, rooms = [0.0], [3]
    metrics.watch(fleet, breakers, lambda: now[0], lambda: rooms[0])
    fleet.up(WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL))
    booking = fleet.book(P1, 42)
    first = samples(metrics.registry)
    assert first["kvplane_router_inflight_tokens['p1', 'prefill']"] == 42
    assert first["kvplane_router_inflight_requests['p1', 'prefill']"] == 1
    assert first["kvplane_router_worker_healthy['p1', 'prefill']"] == 1
    assert first["kvplane_router_rooms_open[]"] == 3
    booking.release()
    fleet.drain(Pod("p1"))
    ticket = breakers.of(P1).admit(0.0)
    assert ticket is not None
    breakers.of(P1).book(ticket, Outcome.FAULT, 0.0)
    second = samples(metrics.registry)
    assert second["kvplane_router_inflight_tokens['p1', 'prefill']"] == 0
    assert second["kvplane_router_worker_healthy['p1', 'prefill']"] == 0
    assert second["kvplane_router_circuit_state['open', 'p1']"] == 1
    now[0] = 10.0
    assert samples(metrics.registry)["kvplane_router_circuit_state['p1', 'probing']"] == 1


def test_a_worker_that_is_named_and_never_came_is_away() -> None:
    """It is away after a restart of the gateway as before."""
    metrics, fleet = RouterMetrics(CollectorRegistry()), Fleet()
    metrics.watch(fleet, Breakers(), lambda: 0.0)
    p1, d1 = (WorkerUp(Pod(name), f"http://{name}:1", Role.DECODE) for name in ("p1", "d1"))
    fleet.waiting = lambda: (Waiting(p1, "refused"), Waiting(d1, "refused"))
    fleet.up(d1)
    found = samples(metrics.registry)
    assert found["kvplane_router_worker_healthy['decode', 'p1']"] == 0
    assert found["kvplane_router_worker_healthy['d1', 'decode']"] == 1


def test_whether_a_request_could_be_served_is_read_even_where_there_is_no_worker() -> None:
    metrics, fleet = RouterMetrics(CollectorRegistry()), Fleet()
    breakers = Breakers(BreakerSettings(faults=1, pause_s=10))
    metrics.watch(fleet, breakers, lambda: 0.0)

    def ready() -> float:
        return samples(metrics.registry)["kvplane_router_ready[]"]

    assert ready() == 0, "nobody is there"
    fleet.up(WorkerUp(Pod("p1"), "http://p1:1", Role.PREFILL))
    assert ready() == 0, "no decode is there"
    fleet.up(WorkerUp(Pod("d1"), "http://d1:1", Role.DECODE))
    assert ready() == 1
    ticket = breakers.of(P1).admit(0.0)
    assert ticket is not None
    breakers.of(P1).book(ticket, Outcome.FAULT, 0.0)
    assert ready() == 0, "the only prefill is left alone"


def test_drift_is_read_at_each_scrape() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    verdicts = {P1: silent(P1, 100, 9.0)}
    metrics.watch_drift(lambda: {P1: (0.5, 0.25)}, verdicts.get)
    first = samples(metrics.registry)
    assert first["kvplane_router_prediction_error_ratio['p1']"] == 0.75
    assert first["kvplane_router_prediction_error_kind_ratio['over', 'p1']"] == 0.5
    assert first["kvplane_router_prediction_error_kind_ratio['p1', 'under']"] == 0.25
    causes = {cause: first[f"kvplane_router_drift{sorted([str(cause), 'p1'])}"] for cause in Cause}
    assert causes == {cause: float(cause is Cause.SILENT) for cause in Cause}
    verdicts.clear()
    assert samples(metrics.registry)["kvplane_router_drift['p1', 'stream silent']"] == 0


def test_every_name_is_of_this_package_and_ends_in_its_unit() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    names = [family.name for family in metrics.registry.collect()]
    assert len(names) > 12
    for name in names:
        assert name.startswith("kvplane_router_")


def test_two_gateways_in_one_process_have_registries_of_their_own() -> None:
    one, other = RouterMetrics(CollectorRegistry()), RouterMetrics(CollectorRegistry())
    one.retries.labels("prefill_failed").inc()
    assert "kvplane_router_retries_total['prefill_failed']" not in samples(other.registry)


def test_what_prompts_have_in_common_is_read_at_each_scrape() -> None:
    registry, recall = CollectorRegistry(), Recall(2**20)
    registry.register(RecallState(recall))
    assert samples(registry)["kvplane_router_recall_prompts_total['hit']"] == 0
    recall.prompts["hit"] += 2
    recall.tokens["reused"] += 100
    found = samples(registry)
    assert found["kvplane_router_recall_prompts_total['hit']"] == 2
    assert found["kvplane_router_recall_tokens_total['reused']"] == 100
    assert found["kvplane_router_recall_tokens_total['tokenised']"] == 0
    assert (
        found["kvplane_router_recall_wrong_total[]"] == found["kvplane_router_recall_bytes[]"] == 0
    )

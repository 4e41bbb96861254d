"""Walks: whatever is counted many at once is what would have been counted one by one."""

from __future__ import annotations

import gc

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from kvplane.router.meeting import ENDS, Meeting
from kvplane.router.metrics import STAGE_S
from kvplane.router.walks import Walks
from kvplane.tallies import MOST_WAITING, Spreads, spreads
from kvplane.vocabulary import Stage

USUAL = (Stage.POLICY_INPUT, Stage.POOL, Stage.PAIR, Stage.FIRST_BYTE, Stage.END)
SHORT = (Stage.POOL, Stage.AVAILABILITY)


def stage_s(registry: CollectorRegistry) -> Spreads:
    return spreads(registry, "stage_seconds", "How long.", STAGE_S, "stage", "outcome")


def request_s() -> Spreads:
    return spreads(CollectorRegistry(), "request_seconds", "How long.", STAGE_S)


def meeting(number: int, walk: tuple[Stage, ...], outcome: str) -> Meeting:
    """Its stages take 0, 0.1 ms, 0.4 ms, 0.9 ms ...; of another attempt a bit more."""
    made = Meeting(f"r{number}", 1, "/generate", "tiny", (), None, None, None, outcome=outcome)
    times = [100.0 + at * at * 1e-4 + at * number * 1e-3 for at in range(len(walk) + 1)]
    made.begun, made.ended = times[0], times[-1]
    made.steps = [one for pair in zip(walk, times[:-1], strict=True) for one in pair]
    return made


def one_by_one(into: Spreads, met: Meeting) -> None:
    """As each would be counted at its end."""
    until, outcome = met.ended or met.begun, ENDS.get(met.outcome, "failed")
    for stage, begun in reversed(met.trail):
        into.labels(stage, outcome).observe(until - begun)
        until, outcome = begun, "ok"


def scraped(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if "_sum" not in line)


@pytest.mark.parametrize("many", [0, 1, MOST_WAITING - 1, MOST_WAITING, 3 * MOST_WAITING + 1])
def test_counted_at_once_is_counted_one_by_one(many: int) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    seen, expected = stage_s(ours), stage_s(theirs)
    requests = request_s()
    walks = Walks(seen, requests)
    for number in range(many):
        walk = SHORT if number % 7 == 3 else USUAL
        met = meeting(number, walk, ("ok", "failed", "client_gone", "rejected")[number % 4])
        one_by_one(expected, met)
        walks.ended(met)
        requests.observe(1.0)
        assert len(walks._waiting) < MOST_WAITING, "nobody has to scrape"
    assert scraped(ours) == scraped(theirs)
    assert scraped(ours) == scraped(theirs), "a second scrape counts nothing again"
    for stage in Stage:
        name, labels = "stage_seconds_sum", {"stage": stage.value, "outcome": "ok"}
        told = theirs.get_sample_value(name, labels)
        assert ours.get_sample_value(name, labels) == (told and pytest.approx(told))


def test_what_was_counted_keeps_its_trail_and_nothing_to_look_through_for_garbage() -> None:
    registry = CollectorRegistry()
    walks = Walks(stage_s(registry), request_s())
    met = [meeting(number, USUAL, "ok") for number in range(3)]
    before = [one.trail for one in met]
    for one in met:
        walks.ended(one)
    registry.get_sample_value("stage_seconds_count")
    assert [one.trail for one in met] == before
    assert met[0].walk is met[1].walk is met[2].walk, "one for all alike"
    gc.collect()
    assert not any(gc.is_tracked(one) or gc.is_tracked(one.steps) for one in met)


def test_walks_without_end_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.router.walks.MOST_KINDS", 20)
    requests = request_s()
    walks = Walks(stage_s(CollectorRegistry()), requests)
    for number in range(4 * MOST_WAITING + 1):
        walks.ended(meeting(number, (Stage.POOL,) * (number % 100), "ok"))
        requests.observe(1.0)
    walks.fold()
    assert len(walks._known) == 1


def test_an_attempt_without_a_trail_is_no_stage() -> None:
    registry = CollectorRegistry()
    walks = Walks(stage_s(registry), request_s())
    walks.ended(Meeting("r", 1, "/generate", "tiny", (), None, None, None, outcome="ok"))
    assert registry.get_sample_value("stage_seconds_count", {"stage": "pool"}) is None
    assert not walks._waiting

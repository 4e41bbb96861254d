"""Tallies: what is moved is what a scraper reads, as prometheus_client itself would show it."""

from __future__ import annotations

from enum import StrEnum

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

from kvplane.tallies import MOST_WAITING, counts, spreads

GRAIN = (0.001, 0.5, 1, 2.5)


class Side(StrEnum):
    LEFT = "left"


def moved(registry: CollectorRegistry, things: object, seconds: object, bare: object) -> str:
    for _ in range(3):
        things.labels("a", 'b"\n').inc()  # type: ignore[attr-defined]
    things.labels("a", "c").inc(2.5)  # type: ignore[attr-defined]
    for value in (0.0, 0.001, 0.0011, 0.7, 1, 9):
        seconds.labels("x").observe(value)  # type: ignore[attr-defined]
    bare.inc(0)  # type: ignore[attr-defined]
    text = generate_latest(registry).decode()
    return "\n".join(line for line in text.splitlines() if "_created" not in line)


def test_a_scrape_is_byte_for_byte_that_of_prometheus_client() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    told = moved(
        ours,
        counts(ours, "k_things_total", "Things.", "one", "two"),
        spreads(ours, "k_seconds", "How long.", GRAIN, "what"),
        counts(ours, "k_bare_total", "Bare."),
    )
    assert told == moved(
        theirs,
        Counter("k_things_total", "Things.", ("one", "two"), registry=theirs),
        Histogram("k_seconds", "How long.", ("what",), registry=theirs, buckets=GRAIN),
        Counter("k_bare_total", "Bare.", registry=theirs),
    )
    assert 'k_seconds_bucket{le="0.001",what="x"} 2.0' in told


def test_what_has_no_labels_is_shown_before_it_moves() -> None:
    registry = CollectorRegistry()
    counts(registry, "k_bare_total", "Bare.")
    spreads(registry, "k_seconds", "How long.", GRAIN).observe(0.3)
    assert registry.get_sample_value("k_bare_total") == 0
    assert registry.get_sample_value("k_seconds_bucket", {"le": "0.5"}) == 1
    assert registry.get_sample_value("k_seconds_count") == 1


def test_an_enum_and_its_text_are_one_label() -> None:
    registry = CollectorRegistry()
    things = counts(registry, "k_things_total", "Things.", "side")
    things.labels(Side.LEFT).inc()
    things.labels("left").inc()
    assert registry.get_sample_value("k_things_total", {"side": "left"}) == 2


def test_wrong_labels_a_second_name_and_less_are_refused() -> None:
    registry = CollectorRegistry()
    things = counts(registry, "k_things_total", "Things.", "side")
    with pytest.raises(ValueError, match="k_things_total"):
        things.labels("a", "b")
    with pytest.raises(ValueError, match="Duplicated"):
        counts(registry, "k_things_total", "Again.")
    with pytest.raises(AssertionError, match="grows"):
        things.labels("a").inc(-1)
    with pytest.raises(AssertionError, match="labels"):
        things.inc()


def test_many_values_at_once_fall_where_each_alone_would() -> None:
    values = [0.0, 0.001, 0.0011, 0.5, 0.7, 1, 2.5, 2.6, 9, 0.001, -1.0]
    at_once, alone = CollectorRegistry(), CollectorRegistry()
    spreads(at_once, "k_seconds", "How long.", GRAIN, "what").labels("x").observe_all(values)
    one = spreads(alone, "k_seconds", "How long.", GRAIN, "what").labels("x")
    for value in sorted(values):  # a sum depends on the order
        one.observe(value)
    assert generate_latest(at_once) == generate_latest(alone)


def test_what_is_moved_by_its_labels_is_what_is_moved_by_their_words() -> None:
    registry = CollectorRegistry()
    things = counts(registry, "k_things_total", "Things.", "side", "status")
    things.of[Side.LEFT, 200].value += 1
    things.labels("left", "200").inc()
    things.of["left", "200"].value += 1
    assert registry.get_sample_value("k_things_total", {"side": "left", "status": "200"}) == 3
    with pytest.raises(ValueError, match="k_things_total"):
        things.of["left"]  # type: ignore[index]


def test_a_histogram_with_labels_is_not_moved_without() -> None:
    with pytest.raises(AssertionError, match="labels"):
        spreads(CollectorRegistry(), "k_seconds", "How long.", GRAIN, "what").observe(1)


def test_what_goes_along_with_another_waits_no_longer_than_that_one() -> None:
    registry = CollectorRegistry()
    each = spreads(registry, "k_seconds", "How long.", GRAIN, "what")
    bare = spreads(registry, "k_bare_seconds", "A part.", GRAIN, along=each)
    named = spreads(registry, "k_named_seconds", "A part.", GRAIN, "what", along=each)
    many = 3 * MOST_WAITING
    for _ in range(many):
        each.of["x",].observe(1)
        bare.observe(0.7)
        named.of["y",].observe(2)
        waiting = [len(one._waiting) for one in (each.of["x",], bare.of[()], named.of["y",])]
        assert max(waiting) <= MOST_WAITING
    assert registry.get_sample_value("k_bare_seconds_count") == many
    assert registry.get_sample_value("k_bare_seconds_bucket", {"le": "0.5"}) == 0
    assert registry.get_sample_value("k_named_seconds_sum", {"what": "y"}) == 2 * many

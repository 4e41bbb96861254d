"""Endpoints of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvplane.events import BadEndpoint
from kvplane.events.endpoints import of_rank, ranks, reachable
from kvplane.vocabulary import Pod, Role, WorkerUp

VECTORS = Path(__file__).parents[1] / "vectors"


def up(**facts: object) -> WorkerUp:
    return WorkerUp(Pod("p"), "http://10.0.0.7:30000", Role.PREFILL, **facts)  # type: ignore[arg-type]


def test_ranks_are_counted_as_the_engine_counts_them() -> None:
    lines = (VECTORS / "sglang-kv-events.jsonl").read_text().splitlines()
    (told,) = [line for line in map(json.loads, lines) if line.get("kind") == "endpoint"]
    for base, rank, wanted in told["cases"]:
        if base is not None:
            assert of_rank(base, rank) == wanted


def test_a_base_is_counted_up_and_gets_the_pods_address() -> None:
    found = ranks(up(events=("tcp://*:5557",), replay=("tcp://*:6557",), dp_size=2))
    assert found == (
        ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557"),
        ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:6558"),
    )


def test_a_list_is_taken_as_it_is() -> None:
    assert ranks(up(events=("tcp://a:1", "tcp://b:9"))) == (
        ("tcp://a:1", None),
        ("tcp://b:9", None),
    )


def test_four_ranks_of_one_base_or_of_a_list_that_overrides_it() -> None:
    base = ranks(up(events=("tcp://127.0.0.1:5557",), dp_size=4))
    assert [events for events, _ in base] == [f"tcp://127.0.0.1:{5557 + r}" for r in range(4)]
    mine = ("tcp://h:9", "tcp://h:7", "ipc:///run/kv2", "tcp://[fd00::1]:5")
    assert [events for events, _ in ranks(up(events=mine, dp_size=4))] == list(mine)
    assert [events for events, _ in ranks(up(events=mine[:2]))] == list(mine[:2])


@pytest.mark.parametrize("base", ["ipc:///run/kv", "tcp://*:0", "tcp://*:65535", "tcp://h:x"])
def test_a_base_that_cannot_be_counted_is_refused_by_name(base: str) -> None:
    with pytest.raises(BadEndpoint, match="must be"):
        ranks(up(events=(base,), dp_size=2))


def test_no_events_no_ranks() -> None:
    assert ranks(up()) == ()


@pytest.mark.parametrize(
    "bad", ["", "5557", "tcp://", "tcp://h", "tcp://h:0", "http://h:1", "tcp://h:x"]
)
def test_what_cannot_be_connected_to_is_refused(bad: str) -> None:
    with pytest.raises(BadEndpoint, match="must be"):
        reachable(bad, "h")


def test_a_list_that_is_too_short_is_refused() -> None:
    with pytest.raises(BadEndpoint, match="rank 2"):
        ranks(up(events=("tcp://a:1", "tcp://b:1"), dp_size=3))


def test_an_ipv6_pod_is_bracketed() -> None:
    assert reachable("tcp://*:5557", "fd00::7") == "tcp://[fd00::7]:5557"

"""[[workers]] tables: what of events a person may write about an engine."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.events import DIALECTS
from kvplane.router import HANDOFFS
from kvplane.workers import WorkerFault, worker_from_table

URL = {"url": "http://10.0.0.7:8000"}


def test_a_topic_and_a_form_of_events_are_taken_as_they_are() -> None:
    found = worker_from_table({**URL, "topic": "kv@10.0.0.7:8000@m", "event_form": "mooncake"})
    assert (found.topic, found.event_form) == ("kv@10.0.0.7:8000@m", "mooncake")
    plain = worker_from_table(URL)
    assert (plain.topic, plain.event_form) == ("", "")


@pytest.mark.parametrize("form", DIALECTS)
def test_every_dialect_can_be_named(form: str) -> None:
    assert worker_from_table({**URL, "event_form": form}).event_form == form


@pytest.mark.parametrize("way", [name for name in HANDOFFS if "none" not in name])
def test_every_way_to_hand_over_can_be_named(way: str) -> None:
    assert worker_from_table({**URL, "handoff": way}).handoff == way
    assert worker_from_table(URL).handoff == ""


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"topic": 7}, "topic 7: must be text"),
        ({"event_form": "aibrix"}, "event_form 'aibrix': must be one of vllm, sglang, mooncake"),
        ({"event_form": 7}, "event_form 7: must be one of"),
        ({"handoff": "nixl"}, "handoff 'nixl': must be one of sglang, sglang-lists"),
        ({"handoff": "none"}, "handoff 'none': must be one of"),
        ({"handoff": 7}, "handoff 7: must be one of"),
        ({"name": "prefill one"}, "name 'prefill one': must be printable, without blanks"),
        ({"name": "p\u2003"}, "must be printable, without blanks"),
        ({"name": "p\x1b[2J"}, "must be printable, without blanks"),
        ({"url": "http://a b:1"}, "url 'a b': must be printable, without blanks"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(more: dict[str, Any], why: str) -> None:
    with pytest.raises(WorkerFault, match=why):
        worker_from_table({**URL, **more})


def test_aibrix_pods_are_reached_by_their_ports() -> None:
    told = {**URL, "events": "tcp://*:5557", "replay": "tcp://*:5558", "engine": "vllm"}
    found = worker_from_table(told)
    assert (found.events, found.replay) == (("tcp://*:5557",), ("tcp://*:5558",))

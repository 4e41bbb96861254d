"""Evidence and settings: bounded, and clear about what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from kvplane.engine import BadSetting, EngineSettings
from kvplane.engine.evidence import MOST_STAGES, Evidence
from kvplane.engine.metrics import EngineMetrics
from kvplane.vocabulary import Role, Room, Stage, StageRecord


def seen(room: int) -> StageRecord:
    return StageRecord(Room(room), Stage.VERIFY, "ok", 0.25, "d", "me", 7.0)


def test_a_room_is_shown_as_it_was_told() -> None:
    evidence = Evidence(10, EngineMetrics(CollectorRegistry()))
    evidence.record(seen(5))
    assert evidence.room(Room(5)) == {
        "room": 5,
        "stages": [
            {"stage": "verify", "outcome": "ok", "duration_s": 0.25, "detail": "d", "by": "me",
             "at": 7.0},
        ],
    }  # fmt: skip
    assert evidence.room(Room(6)) is None


def test_old_rooms_make_room_and_no_room_grows_for_ever() -> None:
    evidence = Evidence(3, EngineMetrics(CollectorRegistry()))
    for room in range(1, 6):
        evidence.record(seen(room))
    for _ in range(1000):
        evidence.record(seen(5))
    assert [evidence.room(Room(room)) is not None for room in range(1, 6)] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert len(evidence.room(Room(5))["stages"]) == MOST_STAGES  # type: ignore[index]


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"tp": 3}, "tp = 3: must divide the 4 KV heads"),
        ({"pp": 3}, "pp = 3"),
        ({"dp": 0}, "dp = 0: must be 1 or more"),
        ({"block_size": 64}, "block_size = 64: must be 16"),
        ({"event_form": "trt"}, "event_form = 'trt': must be vllm or sglang"),
        ({"blocks": 1}, "blocks = 1"),
        ({"events_port": 65535, "dp": 3}, "events_port = 65535: must be 65533 or less: dp rank 2"),
        ({"replay_port": 65535, "dp": 2}, "replay_port = 65535: must be 65534 or less"),
        ({"replay_port": 5558, "dp": 2}, "replay_port = 5558: must be 2 or more away from events"),
        ({"replay_port": 5557}, "replay_port = 5557: must be 1 or more away from events_port"),
        ({"role": Role.PREFILL, "bootstrap_port": 0}, "bootstrap_port = 0"),
    ],
)
def test_a_setting_that_cannot_be_is_named(wrong: dict[str, Any], names: str) -> None:
    with pytest.raises(BadSetting, match=names):
        EngineSettings(**wrong)


def test_addresses_for_peers_are_never_wildcards() -> None:
    told = EngineSettings(host="0.0.0.0", bootstrap_port=9)
    assert (told.advertised, told.bootstrap_address) == ("127.0.0.1", "127.0.0.1:9")
    assert not told.may_break
    assert told.settled().advertised not in ("0.0.0.0", "127.0.0.1", "")  # this machine has a name
    said = EngineSettings(host="0.0.0.0", advertise_host="prefill-0").settled()
    assert (said.advertised, said.bootstrap_address) == ("prefill-0", "127.0.0.1:8998")
    with pytest.raises(BadSetting, match=r"advertise_host = '::': .* others can dial"):
        EngineSettings(advertise_host="::").settled()
    assert EngineSettings(host="::1").bootstrap_address == "[::1]:8998"
    assert EngineSettings(host="::1").may_break

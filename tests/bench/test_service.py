"""The service rows: a process of its own is told over ZMQ, asked over HTTP, and answers right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def test_what_is_told_is_answered_and_timed_in_four_ways(
    from_bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DYNAMO_PY", raising=False)
    service = from_bench("service")
    monkeypatch.setattr(service, "PROMPTS", 6)
    *rows, absent = service.rows(workers=4, conversations=9, blocks=64, passes=1, rounds=1)
    names = [row.name for row in rows]
    for way in service.WAYS:
        assert {f"kvplane, rank by {way}, {what}" for what in ("p50", "p99", "CPU")} <= set(names)
    assert names[:2] == ["kvplane, ingest over ZMQ", "kvplane, ingest over ZMQ, CPU of a block"]
    assert all(min(row.values) > 0 for row in rows if "CPU" not in row.name)
    assert "not measured: DYNAMO_PY" in absent.line()


def test_what_is_expected_is_the_common_beginning(from_bench: Callable[[str], Any]) -> None:
    load_of = from_bench("service_load")
    load = load_of.Load(3, 8, 16)
    for prompt in load.prompts(9):
        for worker in range(3):
            depth = 0
            for one in load.conversations:
                if one.worker == worker:
                    same = [a == b for a, b in zip(one.tokens, prompt.tokens, strict=True)]
                    depth = max(depth, (same.index(False) if False in same else len(same)) // 16)
            assert prompt.expected.get(worker, 0) == depth


def test_the_peer_is_asked_in_its_own_form(from_bench: Callable[[str], Any]) -> None:
    peers = from_bench("service_peers")
    said = b'{"scores": {"1": {"0": 32}, "3": {"0": 0}}}'
    assert peers.Dynamo.depths(object(), said) == {0: 2}
    tokens = from_bench("service_load").Load(1, 1, 8).some(8)
    assert b"POST /query_by_hash HTTP/1.1" in peers.Dynamo.by_hash(object(), tokens)

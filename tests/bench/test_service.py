"""The service rows: a process of its own is told over ZMQ, asked over HTTP, and answers right."""

from __future__ import annotations

import os
from array import array
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


def common(one: bytes, other: bytes) -> int:
    """Blocks of 16 packed tokens."""
    return next(
        (at for at in range(len(one) // 64) if one[: at * 64 + 64] != other[: at * 64 + 64]),
        len(one) // 64,
    )


class Knowing:
    """A service that answers right, and remembers what it was asked."""

    name, pid = "knowing", os.getpid()

    def __init__(self, load: Any) -> None:
        self.load, self.asked, self.line = load, list[bytes](), self

    def by_tokens(self, tokens: array[int]) -> bytes:
        return tokens.tobytes()

    def ask(self, request: bytes) -> bytes:
        self.asked.append(request)
        return request

    def depths(self, answer: bytes) -> dict[int, int]:
        found: dict[int, int] = {}
        for one in self.load.conversations:
            depth = common(one.tokens.tobytes(), answer)
            found[one.worker] = max(depth, found.get(one.worker, 0))
        return {worker: depth for worker, depth in found.items() if depth}


def test_what_is_timed_was_never_asked_before_beyond_what_is_held(
    from_bench: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = from_bench("service")
    monkeypatch.setattr(service, "PROMPTS", 6)
    knowing = Knowing(load := from_bench("service_load").Load(3, 8, 16))
    service._rank({}, "tokens", load, [knowing], 2)
    routed, *prompts = knowing.asked[:8], *knowing.asked[8:]
    assert routed == [one.tokens.tobytes() for one in load.conversations]
    assert len({*prompts}) == len(prompts) == 3 * 6
    for at, prompt in enumerate(prompts):
        before = (common(prompt, other) for other in routed + prompts[:at])
        assert max(before) == max(knowing.depths(prompt).values(), default=0)


def test_a_wrong_answer_ends_it_in_whichever_pass(from_bench: Callable[[str], Any]) -> None:
    service = from_bench("service")
    knowing = Knowing(load := from_bench("service_load").Load(3, 8, 16))
    prompts = load.prompts(6)
    prompts[5].expected[0] = 99
    with pytest.raises(service.WrongAnswer, match="knowing by_tokens"):
        service._ask("by_tokens", prompts, [knowing])

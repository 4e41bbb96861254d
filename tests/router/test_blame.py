"""Blame: whose fault a failed leg is, and what the client hears."""

from __future__ import annotations

import pytest

from kvplane.router.blame import Side, engine_refused, leg_broke
from kvplane.router.legs_errors import (
    Cut,
    LegError,
    Malformed,
    Phase,
    PoolFull,
    Refused,
    Stale,
    TimedOut,
    TlsFailed,
)

JSON = [(b"content-type", b"application/json")]

BROKEN = [
    (Refused, Phase.CONNECT, 503, "prefill_failed"),
    (TlsFailed, Phase.CONNECT, 503, "prefill_failed"),
    (TimedOut, Phase.CONNECT, 503, "prefill_failed"),
    (PoolFull, Phase.CONNECT, 503, "prefill_failed"),
    (TimedOut, Phase.SENT, 504, "deadline_exceeded"),
    (TimedOut, Phase.BODY, 504, "deadline_exceeded"),
    (Cut, Phase.SENT, 502, "prefill_failed"),
    (Stale, Phase.SENT, 502, "prefill_failed"),
    (Malformed, Phase.HEAD, 502, "prefill_failed"),
]


@pytest.mark.parametrize(("kind", "phase", "status", "code"), BROKEN)
def test_a_leg_that_broke_is_a_gateway_status(
    kind: type[LegError], phase: Phase, status: int, code: str
) -> None:
    failed = leg_broke(Side.PREFILL, "p1", kind("1.2.3.4:5", phase, "why"))
    assert (failed.cause.status, failed.cause.code) == (status, code)
    assert failed.cause.message == "prefill p1: why"
    assert failed.status == 0
    assert not failed.callers_mistake


ANSWERS = [
    (400, 400, "invalid_request", b'{"message":"bad"}'),
    (429, 429, "overloaded", b"busy"),
    (500, 502, "decode_failed", b'{"error":{"message":"x"}}'),
    (501, 502, "decode_failed", b""),
    (503, 503, "decode_failed", b"\xff"),
    (302, 502, "decode_failed", b""),
    (500, 502, "transfer_failed", b'{"error":{"message":"x","stage":"verify"}}'),
    (500, 502, "decode_failed", b'{"error":{"message":"x","stage":"dance"}}'),
]


@pytest.mark.parametrize(("answered", "status", "code", "body"), ANSWERS)
def test_an_answer_that_is_no_success_is_mapped(
    answered: int, status: int, code: str, body: bytes
) -> None:
    failed = engine_refused(Side.DECODE, "d1", answered, JSON, body)
    assert (failed.cause.status, failed.cause.code) == (status, code)
    if answered < 500 and answered >= 400:
        assert failed.cause.body() == body
        assert failed.callers_mistake
    else:
        assert b'"code":"' + code.encode() in failed.cause.body()


@pytest.mark.parametrize(
    ("stage", "guilty"),
    [
        ("resolve-topology", Side.PREFILL),
        ("connect", Side.PREFILL),
        ("verify", Side.PREFILL),
        ("consume", Side.DECODE),
    ],
)
def test_a_failed_transfer_is_blamed_by_its_stage_not_by_who_reports_it(
    stage: str, guilty: Side
) -> None:
    body = b'{"error":{"message":"x","stage":"%s"}}' % stage.encode()
    for side in Side:
        assert engine_refused(side, "w", 502, JSON, body).guilty is guilty


def test_retry_after_is_kept() -> None:
    headers = [*JSON, (b"retry-after", b"12")]
    failed = engine_refused(Side.PREFILL, "p1", 429, headers, b"busy")
    assert (b"retry-after", b"12") in failed.cause.head()


@pytest.mark.parametrize("answered", [400, 404, 413, 429])
def test_a_refusal_without_words_is_told_in_ours(answered: int) -> None:
    cause = engine_refused(Side.PREFILL, "p1", answered, JSON, b"").cause
    assert cause.body().startswith(b'{"error":{"message":"prefill p1 answered %d' % answered)
    said = engine_refused(Side.PREFILL, "p1", answered, JSON, b'{"message":"bad"}').cause
    assert said.body() == b'{"message":"bad"}'

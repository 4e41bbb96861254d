"""Blame: whose fault a failed leg is, and what the client hears."""

from __future__ import annotations

import pytest

from kvplane.router.blame import Side, engine_refused, leg_broke, stream_said
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
    reached = phase is not Phase.CONNECT or kind is PoolFull
    assert failed.cause.stage == (None if reached else "connect")


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("kind", [Refused, TlsFailed, TimedOut])
def test_who_could_not_be_reached_is_to_blame_itself(side: Side, kind: type[LegError]) -> None:
    failed = leg_broke(side, "w", kind("1.2.3.4:5", Phase.CONNECT, "transfer error"))
    assert (failed.guilty, failed.shared) == (side, False)
    assert failed.cause.shape()["error"]["stage"] == "connect"


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


WORDS = [
    ("Decode transfer failed for request rank=0: Failed to get kvcache from prefill instance, it "
     "might be dead", Side.DECODE, Side.PREFILL, False),
    ("KVTransferError(bootstrap_room=7): Lost connection with prefill instance", Side.DECODE,
     Side.PREFILL, False),
    ("Could not fetch prefill parallel info from 10.0.0.7:8998 after 15 attempts", Side.DECODE,
     Side.PREFILL, False),
    ("Could not fetch bootstrap info for: prefill_dp_rank: 0", Side.DECODE, Side.PREFILL, False),
    ("Decode instance could be dead, remote session is not alive", Side.PREFILL, Side.DECODE,
     False),
    ("transfer failed", Side.DECODE, Side.DECODE, True),
    ("Request timed out after 300s in KVPoll.Bootstrapping", Side.PREFILL, Side.PREFILL, True),
    ("KVTransferError(bootstrap_room=7): unknown", Side.DECODE, Side.DECODE, True),
    ("CUDA out of memory", Side.DECODE, Side.DECODE, False),
    ("", Side.PREFILL, Side.PREFILL, False),
]  # fmt: skip


@pytest.mark.parametrize(("words", "side", "guilty", "shared"), WORDS)
def test_words_of_an_engine_lay_a_fault_on_its_peer_or_on_both(
    words: str, side: Side, guilty: Side, shared: bool
) -> None:
    body = b'{"error":{"message":"%s"}}' % words.encode()
    for failed in (
        engine_refused(side, "w", 500, JSON, body),
        stream_said(side, "w", words, None),
    ):
        assert (failed.guilty, failed.shared) == (guilty, shared)


def test_words_of_a_4xx_and_of_a_named_stage_lay_nothing_on_anybody_else() -> None:
    words = b'{"error":{"message":"transfer failed with prefill instance"}}'
    refused = engine_refused(Side.DECODE, "d1", 400, JSON, words)
    assert (refused.guilty, refused.shared) == (Side.DECODE, False)
    staged = b'{"error":{"message":"with prefill: transfer failed","stage":"consume"}}'
    named = engine_refused(Side.DECODE, "d1", 500, JSON, staged)
    assert (named.guilty, named.shared) == (Side.DECODE, False)


def test_a_full_pool_is_nobodys_fault_and_says_when_to_come_back() -> None:
    failed = leg_broke(Side.DECODE, "d1", PoolFull("h:1", Phase.CONNECT, "full"))
    assert failed.nobodys_fault and failed.crowded
    assert (failed.cause.status, failed.cause.retry_after) == (503, "1")


@pytest.mark.parametrize(
    ("leg", "unreached", "silent"),
    [
        (Refused("h:1", Phase.CONNECT, "x"), True, False),
        (TimedOut("h:1", Phase.SENT, "x"), False, True),
        (TimedOut("h:1", Phase.BODY, "x"), False, False),
        (TimedOut("h:1", Phase.CONNECT, "x"), False, False),
        (Cut("h:1", Phase.SENT, "x"), False, False),
    ],
)
def test_what_a_broken_leg_tells(leg: LegError, unreached: bool, silent: bool) -> None:
    failed = leg_broke(Side.PREFILL, "p1", leg)
    assert (failed.unreached, failed.silent) == (unreached, silent)

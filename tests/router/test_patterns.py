"""Patterns: what many attempts show together; and silence while only a few do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.rules import held

from kvplane.router.findings import Finding
from kvplane.router.meeting import Meeting
from kvplane.router.patterns import LEFT, STUCK
from kvplane.router.patterns import patterns as every
from kvplane.router.remembered import Party, Why
from kvplane.vocabulary import Room, Stage

NOW = 1000.0


def attempt(
    number: int,
    outcome: str = "open",
    begun: float = NOW - 60,
    prefill: str = "p1",
    decode: str = "d1",
    **more: Any,
) -> Meeting:
    made = Meeting(
        f"r{number}", 1, "/generate", "tiny", (Room(number),), Party(prefill),
        Party(decode), Why(), outcome=outcome, begun=begun,
    )  # fmt: skip
    for name, value in more.items():
        setattr(made, name, value)
    return made


def patterns(meetings: Sequence[Meeting], now: float) -> list[Finding]:
    """Each as its row in the guide has it."""
    return [held(one) for one in every(meetings, now)]


def found(*meetings: Meeting) -> list[tuple[str, str]]:
    return [(one.rule, one.culprit) for one in patterns(meetings, NOW)]


def test_requests_that_wait_at_a_prefill_while_nothing_of_it_ends_are_stuck_there() -> None:
    those = [attempt(number) for number in range(STUCK)]
    (one,) = patterns(those, NOW)
    assert (one.rule, one.culprit, one.stage, one.blocks) == ("stuck", "p1", Stage.FIRST_BYTE, True)
    assert "3 requests wait at p1, the oldest for 60 s" in one.sentence
    assert found(*those[1:]) == [], "fewer may be one very long prompt"
    young = [attempt(number, begun=NOW - 5) for number in range(9)]
    assert found(*young) == []


def test_after_its_prefill_answered_a_request_waits_for_the_decode() -> None:
    those = [attempt(number, prefill_ended=NOW - 50) for number in range(STUCK)]
    assert found(*those) == [("stuck", "d1")]


def test_a_worker_of_which_something_ended_lately_is_slow_and_not_stuck() -> None:
    those = [attempt(number) for number in range(STUCK)]
    moved = attempt(9, "ok", first_byte=NOW - 3, ended=NOW - 2)
    assert found(*those, moved) == []
    other = attempt(9, "ok", prefill="p2", first_byte=NOW - 3, ended=NOW - 2)
    assert found(*those, other) == [("stuck", "p1")]


def test_long_answers_are_nothing_stuck() -> None:
    assert found(*(attempt(number, first_byte=NOW - 59) for number in range(9))) == []


def test_clients_that_give_up_before_an_answer_begins_are_told_with_how_long_they_waited() -> None:
    gone = [attempt(number, "client_gone", ended=NOW - 58) for number in range(LEFT)]
    (one,) = patterns(gone, NOW)
    assert (one.rule, one.culprit, one.blocks) == ("clients-leave", "p1", False)
    assert "half of them within 2.0 s" in one.sentence
    well = [attempt(number, "ok", ended=NOW, first_byte=NOW) for number in range(LEFT)]
    assert found(*gone, *well) == []
    assert found(*gone[1:]) == []


def test_a_worker_that_most_failures_share_is_named_where_others_do_well() -> None:
    failed = [attempt(n, "failed", decode=f"d{n % 3}", ended=NOW) for n in range(12)]
    well = attempt(99, "ok", prefill="p2", decode="d2", ended=NOW, first_byte=NOW)
    assert found(*failed, well) == [("one-culprit", "p1")]
    assert found(*failed) == [], "nobody does well without it"
    pair = [attempt(n, "failed", ended=NOW) for n in range(12)]
    assert found(*pair, well) == [], "which of the two it is nobody can tell"

"""Spans: an attempt and its stages under the client's own trace, as OpenTelemetry has them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest
from kit.clock import FakeClock
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvplane.router import spans as module
from kvplane.router.evidence import Ledger, Meeting
from kvplane.router.meeting import Trail
from kvplane.router.remembered import Party, Why
from kvplane.router.spans import MOST_WAITING, NoSpans, Spans
from kvplane.vocabulary import Room, Stage, StageRecord

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def made(ledger: Ledger, clock: FakeClock, outcome: str = "ok", trace: str = TRACE) -> Meeting:
    trail = Trail(clock.now)
    for stage in (Stage.POOL, Stage.AVAILABILITY, Stage.POLICY_INPUT, Stage.PAIR):
        trail.begin(stage)
        clock.advance(1)
    trail.begin(Stage.FIRST_BYTE)
    one = Meeting("r", 1, "/generate", "tiny", (Room(7),), Party("p1"), Party("d1"), Why())
    one.traceparent = f"00-{trace}-00f067aa0ba902b7-01" if trace else ""
    ledger.open(one, trail)
    clock.advance(2)
    at = clock.wall()
    ledger.record(StageRecord(Room(7), Stage.VERIFY, "ok", 0.5, "", "d1", at))
    ledger.close(one, outcome, {"message": "cut"} if outcome == "failed" else None)
    return one


class Desk:
    def __init__(self) -> None:
        self.exporter, self.clock, self.dropped = InMemorySpanExporter(), FakeClock(), 0
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.ledger = Ledger(self.clock)
        self.spans = Spans(provider.get_tracer("test"), self._drop)

    def _drop(self) -> None:
        self.dropped += 1

    def told(self) -> dict[str, Any]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def test_stages_are_children_of_the_attempt_and_that_of_the_clients_span() -> None:
    desk = Desk()
    one = made(desk.ledger, desk.clock)
    desk.spans.tell(one)
    told = desk.told()
    whole = told.pop("/generate, attempt 1")
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == "00f067aa0ba902b7"
    assert whole.end_time - whole.start_time == 6_000_000_000
    assert whole.attributes["kvplane.prefill"] == "p1" and whole.attributes["kvplane.rooms"] == (
        "7",
    )
    assert set(told) == {
        "worker-pool", "availability", "policy-input", "pair", "first-byte", "verify",
    }  # fmt: skip
    for span in told.values():
        assert span.parent.span_id == whole.context.span_id
        assert whole.start_time <= span.start_time <= span.end_time <= whole.end_time
    assert told["verify"].end_time - told["verify"].start_time == 500_000_000
    assert told["verify"].attributes["kvplane.by"] == "d1"


def test_a_failure_is_an_error_and_without_a_trace_of_the_client_one_begins() -> None:
    desk = Desk()
    desk.spans.tell(made(desk.ledger, desk.clock, "failed", trace=""))
    told = desk.told()
    whole = told["/generate, attempt 1"]
    assert whole.parent is None and whole.status.status_code is StatusCode.ERROR
    assert whole.status.description == "cut"
    assert told["first-byte"].status.status_code is StatusCode.ERROR
    assert told["pair"].status.status_code is StatusCode.UNSET


async def test_what_waits_is_bounded_and_ends_with_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_S", 0.0)
    desk = Desk()
    desk.ledger.on_close.append(desk.spans.ended)
    made(desk.ledger, desk.clock)
    assert desk.told() == {}, "nothing on the path of a request"
    await asyncio.sleep(0.01)
    assert "/generate, attempt 1" in desk.told()
    monkeypatch.setattr(module, "SETTLE_S", 60.0)
    one = made(desk.ledger, desk.clock)
    for _ in range(MOST_WAITING + 5):
        desk.spans.ended(one)
    assert desk.dropped == 6
    await desk.spans.stop()
    assert not desk.spans._waiting


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(NoSpans, match=r"pip install 'kvplane\[otel\]'"):
        Spans()

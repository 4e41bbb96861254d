"""Spans: each attempt and its stages for OpenTelemetry, under the client's own trace.

Edge, an extra: only where --spans asks for it and the otel extra is installed. Made from evidence a
moment after an attempt ended, never on the path of a request. Where they go is the business of the
process's tracer provider (opentelemetry-instrument kvplane router ..., or OTEL_* of an embedder).
Open it to change what a span says.

    traceparent of the client --> POST /v1/completions, attempt 1 --> worker-pool ... verify ... end
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from typing import Any

from .meeting import Meeting

SETTLE_S = 1.5  # after its end: until then its engines were asked, where they are asked at all
MOST_WAITING = 10_000  # attempts; of more no spans are made, and that is counted
NANO = 1_000_000_000


class NoSpans(ImportError):
    """The otel extra is not installed."""

    extra = "otel"

    def __str__(self) -> str:
        return "--spans needs opentelemetry: pip install 'kvplane[otel]'"


class Spans:
    """Hears of every ended attempt. A Part."""

    def __init__(self, tracer: Any = None, on_dropped: Callable[[], None] = lambda: None) -> None:
        try:
            self._trace = importlib.import_module("opentelemetry.trace")
            propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        except ImportError as error:
            raise NoSpans from error
        self._propagator = propagation.TraceContextTextMapPropagator()
        self._tracer = tracer if tracer is not None else self._trace.get_tracer("kvplane")
        self._on_dropped = on_dropped
        self._waiting: set[asyncio.TimerHandle] = set()

    async def start(self) -> None:
        """Nothing to prepare."""

    async def stop(self) -> None:
        """What waits is not told any more."""
        for handle in self._waiting:
            handle.cancel()
        self._waiting.clear()

    def ended(self, meeting: Meeting) -> None:
        """An attempt is over: its spans are made when its engines had time to tell."""
        if len(self._waiting) >= MOST_WAITING:
            self._on_dropped()
            return

        def tell() -> None:
            self._waiting.discard(handle)
            self.tell(meeting)

        handle = asyncio.get_running_loop().call_later(SETTLE_S, tell)
        self._waiting.add(handle)

    def tell(self, meeting: Meeting) -> None:
        """All spans of one attempt."""
        carrier = {"traceparent": meeting.traceparent} if meeting.traceparent else {}
        above = self._propagator.extract(carrier)
        begun, took_s = meeting.opened_at, meeting.duration_s or 0.0
        whole = self._tracer.start_span(
            f"{meeting.path}, attempt {meeting.attempt}",
            context=above,
            start_time=_nano(begun),
            attributes=_facts(meeting),
        )
        if meeting.outcome == "failed":
            said = str((meeting.error or {}).get("message", ""))
            whole.set_status(self._trace.StatusCode.ERROR, said)
        inside = self._trace.set_span_in_context(whole)
        own = list(meeting.timeline(None))
        told = [one for room in meeting.rooms for one in meeting.timeline(room)]
        stages = own + [one for one in told if one["by"] != "gateway"]
        for stage in stages:
            if stage["begin_s"] is not None and stage["duration_s"] is not None:
                self._stage(stage, begun, inside)
        whole.end(_nano(begun + took_s))

    def _stage(self, stage: dict[str, Any], begun: float, inside: Any) -> None:
        at = begun + stage["begin_s"]
        facts = {"kvplane.by": stage["by"], "kvplane.outcome": stage["outcome"]}
        span = self._tracer.start_span(
            stage["stage"], context=inside, start_time=_nano(at), attributes=facts
        )
        if stage["outcome"] == "failed":
            span.set_status(self._trace.StatusCode.ERROR, stage["detail"])
        span.end(_nano(at + stage["duration_s"]))


def _facts(meeting: Meeting) -> dict[str, Any]:
    """Attributes; no prompt and no key is among what is remembered."""
    sides = (("prefill", meeting.prefill), ("decode", meeting.decode))
    named = {f"kvplane.{name}": side.worker for name, side in sides if side is not None}
    return named | {
        "kvplane.request_id": meeting.request_id,
        "kvplane.rooms": [str(room) for room in meeting.rooms],
        "kvplane.model": meeting.model,
        "kvplane.outcome": meeting.outcome,
    }


def _nano(seconds: float) -> int:
    return int(seconds * NANO)

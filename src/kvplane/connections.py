"""Connections: what a client may do to an HTTP port before an app sees a request.

Door. Used by doors.py, between uvicorn and its parser. Heads are bounded in bytes and time (25 MB
of header lines would hold 300 MB, a head that never ends would be waited for for ever) and refused
in words (refusals.py), writing.py joins what is written, a client that takes nothing of its answer
is let go, and the scope offers more. Open it to change a bound.

    scope["extensions"]["tls"]["client_cert_name"]   as the ASGI TLS extension has it
    scope["extensions"]["kvplane.leave"](call)       call() when the client leaves before the end
    scope["extensions"]["kvplane.whole"]()           is the request's body here?
    "kvplane.answer"(status, headers, data, more)    both of answering.py: false where nothing was
    "kvplane.put"(data)                              done and the app has to send and wait
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvplane.answering import Headers, answer, put
from kvplane.offers import Declining
from kvplane.refusals import MOST_LINES, refusal, too_long
from kvplane.writing import Writer

log = logging.getLogger(__name__)

# Without a byte of a body: head, chunk lines or trailers; others take 8-64 K.
MOST_BYTES = 64 * 1024
HEAD_S = 10.0  # for a head to arrive whole, counted from its first byte or from the connection
MOST_AHEAD = 256  # requests sent before the answer to an earlier one; real clients send none
MOST_UNREAD = 1024 * 1024  # of a body, before no more is read until the app took it
STALL_S = 120.0  # a client that takes not a byte of what waits for it this long is let go
LEAVE = "kvplane.leave"  # a task that waits for this would cost a tenth of a small request
WHOLE, ANSWER, PUT = "kvplane.whole", "kvplane.answer", "kvplane.put"
TELL_S = 1.0  # a flood of bad heads is not a flood of log lines


class Connection(Declining):
    """uvicorn's protocol that lets go of a client that sends too much, or too slowly."""

    refused: ClassVar[int] = 0  # connections of the whole process; a gauge reads it
    stalled: ClassVar[int] = 0
    head_s: ClassVar[float] = HEAD_S
    stall_s: ClassVar[float] = STALL_S
    most_bytes: ClassVar[int] = MOST_BYTES
    told_at: ClassVar[float] = 0.0  # when the log last heard of a refusal

    _quiet = 0  # bytes since a request or a part of a body was complete
    _hosts = 0  # Host lines of the head that is read
    _within = False  # between the first byte of a request and its last
    _headed = False  # and its head was whole, so that an app has it
    _named: str | None = None
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _leaving: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = Writer(transport, self.loop, lambda: self._within)
        self.transport = self._writer  # type: ignore[assignment]
        self._named = _subject(transport.get_extra_info("peercert"))
        self._late = self.loop.call_later(self.head_s, self._refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._drains()
        self._writer.ended()
        super().connection_lost(exc)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving()

    def data_received(self, data: bytes) -> None:
        if self._writer.deaf:
            return
        self._quiet += len(data)
        super().data_received(data)
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            # Here, not before: most heads arrive in one piece and need no timer.
            self._late = self.loop.call_later(self.head_s, self._refuse)
        if self._quiet > self.most_bytes and not self.transport.is_closing():
            self._refuse(*self._too_long())
        if len(self.pipeline) > MOST_AHEAD:
            self.pipeline.clear()
            self._within = True  # there is more of it
            self._refuse(400, f"at most {MOST_AHEAD} requests may be sent before an answer")

    def on_message_begin(self) -> None:
        self._within, self._headed, self._hosts = True, False, 0
        super().on_message_begin()
        extensions: dict[str, Any] = {
            LEAVE: self.on_leave, WHOLE: self.is_whole, ANSWER: self.answer, PUT: self.put
        }  # fmt: skip
        if self._named is not None:
            extensions["tls"] = {"client_cert_name": self._named}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, which does not look for Host."""
        name = name.lower()
        if name == b"host":
            self._hosts += 1
        elif name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def is_whole(self) -> bool:
        """Has the body come? Then it need not be waited for, and no deadline set. Never said of
        one while another is read."""
        return not self.cycle.more_body

    def answer(self, status: int, headers: Headers, data: bytes, more: bool) -> bool:
        """See answering.py."""
        return answer(self, status, headers, data, more)

    def put(self, data: bytes) -> bool:
        """See answering.py."""
        return put(self, self._writer.write_now, data)

    def on_leave(self, call: Callable[[], None]) -> None:
        """Call when the client leaves before its answer ended; now, where it has left. For the
        app, once it has the whole body: nothing else of this connection is read then."""
        self.flow.resume_reading()
        if self.transport.is_closing():
            self.cycle.disconnected = True  # else no answer is an error to uvicorn's log
            call()
        else:
            self._leaving = call

    def on_headers_complete(self) -> None:
        self._in_time()
        lines = len(self.headers)
        if lines > MOST_LINES or self._quiet > self.most_bytes:  # it may have come in one piece
            head = sum(len(name) + len(value) + 4 for name, value in self.headers) + len(self.url)
            if lines > MOST_LINES or head > self.most_bytes:
                self._why = too_long(head, len(self.url), lines, self.most_bytes)
                raise ValueError("refused")  # the parser says that to send_400_response
        if self._hosts != 1 and (self._hosts or self.parser.get_http_version() == "1.1"):
            self._why = 400, f"{self._hosts or 'no'} Host headers came: HTTP/1.1 wants exactly one"
            raise ValueError("refused")
        self._headed = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, which stops reading at 64 KiB: once for each read of a large body."""
        self._quiet, cycle = 0, self.cycle
        if cycle.response_complete:
            return
        cycle.body += body
        if len(cycle.body) > MOST_UNREAD:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._quiet, self._within = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """uvicorn reads on here: 10 MB of requests sent ahead would hold 400 MB."""
        self._leaving = None
        self._writer.flush()  # nothing follows that it could wait for
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._drains()
        self._look_at_drain(self.transport.get_write_buffer_size() + 1)

    def resume_writing(self) -> None:
        self._drains()
        super().resume_writing()

    def _look_at_drain(self, before: int) -> None:
        """The app writes nothing meanwhile, so that less is progress, and as much is none."""
        waits = self.transport.get_write_buffer_size()
        if waits < before:
            self._stuck = self.loop.call_later(self.stall_s, self._look_at_drain, waits)
        else:
            Connection.stalled += 1
            self.transport.abort()

    def _drains(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def send_400_response(self, msg: str) -> None:
        """What the parser could not take, or we did not."""
        status, why = self._why or (400, msg)
        Connection.refused += 1
        self._tell(status, why)
        if not self._answered():
            self.transport.write(refusal(status, why))
        self.transport.close()

    def _answered(self) -> bool:
        """Has what is refused an answer, or is one on its way that ours would fall into?"""
        if self.cycle is None or not self.cycle.response_started:
            return False
        return not self.cycle.response_complete or (self._within and self._headed)

    def _refuse(self, status: int = 400, why: str = "") -> None:
        if self.transport.is_closing():
            return
        if self._quiet == 0 and not why:  # opened and never used, as some clients do ahead of time
            self.transport.close()
            return
        self._why = status, why or f"the head did not arrive whole within {self.head_s:g} s"
        self.send_400_response("")

    def _too_long(self) -> tuple[int, str]:
        """Of a head, or else of what stands between two parts of a body."""
        if self._within and self._headed:
            return 400, f"{self._quiet} bytes came without one of a body"
        url = getattr(self, "url", b"")  # unset before the first request
        return too_long(self._quiet, len(url), 0, self.most_bytes)

    def _tell(self, status: int, why: str) -> None:
        now = self.loop.time()
        if now - Connection.told_at >= TELL_S:
            Connection.told_at = now
            who = self.client[0] if self.client else "?"
            log.warning("request refused client=%s status=%d why=%s", who, status, why)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


class RefusedHeads(Collector):
    """The counts above as metrics of whatever registry wants them."""

    def collect(self) -> Iterable[Metric]:
        """Two counters, without labels: heads that are refused name no route."""
        yield CounterMetricFamily(
            "kvplane_http_refused_heads",
            "HTTP connections closed because of a head: too long, too slow, or no HTTP",
            value=Connection.refused,
        )
        yield CounterMetricFamily(
            "kvplane_http_stalled_clients",
            "HTTP connections closed because nothing of an answer was taken for too long",
            value=Connection.stalled,
        )


def _subject(certificate: dict[str, Any] | None) -> str | None:
    """`CN=prefill-0,O=site` of a certificate that was verified; None where none was shown."""
    if not certificate:
        return None
    short = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU"}
    parts = [pair for group in certificate.get("subject", ()) for pair in group]
    return ",".join(f"{short.get(name, name)}={value}" for name, value in parts) or "(no subject)"

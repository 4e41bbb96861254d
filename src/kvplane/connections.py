"""Connections: what a client may do to an HTTP port before an app sees a request, and how often we
write for one answer.

Door. Used by doors.py, between uvicorn and its parser. Heads are bounded in bytes and time (25 MB
of header lines would hold 300 MB, a head that never ends would be waited for for ever), head and
body of an answer leave in one write, a client that takes nothing of its answer is let go, and the
scope says two things more. Open it to change a bound.

    scope["extensions"]["tls"]["client_cert_name"]   as the ASGI TLS extension has it
    scope["extensions"]["kvplane.leave"](call)       call() when the client leaves before the end
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES = (
    64 * 1024
)  # without a byte of a body: head, chunk lines or trailers; others take 8-64 K
HEAD_S = 10.0  # for a head to arrive whole, counted from its first byte or from the connection
MOST_AHEAD = 256  # requests sent before the answer to an earlier one; real clients send none
STALL_S = 120.0  # a client that takes not a byte of what waits for it this long is let go
LEAVE = "kvplane.leave"  # a task that waits for this would cost a tenth of a small request
JOINED = 16 * 1024  # bytes that wait for more at most; then they leave at once


class Connection(HttpToolsProtocol):
    """uvicorn's protocol that lets go of a client that sends too much, or too slowly."""

    refused: ClassVar[int] = 0  # connections of the whole process; a gauge reads it
    stalled: ClassVar[int] = 0
    head_s: ClassVar[float] = HEAD_S
    stall_s: ClassVar[float] = STALL_S

    _quiet = 0  # bytes since a request or a part of a body was complete
    _named: str | None = None
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _leaving: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = _OneWrite(transport, self.loop)
        self.transport = self._writer  # type: ignore[assignment]
        self._named = _subject(transport.get_extra_info("peercert"))
        self._late = self.loop.call_later(self.head_s, self._refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        self._drains()
        super().connection_lost(exc)
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving()

    def data_received(self, data: bytes) -> None:
        self._quiet += len(data)
        super().data_received(data)
        if self._late is None and (self.cycle is None or self.cycle.response_complete):
            # Here, not before: most heads arrive in one piece and need no timer.
            self._late = self.loop.call_later(self.head_s, self._refuse)
        if self._quiet > MOST_BYTES and not self.transport.is_closing():
            self._refuse()
        if len(self.pipeline) > MOST_AHEAD:
            self.pipeline.clear()
            self._refuse(f"at most {MOST_AHEAD} requests may be sent before an answer")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {LEAVE: self.on_leave}
        if self._named is not None:
            extensions["tls"] = {"client_cert_name": self._named}
        self.scope["extensions"] = extensions

    def on_leave(self, call: Callable[[], None]) -> None:
        """Call when the client leaves before its answer ended; now, where it has left. For the
        app, once it has the whole body: nothing else of this connection is read then."""
        self.flow.resume_reading()
        if self.transport.is_closing():
            call()
        else:
            self._leaving = call

    def on_headers_complete(self) -> None:
        self._in_time()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._quiet = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._quiet = 0
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
        Connection.refused += 1
        super().send_400_response(msg)

    def _refuse(self, why: str = "") -> None:
        if self.transport.is_closing():
            return
        if self._quiet == 0 and not why:  # opened and never used, as some clients do ahead of time
            self.transport.close()
            return
        said = f"head: must arrive whole within {self.head_s:g} s and {MOST_BYTES >> 10} KiB"
        self.send_400_response(why or said)

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


class _OneWrite:
    """A transport that joins what is written in one turn of the loop: one system call an answer."""

    def __init__(self, inner: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._inner, self._loop = inner, loop
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Soon, with what follows; at once where it is much."""
        if not self._held:
            self._loop.call_soon(self.flush)
        self._held.append(data)
        self._size += len(data)
        if self._size >= JOINED:
            self.flush()

    def close(self) -> None:
        """What is held leaves before."""
        self.flush()
        self._inner.close()

    def flush(self) -> None:
        """Now, if anything is held."""
        held, self._held, self._size = self._held, [], 0
        if held:
            self._inner.write(held[0] if len(held) == 1 else b"".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _subject(certificate: dict[str, Any] | None) -> str | None:
    """`CN=prefill-0,O=site` of a certificate that was verified; None where none was shown."""
    if not certificate:
        return None
    short = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU"}
    parts = [pair for group in certificate.get("subject", ()) for pair in group]
    return ",".join(f"{short.get(name, name)}={value}" for name, value in parts) or "(no subject)"

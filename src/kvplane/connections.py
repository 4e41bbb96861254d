"""Connections: what a client may do to an HTTP port before an app sees a request, and how often we
write for one answer.

Door. Used by doors.py, between uvicorn and its parser. Heads are bounded in bytes and time (25 MB
of header lines would hold 300 MB, a head that never ends would be waited for for ever), head and
body of an answer leave in one write, and who showed a client certificate is named in the scope.
Open it to change a bound.

    scope["extensions"]["tls"]["client_cert_name"]   as the ASGI TLS extension has it
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, ClassVar

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_BYTES = (
    64 * 1024
)  # without a byte of a body: head, chunk lines or trailers; others take 8-64 K
HEAD_S = 10.0  # for a head to arrive whole, counted from its first byte or from the connection
MOST_AHEAD = 256  # requests sent before the answer to an earlier one; real clients send none
JOINED = 16 * 1024  # bytes that wait for more at most; then they leave at once


class Connection(HttpToolsProtocol):
    """uvicorn's protocol that lets go of a client that sends too much, or too slowly."""

    refused: ClassVar[int] = 0  # connections of the whole process; a gauge reads it
    head_s: ClassVar[float] = HEAD_S

    _quiet = 0  # bytes since a request or a part of a body was complete
    _named: str | None = None
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._writer = _OneWrite(transport, self.loop)
        self.transport = self._writer  # type: ignore[assignment]
        self._named = _subject(transport.get_extra_info("peercert"))
        self._late = self.loop.call_later(self.head_s, self._refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        self._in_time()
        super().connection_lost(exc)

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
        if self._named is not None:
            self.scope["extensions"] = {"tls": {"client_cert_name": self._named}}

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
        self._writer.flush()  # nothing follows that it could wait for
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

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
    """The count above as a metric of whatever registry wants it."""

    def collect(self) -> Iterable[Metric]:
        """One counter, without labels: heads that are refused name no route."""
        yield CounterMetricFamily(
            "kvplane_http_refused_heads",
            "HTTP connections closed because of a head: too long, too slow, or no HTTP",
            value=Connection.refused,
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

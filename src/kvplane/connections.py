"""Connections: what a client may do to an HTTP port before an app sees a request.

Door. Used by doors.py, between uvicorn and its parser. Heads are bounded in bytes and time (25 MB
of lines would hold 300 MB, one that never ends would be waited for for ever) and refused in words
(refusing.py), writing.py joins what is written; repeats.py passes the parser by. A request is in
cycle.py. Open it for a bound.

    scope["extensions"]["tls"]["client_cert_name"]   as the ASGI TLS extension has it
    scope["extensions"]["kvplane.cycle"]             cycle.py: to answer without messages
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

import httptools

from kvplane.cycle import EXTENSION, Cycle, Direct, Rest
from kvplane.framing import Headers, written
from kvplane.heads import awaits_100, hosts, length, place, subject
from kvplane.refusals import MOST_LINES, too_long
from kvplane.refusing import Refusing
from kvplane.writing import STALL_S, Writer

MOST_AHEAD = 256  # requests sent before the answer to an earlier one; real clients send none
LOOK_S = 1.0  # one that waits for its turn is not read: whether its client is there is looked up
MOST_UNREAD = 1024 * 1024  # of a body, before no more is read until the app took it
ASGI = {"version": "3.0", "spec_version": "2.3"}


class Connection(Refusing):
    """uvicorn's protocol that lets go of a client that sends too much, or too slowly."""

    stalled: ClassVar[int] = 0  # connections of the whole process; a gauge reads it
    stall_s: ClassVar[float] = STALL_S
    direct: ClassVar[Mapping[bytes, Direct]] = {}  # by path of a POST: answered without ASGI

    _usual: ClassVar[tuple[Headers, bytes]] = ((), b"")
    _awaits_100 = False  # before it sends its body
    _named: str | None = None
    _idle: asyncio.TimerHandle | None = None
    _idle_since = 0.0
    _looks: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.writer = Writer(transport, self.loop, lambda: self._within, self.stall_s, _stalls)
        self.transport = self.writer  # type: ignore[assignment]
        self._named = subject(transport.get_extra_info("peercert"))
        self.ahead: deque[Cycle] = deque()  # sent before the answer to an earlier one
        shown = {"client_cert_name": self._named}
        self._extensions: dict[str, Any] = {"tls": shown} if self._named else {}
        self._late = self.loop.call_later(self.head_s, self.refuse)

    def connection_lost(self, exc: Exception | None) -> None:
        """As uvicorn's, and every request that is not over hears of it."""
        self._in_time()
        self.writer.ended()
        self.connections.discard(self)
        self.flow.resume_writing()
        for timer in (self._idle, self._looks):
            if timer is not None:
                timer.cancel()
        self.transport.close()
        cycle, self.turn, self.newest = self.turn, None, None  # they hold us
        self.ahead.clear()
        self.parser = None  # type: ignore[assignment]
        if cycle is not None:
            cycle.lost()

    def shutdown(self) -> None:
        """The server ends: an idle connection now, any other with its answer."""
        if self.turn is None:
            self.transport.close()
        else:
            self.turn.keep_alive = False

    def data_received(self, data: bytes) -> None:
        if self.writer.deaf:
            return
        self._quiet += len(data)
        super().data_received(data)
        if self._within and (self.newest is None or self.newest.response_complete):
            self._await_rest()  # here, not before: most heads arrive in one piece
        if self._quiet > self.most_bytes and not self.transport.is_closing():
            self.refuse(*self._too_long())
        if len(self.ahead) > MOST_AHEAD:
            self.ahead.clear()
            self._within = True  # there is more of it
            self.refuse(400, f"at most {MOST_AHEAD} requests may be sent before an answer")

    # -- what the parser tells

    def on_message_begin(self) -> None:
        self._within, self._headed = True, False
        self.url, self._awaits_100 = b"", False
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._late is not None:
            self._in_time()
        lines = len(self.headers)
        if lines > MOST_LINES or self._quiet > self.most_bytes:  # it may have come in one piece
            head = length(self.headers) + len(self.url)
            if lines > MOST_LINES or head > self.most_bytes:  # the parser tells send_400_response
                self._why = too_long(head, len(self.url), lines, self.most_bytes)
                raise ValueError("refused")
        names, version = [name for name, _ in self.headers], self.parser.get_http_version()
        if why := hosts(names, version):
            self._why = 400, why
            raise ValueError("refused")
        if b"expect" in names:
            self._awaits_100 = awaits_100(self.headers, version)
        super().on_headers_complete()
        self._headed = True

    def begin(self) -> None:
        """A head is whole: its request is answered now, or when those before it were."""
        parser, version = self.parser, self.parser.get_http_version()
        keep = version != "1.0" and parser.should_keep_alive()
        self.newest = cycle = Cycle(self, parser.get_method(), self.url, version, self.headers)
        cycle.keep_alive, cycle.awaits_100 = keep, self._awaits_100
        self.headers = []  # what a body ends with is none of its head: no proxy before us saw it
        if self.transport.is_closing():
            return  # what was before it in the same read was the last
        if self.turn is None:
            self.start(cycle, self.straight(cycle))
        else:
            self.flow.pause_reading()
            cycle.size = MOST_UNREAD  # no more of its body than came with it, before its turn
            self.ahead.append(cycle)
            if self._looks is None:
                self._looks = self.loop.call_later(LOOK_S, self._look_left)

    def on_body(self, body: bytes) -> None:
        """uvicorn's stops reading at 64 KiB: once for each read of a large body."""
        self._quiet, cycle = 0, self.newest
        if cycle is None or cycle.response_complete:
            return
        cycle.came(body)
        if cycle.size > MOST_UNREAD:
            self.flow.pause_reading()

    def on_message_complete(self) -> None:
        self._quiet, self._within = 0, False
        if self._late is not None:
            self._in_time()
        if self.newest is not None and not self._offered:
            self.newest.ended()
            if self.headers and not self.parser.should_keep_alive():
                self.newest.last()  # said behind the body; the parser takes no more

    # -- what a cycle needs

    def usual_headers(self) -> Headers:
        """Of every answer: the date."""
        return self.server_state.default_headers

    def usual(self) -> bytes:
        """The same, written once for all connections until it changes."""
        told, kept = self.server_state.default_headers, Connection._usual
        if kept[0] is not told:
            kept = Connection._usual = told, written(told)
        return kept[1]

    def finished(self) -> None:
        """An answer has left: the next request's turn. No more is read while one waits: 10 MB of
        requests sent ahead would hold 400 MB."""
        self.turn = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.ahead:
            self.turn = self.ahead.popleft()
            self.loop.call_soon(self._go_on)  # from here each would be one deeper
            if self.ahead:
                self.flow.pause_reading()
            return
        if self._within:
            self._await_rest()  # half a head, or a body whose answer did not wait for it
        self._idle_since = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_idle)

    def straight(self, cycle: Cycle) -> Direct | None:
        """Who answers this without ASGI, if anybody."""
        return self.direct.get(cycle.url.partition(b"?")[0]) if cycle.method == b"POST" else None

    def start(self, cycle: Cycle, direct: Direct | None) -> None:
        """Its turn has come: answered at once where nothing is to be waited for."""
        self.turn = cycle
        if (rest := cycle.begin(direct or self._asgi)) is not None:
            task = self.loop.create_task(rest)
            self.tasks.add(task)
            task.add_done_callback(cycle.over)

    def _go_on(self) -> None:
        if self.turn is not None:  # else the client left meanwhile
            self.start(self.turn, self.straight(self.turn))

    def _asgi(self, cycle: Cycle) -> Rest:
        try:
            raw_path, path, query = place(cycle.url)
        except httptools.HttpParserError:
            return self._no_place(cycle)
        scope = {
            "type": "http",
            "asgi": ASGI,
            "http_version": cycle.version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "headers": cycle.headers,
            "state": {},
            "method": cycle.method.decode("ascii"),
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "extensions": {EXTENSION: cycle, **self._extensions},
        }
        return self.app(scope, cycle.receive, cycle.send)  # type: ignore[no-any-return]

    async def _no_place(self, cycle: Cycle) -> None:
        self.turn, cycle.response_complete = None, True  # the refusal is its answer
        self.refuse(400, "the URL in the first line is none")

    def _look_idle(self) -> None:
        """One timer for many requests: most connections are busy again long before it ends."""
        self._idle = None
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self.turn is not None or self.transport.is_closing():
            return
        if left_s > 0 or self._within:
            self._idle = self.loop.call_later(max(left_s, 1.0), self._look_idle)
        else:
            self.transport.close()

    def _look_left(self) -> None:
        """Whoever is answered has to hear that the client left, though nothing of it is read."""
        self._looks = None
        if self.writer.left():
            self.transport.abort()
        elif self.ahead:
            self._looks = self.loop.call_later(LOOK_S, self._look_left)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.writer.waits()

    def resume_writing(self) -> None:
        if not self.writer.is_closing():  # else nothing more comes: all of it is waited for
            self.writer.drained()
        super().resume_writing()


def _stalls() -> None:
    Connection.stalled += 1

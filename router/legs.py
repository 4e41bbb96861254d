"""Legs: one HTTP request to one engine over a kept connection. Who owns the sockets?

Edge: the pool. Sits on legs_connection.py (bytes) and legs_exchange.py (one leg); dispatch.py
and the proxy begin legs here. Open it to change when connections are kept, dropped or made.
Never resends: a request leaves once, and what to do after an error is for retry.py to say.

    begin -> newest idle connection, else a new one, else wait for one -> Exchange
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Collection
from functools import partial

from kvplane.runtime import Clock, SystemClock, cancel, supervise

from .credentials import Credentials
from .legs_connection import Connection
from .legs_engine import Engine, Engines
from .legs_errors import SENT, LegError, PoolFull, Refused, TlsFailed
from .legs_exchange import Bell, Exchange, Rung
from .legs_heads import Heads
from .legs_settings import LegSettings
from .legs_wire import Headers, Origin, header_lines, request_line

# No file or memory for a socket here: no word about the engine.
OURS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


class Legs:
    """Pool of engine connections. A Part: start() runs the sweeper, stop() closes everything."""

    def __init__(
        self,
        settings: LegSettings | None = None,
        clock: Clock | None = None,
        tls: ssl.SSLContext | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.credentials = credentials if credentials is not None else Credentials()
        self._settings = settings or LegSettings()
        self._clock = clock or SystemClock()
        self._now, self._heads = self._clock.now, Heads()
        self._tls = tls  # made once; CA and client certificate are the caller's
        self._engines = Engines()
        self._home: dict[Connection, tuple[Origin, Engine]] = {}  # of each open connection
        # Legs that have no connection yet, with the task that makes one, if any.
        self._coming: dict[Exchange, asyncio.Task[None] | None] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start to watch the deadlines."""
        self._sweeper = asyncio.create_task(supervise("legs", self._sweep_for_ever, self._clock))

    async def stop(self) -> None:
        """Abort every leg and close every connection."""
        connects = [task for task in self._coming.values() if task is not None]
        for exchange in self._live:
            exchange.abort()
        for connection in list(self._home):
            connection.abort()
        await cancel(self._sweeper, *connects)
        self._sweeper = None
        self._engines.clear()

    @property
    def live(self) -> int:
        """Legs that are neither complete nor failed."""
        return len(self._live)

    @property
    def _live(self) -> list[Exchange]:
        sent = [one.exchange for one in self._home if one.exchange is not None]
        return [*self._coming, *sent]

    @property
    def sockets(self) -> int:
        """Open connections, idle ones included."""
        return len(self._home)

    @property
    def idling(self) -> int:
        """Open connections that wait for a request."""
        return sum(len(engine.idle) for engine in self._engines.values())

    def begin(
        self,
        origin: Origin,
        target: str,
        headers: Headers | bytes = (),
        body: bytes = b"",
        bell: Rung | None = None,
        method: str = "POST",
        patient: bool = False,
        slow: bool = False,
    ) -> Exchange:
        """Send a request now, without waiting; everything that follows is told to the exchange.

        `headers`: pairs, or the lines legs_wire.header_lines made. `patient`: the answer is no
        stream, so that its head may take as long as all of it. `slow`: there; nobody looks at
        either before it is whole. Raises ValueError for what could split the request.
        """
        if self.credentials.known:
            headers = self.credentials.signed(origin, headers)
        if not isinstance(headers, bytes):
            headers = header_lines(headers)
        line, limits = request_line(method, origin, target), self._settings
        if body and len(body) < limits.joined_bytes:
            head, body = b"%b%bcontent-length: %d\r\n\r\n%b" % (line, headers, len(body), body), b""
        else:
            head = _alone(line, headers, method, body)
        now, bell, calm = self._now(), bell or Bell(), patient or slow
        engine = self._engines[origin]
        idle = engine.idle
        while idle:
            newest = idle.pop()
            if now - newest.free_since < newest.expire_s and not newest.closing():  # usable()
                exchange = Exchange(origin, head, body, limits, bell, patient, calm, slow,
                                    now, now, now, newest, SENT, True)  # fmt: skip
                newest.carry(exchange)
                return exchange
            newest.abort()
        exchange = Exchange(origin, head, body, limits, bell, patient, calm, slow, now, now, now)
        self._want(origin, engine, exchange)
        return exchange

    def _want(self, origin: Origin, engine: Engine, exchange: Exchange) -> None:
        """None idles: a new one is made, or waited for."""
        self._coming[exchange], exchange.on_over = None, self._given_up
        if engine.open < self._settings.connections:
            self._dial(origin, engine, exchange)
        elif len(engine.waiters) < self._settings.waiters:
            exchange.waits = True
            engine.waiters.append(exchange)
        else:
            exchange.fail(PoolFull, f"{engine.open} connections busy, {len(engine.waiters)} wait")

    def forget(self, origin: Origin) -> None:
        """The engine left the fleet: close what idles; legs under way end by themselves."""
        engine = self._engines.pop(origin, None)
        if engine is not None:
            engine.removed = True
            engine.drop_idle()

    def renew(self, origin: Origin) -> None:
        """What idles is not used again: what cut a partner's connections may have cut its own."""
        if (engine := self._engines.get(origin)) is not None:
            engine.drop_idle()

    def keep_only(self, origins: Collection[Origin]) -> None:
        """Forget every engine that listens elsewhere."""
        for origin in self._engines.keys() - origins:
            self.forget(origin)

    def _dial(self, origin: Origin, engine: Engine, exchange: Exchange) -> None:
        engine.open += 1
        exchange.dialled(self._now())
        task = asyncio.create_task(self._connect(origin, engine, exchange))
        task.add_done_callback(partial(self._undone, origin, engine))
        self._coming[exchange] = task

    async def _connect(self, origin: Origin, engine: Engine, exchange: Exchange) -> None:
        freed = partial(self._freed, engine)
        connection = Connection(self._settings, self._now, freed, self._lost, self._heads)
        try:
            tls = self._context() if origin.tls else None
            await asyncio.get_running_loop().create_connection(
                lambda: connection, origin.host, origin.port, ssl=tls
            )
        except Exception as error:
            engine.open -= 1
            self._serve(origin, engine)
            if not isinstance(error, (OSError, UnicodeError)):
                raise
            exchange.fail(*_refusal(error))
            return
        if connection.lost:
            engine.open -= 1
            exchange.fail(Refused, "connection closed by the engine as soon as it was made")
            self._serve(origin, engine)
            return
        self._home[connection] = (origin, engine)
        if exchange.over:
            self._freed(engine, connection)
        else:
            self._give(connection, exchange, False)

    def _undone(self, origin: Origin, engine: Engine, task: asyncio.Task[None]) -> None:
        """A connect that was given up has its place back, also where it had not begun."""
        if task.cancelled():
            engine.open -= 1
            self._serve(origin, engine)

    def _give(self, connection: Connection, exchange: Exchange, reused: bool) -> None:
        del self._coming[exchange]
        exchange.on_over, exchange.waits = None, False
        exchange.since = exchange.moved_at = self._now()
        connection.send(exchange, reused)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def _freed(self, engine: Engine, connection: Connection) -> None:
        """A message ended cleanly: the next waiter has it, or it idles."""
        while engine.waiters:
            exchange = engine.waiters.popleft()
            if not exchange.over:
                self._give(connection, exchange, True)
                return
        if engine.removed or len(engine.idle) >= self._settings.idle_connections:
            connection.abort()
        else:
            if engine.kept_until:
                connection.expire_s = min(connection.expire_s, engine.kept_s)
            engine.idle.append(connection)

    def _lost(self, connection: Connection) -> None:
        home = self._home.pop(connection, None)
        if home is not None:
            origin, engine = home
            engine.open -= 1
            now, usual_s, lesson_s = self._now(), self._settings.expire_s, self._settings.lesson_s
            if connection in engine.idle:  # nobody here took it out: the engine closed it
                engine.idle.remove(connection)
                engine.learn(now - connection.free_since, usual_s, now, lesson_s)
            elif connection.stale:
                engine.learn(connection.stale_after_s, usual_s, now, lesson_s)
                engine.drop_idle()
            self._serve(origin, engine)

    def _serve(self, origin: Origin, engine: Engine) -> None:
        """A place for a connection became free: the longest waiting leg dials."""
        while engine.waiters and engine.open < self._settings.connections:
            exchange = engine.waiters.popleft()
            if not exchange.over:
                self._dial(origin, engine, exchange)

    def _given_up(self, exchange: Exchange) -> None:
        """It is over before it had a connection."""
        task = self._coming.pop(exchange, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        engine = self._engines.get(exchange.origin) if exchange.waits else None
        if engine is not None:
            with contextlib.suppress(ValueError):
                engine.waiters.remove(exchange)

    async def _sweep_for_ever(self) -> None:
        while True:
            await self._clock.sleep(self._settings.sweep_s)
            self.sweep()

    def sweep(self) -> None:
        """Fail legs past a deadline, close connections past their time."""
        now = self._now()
        for exchange in self._live:
            exchange.check(now)
        for origin, engine in list(self._engines.items()):
            for connection in [c for c in engine.idle if not c.usable(now)]:
                engine.idle.remove(connection)
                connection.abort()
            if now >= engine.kept_until:
                engine.kept_until = 0.0
            if engine.unused:
                del self._engines[origin]


def _alone(line: bytes, headers: bytes, method: str, body: bytes) -> bytes:
    """A head that leaves without its body: that is long, or there is none."""
    if not body and method == "GET":
        return b"%b%b\r\n" % (line, headers)
    return b"%b%bcontent-length: %d\r\n\r\n" % (line, headers, len(body))


def _refusal(error: Exception) -> tuple[type[LegError], str]:
    """A failed connect in our words. Name and route failures count as refused."""
    if isinstance(error, OSError) and error.errno in OURS:
        return PoolFull, f"the gateway has no socket left: {error.strerror or error}"
    if isinstance(error, (ssl.SSLError, ssl.CertificateError)):
        return TlsFailed, f"TLS: {error}"
    if isinstance(error, socket.gaierror):
        return Refused, f"name not found: {error}"
    return Refused, f"no connection: {error.__class__.__name__}"

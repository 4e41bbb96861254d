"""Doors: one HTTP port from an ASGI app, and one app from several.

Door. Above it wiring.py; below it uvicorn. Open it to change how a port is opened and closed, or
how paths are shared out between the apps of one process.

    Switchboard: /index/...  -> the index app      /metrics -> metrics      the rest -> the gateway
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from typing import Any

import uvicorn
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from kvplane.connections import Connection
from kvplane.cycle import Direct
from kvplane.refusing import MOST_BYTES
from kvplane.repeats import Repeating
from kvplane.tls import Tls

log = logging.getLogger(__name__)

# A second series per counter, outside our naming, that nobody reads.
disable_created_metrics()  # type: ignore[no-untyped-call]

GRACE_S = 3.0  # open connections may end by themselves this long, then they are cut
CUT_S = 1.0  # for what a request that was cut still has to give back
# Whose X-Forwarded-For is believed. Said here, for else an environment variable of uvicorn's says
# it, and `*` in it would let anybody call himself 127.0.0.1, who may write.
PROXIES = ("127.0.0.1", "::1")
PORT_FLAGS = {  # by a server's name; others: --port
    "metrics": "--prometheus-port",
    "ingest": "--prometheus-port",
    "directory": "--bootstrap-port",  # a prefill's own; the command bootstrap has nothing else
}
BACKLOG = 2048  # connections the kernel keeps for us while the loop is busy


class PortTaken(OSError):
    """Somebody else listens there, or we may not. Names the address."""


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling: the process has one owner, wiring.py. And without
    looking ten times a second whether it shall end: it is told, and does at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._told = asyncio.Event()

    def end(self) -> None:
        """Begin to stop."""
        self.should_exit = True
        self._told.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Once a second it writes the header that tells the date."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._told.wait(), 1.0)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """No new connection; those that are open may end what they have begun."""
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                state = self.server_state
                while state.connections or state.tasks:  # noqa: ASYNC110 - sets, no event
                    await asyncio.sleep(0.005)
                return
        for task in self.server_state.tasks:
            task.cancel("the grace of a stop is over")


class _Forwarded:
    """Believes X-Forwarded-* of PROXIES; most requests have none, and no address to be parsed."""

    def __init__(self, app: Any) -> None:
        self._app, self._told = app, ProxyHeadersMiddleware(app, list(PROXIES))

    def __call__(self, scope: Any, receive: Any, send: Any) -> Awaitable[None]:
        for name, _ in scope["headers"]:
            if name.startswith(b"x-forwarded-"):
                return self._told(scope, receive, send)
        found: Awaitable[None] = self._app(scope, receive, send)
        return found


def bind(host: str, port: int, name: str = "") -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises PortTaken naming who, host and port."""
    family = _family(host, port)
    # Named as TCP, so that the loop switches off Nagle: else an answer waits 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        who, why = f"{name} " if name else "", error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            why += f"; {PORT_FLAGS.get(name, '--port')} chooses another"
        raise PortTaken(f"{who}cannot listen on {host}:{port}: {why}") from error
    return listener


def _family(host: str, port: int) -> socket.AddressFamily:
    """Of a literal as it stands, of a name what it stands for: it may have IPv6 only."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return socket.AF_INET  # bind says what is wrong with it
    families = [family for family, *_ in found]
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6


class Server:
    """A Part that serves one ASGI app on one port, in the loop that starts it. `direct` has the
    POST routes that are asked so often that ASGI between would cost a tenth of the answer."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        name: str,
        tls: Tls | None = None,
        most_head_bytes: int = MOST_BYTES,
        direct: Mapping[bytes, Direct] | None = None,
    ) -> None:
        told = {"most_bytes": most_head_bytes, "direct": direct or {}}
        bounded = type("Bounded", (Repeating,), told)
        config = uvicorn.Config(
            _Forwarded(app),
            interface="asgi3",
            http=bounded,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # _Forwarded looks first whether there are any
            forwarded_allow_ips=list(PROXIES),
            timeout_keep_alive=75,  # longer than any client of ours keeps an idle connection
            timeout_graceful_shutdown=int(GRACE_S),
            **(tls.options() if tls else {}),
        )
        self._tls = tls
        self._server = _Uvicorn(config)
        self._host, self._wanted, self._name = host, port, name
        self._task: asyncio.Task[None] | None = None
        self.port = port

    async def start(self) -> None:
        if self._tls is not None:
            self._tls.check()
        listener = bind(self._host, self._wanted, self._name)
        self.port = listener.getsockname()[1]
        self._task = asyncio.create_task(self._server.serve([listener]), name=f"serve {self._name}")
        while not self._server.started:
            if self._task.done():
                listener.close()
                await self._task
                raise RuntimeError(f"{self._name} ended while starting")
            await asyncio.sleep(0.002)
        log.info("listening name=%s host=%s port=%d", self._name, self._host, self.port)

    async def stop(self) -> None:
        if self._task is None:
            return
        self._server.end()
        try:
            await asyncio.wait_for(asyncio.shield(self._task), GRACE_S + 1)
        except TimeoutError:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        await self._cut()

    async def _cut(self) -> None:
        """Connections that did not end by themselves, once requests said what they still can."""
        state = self._server.server_state
        if state.tasks:
            await asyncio.wait(list(state.tasks), timeout=CUT_S)
        for connection in list(state.connections):
            transport: Any = connection.transport
            if not transport.is_closing() or transport.get_write_buffer_size():
                transport.abort()


class RefusedHeads(Collector):
    """What connections count, as metrics of whatever registry wants them."""

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


def new_registry() -> CollectorRegistry:
    """Metrics of one process, with what its doors refused before any app saw it."""
    registry = CollectorRegistry()
    registry.register(RefusedHeads())
    return registry


class Switchboard:
    """Gives each path to the app of its first part; `""` takes the rest."""

    def __init__(self, apps: Mapping[str, Any]) -> None:
        for prefix in apps:
            if prefix and prefix.rfind("/") != 0:
                raise ValueError(f"prefix {prefix!r}: must be '/' and one part of a path, or ''")
        self._apps = {prefix[1:]: app for prefix, app in apps.items() if prefix}
        self._rest = apps.get("")

    def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> Awaitable[None]:
        path: str = scope.get("path", "")
        first = path[1:].partition("/")[0] if path[:1] == "/" else ""
        app = self._apps.get(first)
        if app is None:
            app = self._rest
        elif scope["type"] == "http":
            scope = dict(scope, root_path=f"{scope.get('root_path', '')}/{first}")
        if app is None:
            raise LookupError(f"no app has {path}")
        found: Awaitable[None] = app(scope, receive, send)
        return found


class Metrics:
    """GET of its own path, or of the root of its own port: the registry as Prometheus text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path, method = scope.get("path", ""), scope["method"]
        if path not in ("/metrics", "/metrics/", "/", ""):
            status, kind, body = 404, "application/json", _fault("not_found", method, path)
        elif method not in ("GET", "HEAD"):
            status, kind, body = 405, "application/json", _fault("invalid_request", method, path)
        else:
            status, kind, body = 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        headers = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(body)).encode()),
        ]
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        shown = body if method != "HEAD" else b""
        await send({"type": "http.response.body", "body": shown})


def _fault(code: str, method: str, path: str) -> bytes:
    """An error in OpenAI's shape, as every other door answers it."""
    said = "Not Found" if code == "not_found" else "Method Not Allowed"
    kind = "invalid_request_error"
    fault = {"message": f"{method} {path}: {said}", "type": kind, "code": code, "param": None}
    return json.dumps({"error": fault}).encode()

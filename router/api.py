"""API: the inference door of the gateway.

Door: bare ASGI on the hot path; everything that is no inference goes to the app of admin.py.
admission.py says who may come in, gateway.py and proxy.py do the work, errors.py has the shape of
what goes wrong. Open it to change the order in which a request is looked at.

    key -> rate -> body -> what it asks -> a place -> gateway.handle, or proxy.handle

    POST /v1/chat/completions | /v1/completions | /generate  -> Ask  -> gateway.py
    POST /v1/embeddings ...                                  -> Call -> proxy.py
    the rest                                                 -> admin.py
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from kvplane.dice import DICE

from .admission import Admission
from .admission_metrics import AdmissionState
from .asker import CYCLE, AsgiClient, Cycle, HeaderList, Receive, Scope, Send, bounded
from .dispatch import BrokenBody, ClientGone
from .errors import GatewayError, let_go
from .gateway import Gateway
from .keys import Keys
from .proxied import PROXIED, read_call
from .proxy import Proxy
from .request import COUNTS, LONG_BYTES, Ask, parse, sane_id
from .tenants import SALTED, apart

log = logging.getLogger(__name__)

MOST_ADMIN_BYTES = 1024 * 1024  # of a body to an admin route: workers are told in less
NAME = b"x-request-id"
DECODABLE = (b"", b"identity")  # content-encoding of a body we can splice


class Api:
    """The gateway's whole HTTP app: `admin` answers what is no inference."""

    def __init__(self, gateway: Gateway, admin: Any) -> None:
        self._admin, self._metrics, self._now = admin, gateway.metrics, gateway.clock.now
        self._limits = gateway.settings.admission
        self.keys, self.admission = Keys(self._limits), Admission(self._limits)
        proxy = Proxy(gateway)
        self._ways: dict[str, tuple[Callable[..., Any], Callable[..., Awaitable[None]]]]
        self._ways = dict.fromkeys(PROXIED, (read_call, proxy.handle))
        self._ways |= dict.fromkeys(COUNTS, (read_ask, gateway.handle))
        gateway.metrics.registry.register(AdmissionState(self.admission, self.keys))
        gateway.places = self.admission.places

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI."""
        path = scope.get("path", "")
        if scope["type"] != "http" or path not in self._ways:
            found: Awaitable[None] = self._admin(scope, bounded(receive, MOST_ADMIN_BYTES), send)
            return found
        if scope["method"] != "POST":
            return _wrong_method(path, scope, receive, send)
        cycle = (scope.get("extensions") or {}).get(CYCLE)
        return self._infer(path, scope["headers"], AsgiClient(receive, send, cycle))

    def direct(self) -> dict[bytes, Callable[[Cycle], Coroutine[Any, Any, None]]]:
        """The POST routes of inference without ASGI between, for our own server."""
        return {path.encode(): partial(self._direct, path) for path in COUNTS}

    def _direct(self, path: str, cycle: Cycle) -> Coroutine[Any, Any, None]:
        client = AsgiClient(cycle.receive, cycle.send, cycle)
        return self._infer(path, cycle.headers, client)

    async def _infer(self, path: str, headers: HeaderList, client: AsgiClient) -> None:
        """Key, rate, body, what it asks, a place, the answer; all given back in turn."""
        metrics, admission, keys, now = self._metrics, self.admission, self.keys, self._now
        client.now, client.first_s = now, metrics.first_byte_s.of[path,]
        client.begun = begun = now()
        told = dict(reversed(headers))  # the first of a name counts
        request_id = sane_id(name, DICE.hex_id) if (name := told.get(NAME)) else DICE.hex_id()
        try:
            key = keys.anybody or keys.of(headers)
            if admission.bounded or key.bounded:
                admission.look(key, begun)
            key.running += 1
            try:
                if b"connection" in told or b"content-encoding" in told or keys.guarded:
                    headers = self._onward(headers, told.get(b"content-encoding", b""))
                raw = client.body_here(self._limits.most_body_bytes, admission.hold, key)
                if raw is None:
                    raw = await client.body(self._limits, told, admission.hold, key)
                read, handle = self._ways[path]
                if len(raw) <= LONG_BYTES:
                    wanted = read(path, raw, request_id, headers, key.salt)
                else:
                    wanted = await asyncio.to_thread(read, path, raw, request_id, headers, key.salt)
                if not admission.enter_at_once():
                    await admission.enter(key, client)
                try:
                    await handle(wanted, client)
                finally:
                    admission.leave()
            finally:
                if client.watching is not None:
                    client.unwatch()
                key.running -= 1
                admission.held_bytes -= client.held_bytes
        except Exception as error:
            await _failed(error, request_id, client)
        finally:
            status = "gone" if client.gone else client.status or "gone"
            metrics.requests.of[path, status].value += 1
            metrics.request_s.of[path,].observe(now() - begun)

    def _onward(self, headers: HeaderList, coding: bytes) -> HeaderList:
        """As engines may see them. Raises GatewayError for a body that cannot be read."""
        if coding.lower() not in DECODABLE:
            told = coding[:100].decode("latin-1")
            text = f"content-encoding {told!r} is not supported: send the body as it is"
            raise GatewayError("invalid_request", text, status=415)
        return self.keys.onward(headers)


async def _failed(error: Exception, request_id: str, client: AsgiClient) -> None:
    """Say what went wrong, where somebody is left to be told and no answer has begun."""
    if isinstance(error, GatewayError):
        if not client.gone:
            await client.whole(error.status, _error_head(error, request_id), error.body())
        let_go(error)
    elif isinstance(error, (ClientGone, BrokenBody)):
        log.debug("no answer request=%s why=%s", request_id, type(error).__name__)
        if isinstance(error, BrokenBody):
            client.cut()
        let_go(error)
    else:
        log.error("request failed request=%s", request_id, exc_info=error)
        ours = GatewayError("internal_error", f"the gateway failed; see its log, {request_id}")
        if not client.status and not client.gone:
            await client.whole(ours.status, _error_head(ours, request_id), ours.body())


async def _wrong_method(path: str, scope: Scope, receive: Receive, send: Send) -> None:
    text = f"{path} takes POST, not {scope['method']}"
    error = GatewayError("invalid_request", text, status=405)
    client = AsgiClient(receive, send)
    await client.whole(405, [*error.head(), (b"allow", b"POST")], error.body())


def read_ask(path: str, raw: bytes, request_id: str, headers: HeaderList, salt: str) -> Ask:
    """What a body asks, kept apart under its tenant's salt."""
    ask = parse(path, raw, request_id, tuple(headers))
    if not salt and (ask.plain or SALTED.isdisjoint(ask.body)):
        return ask
    raw, body = apart(path, ask.raw, ask.body, salt)
    if raw is ask.raw:
        return ask
    return msgspec.structs.replace(ask, raw=raw, body=body, plain=False)


def _error_head(error: GatewayError, request_id: str) -> HeaderList:
    head = error.head()
    named = any(name == NAME for name, _ in head)
    return head if named else [*head, (NAME, request_id.encode())]

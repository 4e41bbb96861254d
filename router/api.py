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
from collections.abc import Awaitable, Callable
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
from .keys import Key, Keys
from .proxied import PROXIED, Call, read_call
from .proxy import Proxy
from .request import COUNTS, LONG_BYTES, Ask, parse, sane_id
from .tenants import SALTED, apart

log = logging.getLogger(__name__)

MOST_ADMIN_BYTES = 1024 * 1024  # of a body to an admin route: workers are told in less
DECODABLE = (b"", b"identity")  # content-encoding of a body we can splice


class Api:
    """The gateway's whole HTTP app: `admin` answers what is no inference."""

    def __init__(self, gateway: Gateway, admin: Any) -> None:
        self._gateway, self._admin = gateway, admin
        self._limits = gateway.settings.admission
        self.keys, self.admission = Keys(self._limits), Admission(self._limits)
        self._proxy = Proxy(gateway)
        gateway.metrics.registry.register(AdmissionState(self.admission, self.keys))
        gateway.places = self.admission.places

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """ASGI."""
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path in COUNTS or path in PROXIED):
            found: Awaitable[None] = self._admin(scope, bounded(receive, MOST_ADMIN_BYTES), send)
            return found
        if scope["method"] != "POST":
            return _wrong_method(path, scope, receive, send)
        cycle = (scope.get("extensions") or {}).get(CYCLE)
        return self._infer(path, scope["headers"], AsgiClient(receive, send, cycle))

    def direct(self) -> dict[bytes, Callable[[Cycle], Awaitable[None]]]:
        """The POST routes of inference without ASGI between, for our own server."""
        return {path.encode(): partial(self._direct, path) for path in COUNTS}

    def _direct(self, path: str, cycle: Cycle) -> Awaitable[None]:
        client = AsgiClient(cycle.receive, cycle.send, cycle)
        return self._infer(path, cycle.headers, client)

    async def _infer(self, path: str, headers: HeaderList, client: AsgiClient) -> None:
        metrics, now = self._gateway.metrics, self._gateway.clock.now
        begun, first_s = now(), metrics.first_byte_s.of[path,]
        told = dict(reversed(headers))  # the first of a name counts
        client.on_first = lambda: first_s.observe(now() - begun)
        request_id = sane_id(told.get(b"x-request-id"), DICE.hex_id)
        try:
            key = self.keys.of(headers)
            self.admission.look(key, begun)
            key.running += 1
            try:
                await self._admitted(path, headers, told, key, request_id, client)
            finally:
                key.running -= 1
                self.admission.let_go(client.held_bytes)
        except GatewayError as error:
            if not client.gone:
                await client.whole(error.status, _error_head(error, request_id), error.body())
            let_go(error)
        except (ClientGone, BrokenBody) as left:
            log.debug("no answer request=%s why=%s", request_id, type(left).__name__)
            let_go(left)
        except Exception:
            log.exception("request failed request=%s", request_id)
            await self._apologise(client, request_id)
        finally:
            client.on_first = None  # it holds the client: together they would be garbage
            status = "gone" if client.gone else client.status or "gone"
            metrics.requests.of[path, status].inc()
            metrics.request_s.of[path,].observe(now() - begun)

    async def _admitted(
        self,
        path: str,
        headers: HeaderList,
        told: dict[bytes, bytes],
        key: Key,
        request_id: str,
        client: AsgiClient,
    ) -> None:
        """The body, what it asks, a place, the answer."""
        if b"content-encoding" in told and told[b"content-encoding"].lower() not in DECODABLE:
            raise GatewayError(
                "invalid_request", "content-encoding of a request is not supported", status=415
            )
        hold, limits = self.admission.hold, self._limits
        raw = client.body_here(limits.most_body_bytes, hold, key)
        if raw is None:
            raw = await client.body(limits, told.get(b"content-length", b""), hold, key)
        client.watch()
        try:
            if b"connection" in told or self.keys.guarded:
                headers = self.keys.onward(headers)
            make: Callable[..., Ask | Call] = _ask if path in COUNTS else read_call
            if len(raw) <= LONG_BYTES:
                wanted = make(path, raw, request_id, headers, key.salt)
            else:
                wanted = await asyncio.to_thread(make, path, raw, request_id, headers, key.salt)
            if not self.admission.enter_at_once():
                await self.admission.enter(key, client)
            try:
                if isinstance(wanted, Call):
                    await self._proxy.handle(wanted, client)
                else:
                    await self._gateway.handle(wanted, client)
            finally:
                self.admission.leave()
        finally:
            client.unwatch()

    async def _apologise(self, client: AsgiClient, request_id: str) -> None:
        """Something of ours broke: say so where an answer has not begun."""
        error = GatewayError("internal_error", f"the gateway failed; see its log, {request_id}")
        if not client.status and not client.gone:
            await client.whole(error.status, _error_head(error, request_id), error.body())


async def _wrong_method(path: str, scope: Scope, receive: Receive, send: Send) -> None:
    text = f"{path} takes POST, not {scope['method']}"
    error = GatewayError("invalid_request", text, status=405)
    client = AsgiClient(receive, send)
    await client.whole(405, [*error.head(), (b"allow", b"POST")], error.body())


def _ask(path: str, raw: bytes, request_id: str, headers: HeaderList, salt: str) -> Ask:
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
    named = any(name == b"x-request-id" for name, _ in head)
    return head if named else [*head, (b"x-request-id", request_id.encode())]

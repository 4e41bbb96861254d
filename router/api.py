"""API: the inference door of the gateway.

Door: bare ASGI on the hot path; everything that is no inference goes to the app of admin.py.
gateway.py does the work; errors.py has the shape of what goes wrong. Open it to change how a
request is read, admitted, or how an answer leaves.

    POST /v1/chat/completions | /v1/completions | /generate  -> Ask -> gateway.handle
    POST /v1/embeddings ...                                  -> proxy.py
    the rest                                                 -> admin.py
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from .dispatch import BrokenBody, ClientGone
from .errors import GatewayError
from .gateway import Gateway
from .legs_exchange import Bell
from .proxy import PROXIED, proxy
from .request import COUNTS, LONG_BYTES, parse, sane_id

log = logging.getLogger(__name__)

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
HeaderList = list[tuple[bytes, bytes]]

BODY_S = 120.0  # a whole request body must have come by then; a slow one blocks nobody else
DECODABLE = (b"", b"identity")  # content-encoding of a body we can splice


class AsgiClient:
    """The one who asked, as dispatch sees it."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.bell = Bell()
        self.gone = False
        self.status = 0  # of the answer that began to leave
        self.on_first: Callable[[], None] = lambda: None

    async def start(self, status: int, headers: HeaderList) -> None:
        """The head; it leaves with the first body bytes."""
        self.status = status
        self.on_first()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, more: bool) -> None:
        """Body bytes; waits while the client does not drain."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def whole(self, status: int, headers: HeaderList, body: bytes) -> None:
        """A complete answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.write(body, more=False)

    async def body(self, most_bytes: int, declared: bytes) -> bytes:
        """The request's body. Raises GatewayError 413 and 408, ClientGone."""
        if declared.isdigit() and int(declared) > most_bytes:
            raise _too_large(most_bytes)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    parts.append(part)
                    size += len(part)
                    if size > most_bytes:
                        raise _too_large(most_bytes)
                    if not message.get("more_body"):
                        return part if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            raise GatewayError(
                "request_timeout", f"the body did not come within {BODY_S:g} s"
            ) from None

    async def watch(self) -> None:
        """Until the client leaves; then wake whoever serves it."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.bell.ring()


class Api:
    """The gateway's whole HTTP app: `admin` answers what is no inference."""

    def __init__(self, gateway: Gateway, admin: Any) -> None:
        self._gateway, self._admin = gateway, admin
        self._running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        path = scope.get("path", "")
        if scope["type"] == "http" and scope["method"] == "POST" and _serves(path):
            await self._infer(path, scope, receive, send)
        else:
            await self._admin(scope, receive, send)

    async def _infer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        metrics, clock = self._gateway.metrics, self._gateway.clock
        begun = clock.now()
        client = AsgiClient(receive, send)
        client.on_first = lambda: metrics.first_byte_s.labels(path).observe(clock.now() - begun)
        headers = scope["headers"]
        request_id = sane_id(_header(headers, b"x-request-id"), lambda: secrets.token_hex(12))
        self._running += 1
        try:
            self._admit(headers)
            await self._answer(path, headers, request_id, client)
        except GatewayError as error:
            if not client.gone:
                await client.whole(error.status, _error_head(error, request_id), error.body())
        except (ClientGone, BrokenBody) as left:
            log.debug("no answer request=%s why=%s", request_id, type(left).__name__)
        except Exception:
            log.exception("request failed request=%s", request_id)
            await self._apologise(client, request_id)
        finally:
            self._running -= 1
            status = "gone" if client.gone else str(client.status or "gone")
            metrics.requests.labels(path, status).inc()
            metrics.request_s.labels(path).observe(clock.now() - begun)

    async def _answer(
        self, path: str, headers: HeaderList, request_id: str, client: AsgiClient
    ) -> None:
        coding = _header(headers, b"content-encoding") or b""
        if coding.lower() not in DECODABLE:
            raise GatewayError(
                "invalid_request", "content-encoding of a request is not supported", status=415
            )
        most = self._gateway.settings.most_body_bytes
        raw = await client.body(most, _header(headers, b"content-length") or b"")
        watcher = asyncio.create_task(client.watch())
        try:
            if path in PROXIED:
                await proxy(self._gateway, path, raw, headers, request_id, client)
            else:
                read = (path, raw, request_id, tuple(headers))
                long = len(raw) > LONG_BYTES
                ask = await asyncio.to_thread(parse, *read) if long else parse(*read)
                await self._gateway.handle(ask, client)
        finally:
            watcher.cancel()

    def _admit(self, headers: HeaderList) -> None:
        settings = self._gateway.settings
        if settings.api_key and not bearer(headers, settings.api_key):
            raise GatewayError(
                "invalid_api_key", "a valid API key is needed: Authorization: Bearer"
            )
        if 0 <= settings.most_requests < self._running:
            raise GatewayError(
                "overloaded", f"{settings.most_requests} requests are running", retry_after="1"
            )

    async def _apologise(self, client: AsgiClient, request_id: str) -> None:
        """Something of ours broke: say so where an answer has not begun."""
        error = GatewayError("internal_error", f"the gateway failed; see its log, {request_id}")
        if not client.status and not client.gone:
            await client.whole(error.status, _error_head(error, request_id), error.body())


def bearer(headers: HeaderList, key: str) -> bool:
    """Does the request carry this key? Compared in constant time."""
    given = _header(headers, b"authorization") or b""
    return hmac.compare_digest(given.removeprefix(b"Bearer ").strip(), key.encode())


def _serves(path: str) -> bool:
    return path in COUNTS or path in PROXIED


def _header(headers: HeaderList, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)


def _error_head(error: GatewayError, request_id: str) -> HeaderList:
    head = error.head()
    named = any(name == b"x-request-id" for name, _ in head)
    return head if named else [*head, (b"x-request-id", request_id.encode())]


def _too_large(most_bytes: int) -> GatewayError:
    return GatewayError("payload_too_large", f"the body is longer than {most_bytes} bytes")

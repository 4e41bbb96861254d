"""Instant: a gateway without sockets: its engines have answered before they are asked.

For what a request costs and leaves behind in the gateway itself, a million times if need be.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kit import gatehouse as kit
from kit.gatehouse import Gatehouse, gatehouse
from kit.peer import Call
from kvplane.router.api import Api
from kvplane.router.legs import Legs
from kvplane.router.legs_exchange import Bell, Exchange
from kvplane.router.legs_heads import Head
from kvplane.router.legs_wire import Origin
from kvplane.router.settings import RouterSettings

ANSWER = b'{"text":"x","meta_info":{"cached_tokens":0}}'
SCOPE = {
    "type": "http", "method": "POST", "path": "/generate", "headers": [], "client": ("::1", 1),
}  # fmt: skip


class Instant(Legs):
    """Every leg is complete when it begins; one whose body says `hold` never gets an answer."""

    def begin(
        self,
        origin: Origin,
        target: str,
        headers: Any = (),
        body: bytes = b"",
        bell: Bell | None = None,
        *more: Any,
        **named: Any,
    ) -> Exchange:
        leg = Exchange(origin, b"", body, self._settings, bell or Bell())
        if b'"hold"' in body:
            return leg
        leg.got_head(Head(200, [(b"content-type", b"application/json")]))
        leg.got_body(ANSWER)
        leg.finish()
        return leg


async def nobody(call: Call) -> None:
    raise AssertionError("engines are asked over no socket here")


@contextlib.asynccontextmanager
async def instant(
    monkeypatch: pytest.MonkeyPatch, settings: RouterSettings | None = None, **instead: Any
) -> AsyncIterator[tuple[Api, Gatehouse]]:
    """A prefill, a decode and the door. `instead`: other classes than the gatehouse's own."""
    with monkeypatch.context() as patch:
        for name, kind in {"Legs": Instant, **instead}.items():
            patch.setattr(kit, name, kind)
        told = settings or RouterSettings(tokenizer="builtin")
        made = gatehouse({"p1": nobody, "d1": nobody}, told)
        built = await made.__aenter__()
    try:
        yield Api(built.gateway, None), built
    finally:
        await made.__aexit__(None, None, None)


def body(first: int = 40, tokens: int = 80, **more: Any) -> bytes:
    """Tokens that begin with their own number."""
    return json.dumps({"input_ids": [first, *range(40, 39 + tokens)], **more}).encode()


async def ask(api: Api, sent: bytes) -> int:
    """One request through the door: its status. Where no answer comes (`hold`) the client leaves,
    and it is 0."""
    parts: list[dict[str, Any]] = [{"type": "http.request", "body": sent}]
    if b'"hold"' in sent:
        parts.insert(0, {"type": "http.disconnect"})
    status: list[int] = []

    async def receive() -> dict[str, Any]:
        return parts.pop() if parts else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        status.append(message.get("status", 0))

    await api(dict(SCOPE), receive, send)
    return status[0] if status else 0

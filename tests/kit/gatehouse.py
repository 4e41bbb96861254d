"""Gatehouse: a whole gateway on a real port over scripted engines, in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry

from kit.peer import Peer, Script, peer
from kvplane.doors import Server
from kvplane.index import View
from kvplane.router.admin import admin_app
from kvplane.router.api import Api
from kvplane.router.evidence import Ledger
from kvplane.router.fleet import Fleet
from kvplane.router.gateway import Gateway
from kvplane.router.legs import Legs
from kvplane.router.legs_settings import LegSettings
from kvplane.router.metrics import RouterMetrics
from kvplane.router.prompts import Prompts
from kvplane.router.settings import RouterSettings
from kvplane.runtime import SystemClock, running
from kvplane.vocabulary import Pod, Role, WorkerUp


@dataclass
class Gatehouse:
    """A running gateway and its engines."""

    gateway: Gateway
    view: View
    fleet: Fleet
    legs: Legs
    ledger: Ledger
    url: str
    session: aiohttp.ClientSession
    registry: CollectorRegistry
    engines: dict[str, Peer] = field(default_factory=dict)

    async def post(
        self, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers by lower-case name) of one POST; bytes are sent as they are."""
        sent = {"data": BytesIO(body)} if isinstance(body, bytes) else {"json": body}
        async with self.session.post(self.url + path, headers=headers, **sent) as answer:
            found = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, await answer.read(), found

    async def get(self, path: str) -> tuple[int, Any]:
        """(status, JSON or text)."""
        async with self.session.get(self.url + path) as answer:
            if answer.content_type == "application/json":
                return answer.status, await answer.json()
            return answer.status, await answer.text()

    def count(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where it was never counted."""
        return self.registry.get_sample_value(f"kvplane_router_{name}", labels) or 0.0

    @property
    def idle(self) -> bool:
        """Nothing is booked, open, or under way."""
        targets = self.fleet.targets()
        return (
            not any(target.inflight_requests or target.inflight_tokens for target in targets)
            and self.legs.live == 0
            and self.ledger.open_rooms == 0
            and self.gateway.aftermath.pending == 0
        )


def worker(name: str, url: str, role: Role, **facts: Any) -> WorkerUp:
    """A worker of an engine that tells no rooms."""
    facts = {"engine": "sglang", "model": "tiny", "block_size": 16} | facts
    return WorkerUp(pod=Pod(name), url=url, role=role, **facts)


@contextlib.asynccontextmanager
async def gatehouse(
    scripts: dict[str, Script],
    settings: RouterSettings | None = None,
    leg_settings: LegSettings | None = None,
    facts: dict[str, dict[str, Any]] | None = None,
    **admin: Any,
) -> AsyncIterator[Gatehouse]:
    """Engines by name: p* are prefills, d* decodes, u* unified. All are up."""
    settings, clock, registry = settings or RouterSettings(), SystemClock(), CollectorRegistry()
    roles = {"p": Role.PREFILL, "d": Role.DECODE, "u": Role.BOTH}
    view, fleet, ledger = View(), Fleet(settings.fleet), Ledger(clock)
    prompts = Prompts(settings.prompts, default=settings.tokenizer)
    legs = Legs(leg_settings, clock)
    metrics = RouterMetrics(registry)
    gateway = Gateway(view, fleet, prompts, legs, ledger, metrics, settings, clock)
    api = Api(gateway, admin_app(gateway, **admin))
    server = Server(api, "127.0.0.1", 0, "gateway", direct=api.direct())
    async with contextlib.AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(peer(script)) for name, script in scripts.items()
        }
        for name, engine in engines.items():
            more = (facts or {}).get(name, {})
            fleet.up(worker(name, engine.url, roles[name[0]], **more))
        await stack.enter_async_context(running([prompts, legs, gateway, server]))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        url = f"http://127.0.0.1:{server.port}"
        yield Gatehouse(gateway, view, fleet, legs, ledger, url, session, registry, engines)

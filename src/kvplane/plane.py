"""Plane: gateway, index and ingest, each a Part of parts in the order in which one needs the other.

Edge of the roof; the adapters are in parts.py, wiring.py chooses. Open it to change what a process
is made of.

    GatewayPlane    store -> Follower -> View -> Gateway <- Static (-> Subscriptions -> store)
    IndexPlane      store -> Follower -> View -> index app
    IngestPlane     Static -> Subscriptions -> store
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from kvplane.bootstrap import BootstrapClient
from kvplane.composite import Composite
from kvplane.cycle import Direct
from kvplane.documents import with_index
from kvplane.doors import Metrics, Server, Switchboard, new_registry
from kvplane.events import EventsMetrics, Subscriptions, routes
from kvplane.index import Chains, Follower, IndexMetrics, Store, StoreDown, View, index_app
from kvplane.parts import (
    Hall,
    broadcast_of,
    chains_of,
    probe_settings,
    prompt_settings,
    router_settings,
    store_of,
    tokenizing,
    with_block_size,
)
from kvplane.router import (
    Api,
    Departures,
    Directories,
    EngineTokens,
    Fleet,
    Gateway,
    Ledger,
    Legs,
    LegSettings,
    Prompts,
    RecallState,
    RouterMetrics,
    RouterSettings,
    SelfCheck,
    Static,
    TokensState,
    admin_app,
    dashboard_app,
)
from kvplane.runtime import SystemClock
from kvplane.settings import Settings
from kvplane.showing import show
from kvplane.signing import credentials_of, signed
from kvplane.vocabulary import WorkerUp
from kvplane.workers import worker_from_table

log = logging.getLogger(__name__)


class GatewayPlane(Composite):
    """A gateway with its own view; without a shared store it also follows the engines itself."""

    def __init__(self, told: Settings, workers: Sequence[WorkerUp], port: int) -> None:
        super().__init__()
        self._told, self._port = told, port
        self._workers = with_block_size(workers, told["block_size"])
        self._clock, self._registry = SystemClock(), new_registry()

    async def build(self) -> None:
        """Store, view, gateway, then the engines, then the door."""
        settings, store, view = (
            router_settings(self._told),
            store_of(self._told, self._clock, writes=False),
            View(),
        )
        self.closing(store)
        await _look_at(store)
        metrics = IndexMetrics(self._registry)
        follower = Follower(store, view, self._clock, metrics)
        prompts = Prompts(settings.prompts, settings.tokenizer)
        await self.begin(follower, prompts)
        chains = _remembered(self._told, prompts, metrics)
        gateway = await self._gateway(settings, view, prompts, follower, chains)
        gateway.fit, gateway.refuses = store.fit, store.refuses
        await show(gateway, self._told, self._clock, self)
        desk = await self._engines(gateway, prompts, store)
        index = index_app(
            view,
            follower,
            fleet=gateway.fleet.pods,
            tokenize=tokenizing(prompts),
            metrics=metrics,
            clock=self._clock,
            chains=chains,
            doubts=gateway.doubts.told,
        )
        changes = broadcast_of(self._told, store, self._clock, self._registry)
        index.router.routes.extend(routes(changes, "/index/snapshot"))
        api = Api(gateway, with_index(admin_app(gateway, desk, worker_from_table), index))
        queued = api.admission.places
        page = dashboard_app(gateway, desk, follower.lag_ms, lambda: queued.waiting)
        direct = {**api.direct(), b"/index/rank": index.desk.direct}
        await self._open({"": api, "/index": index, "/dashboard": page}, direct)
        await self.begin(changes, page.board)  # their readers go before the port is closed
        _tell(self._workers, "every request is answered 503 until POST /workers adds one")

    async def _open(self, apps: dict[str, Any], direct: Mapping[bytes, Direct]) -> None:
        """The gateway's port, and one for metrics where it is wanted."""
        told, metered = self._told, Metrics(self._registry)
        if told.values.get("prometheus_port") is not None:
            await self.begin(Server(metered, told["host"], told["prometheus_port"], "metrics"))
        door, most_head = Switchboard({**apps, "/metrics": metered}), told["max_header_size"]
        server = Server(door, told["host"], self._port, "gateway", None, most_head, direct)
        await self.begin(server)

    async def _gateway(
        self,
        settings: RouterSettings,
        view: View,
        prompts: Prompts,
        follower: Follower,
        chains: Chains,
    ) -> Gateway:
        clock, fleet = self._clock, Fleet(settings.fleet)
        keys = credentials_of(self._told, self._workers)
        limits = LegSettings(head_s=settings.first_byte_s, total_s=settings.request_timeout_s)
        legs = Legs(limits, clock, None, keys)
        ledger, metrics = Ledger(clock, settings.rooms_kept), RouterMetrics(self._registry)
        gateway = Gateway(
            view, fleet, prompts, legs, ledger, metrics, settings, clock, follower, chains=chains
        )
        metrics.watch(fleet, gateway.breakers, clock.now, lambda: ledger.open_rooms)
        key = settings.admission.api_key
        source = EngineTokens(fleet, legs, clock, settings.source, key)
        checks = SelfCheck(fleet, prompts, source, clock, settings.self_check)
        prompts.source, gateway.doubts.tokens = source, checks
        self._registry.register(TokensState(source, checks))
        await self.begin(legs, gateway, checks)
        return gateway

    async def _engines(self, gateway: Gateway, prompts: Prompts, store: Store) -> Departures:
        subscriptions = None
        if self._told.values.get("redis") is None:
            subscriptions = Subscriptions(store, self._clock, EventsMetrics(self._registry))
            await self.begin(subscriptions)
        session = await self.session()
        directories = None
        if self._told["watch_directories"]:
            directories = self._directories(gateway, session)
            await self.begin(directories)
        hall = Hall(self._clock, gateway, prompts, subscriptions, directories)
        static = Static(
            self._workers,
            signed(session, gateway.legs.credentials),
            self._clock,
            hall.up,
            hall.down,
            hall.health,
            gateway.settings.probe,
        )
        gateway.fleet.waiting = static.waiting
        desk = Departures(
            static,
            gateway.fleet,
            self._clock,
            gateway.settings.drain_s,
            gateway.legs.credentials,
        )
        await self.begin(static, desk)
        return desk

    def _directories(self, gateway: Gateway, session: aiohttp.ClientSession) -> Directories:
        return Directories(
            BootstrapClient(session, clock=self._clock),
            gateway.fleet,
            self._clock,
            gateway.settings.watch,
            lambda outcome: gateway.metrics.looks.labels(outcome).inc(),
        )


class IndexPlane(Composite):
    """Query and change API over a shared store."""

    def __init__(self, told: Settings) -> None:
        super().__init__()
        self._told = told

    async def build(self) -> None:
        """Store, view, then the door."""
        told, clock, registry = self._told, SystemClock(), new_registry()
        store, view = store_of(told, clock, writes=False), View()
        metrics = IndexMetrics(registry)
        self.closing(store)
        await _look_at(store)
        follower = Follower(store, view, clock, metrics)
        prompts = Prompts(prompt_settings(told), told["tokenizer"])
        changes = broadcast_of(told, store, clock, registry)
        await self.begin(follower, prompts)
        for one in told.workers:  # their tokenizers, and whose ways with chats count
            prompts.learn(one.model, one.tokenizer, one.engine, one.pod, one.adapters)
        tokenizers = told["tokenizer"] or any(one.tokenizer for one in told.workers)
        app = index_app(
            view,
            follower,
            fleet=lambda: told.workers,
            tokenize=tokenizing(prompts) if tokenizers else None,
            metrics=metrics,
            clock=clock,
            chains=_remembered(told, prompts, metrics),
        )
        app.router.routes.extend(routes(changes))
        # Under /index too, so that whatever asks a gateway's index can ask this one.
        door = Switchboard({"/metrics": Metrics(registry), "/index": app, "": app})
        direct = dict.fromkeys((b"/rank", b"/index/rank"), app.desk.direct)
        server = Server(door, told["host"], told["port"], "index", direct=direct)
        await self.begin(server, changes)


class IngestPlane(Composite):
    """Engines' events into a shared store."""

    def __init__(self, told: Settings) -> None:
        super().__init__()
        self._told = told

    async def build(self) -> None:
        """Store, subscriptions, then the engines."""
        told, clock, registry = self._told, SystemClock(), new_registry()
        store = store_of(told, clock, writes=True)
        self.closing(store)
        await _look_at(store)
        subscriptions = Subscriptions(store, clock, EventsMetrics(registry))
        hall = Hall(clock, subscriptions=subscriptions)
        workers = with_block_size(told.workers, told["block_size"])
        static = Static(
            workers,
            signed(await self.session(), credentials_of(told, workers)),
            clock,
            hall.up,
            hall.down,
            settings=probe_settings(told),
        )
        await self.begin(subscriptions, static)
        if told["prometheus_port"] is not None:
            door = Switchboard({"": Metrics(registry)})
            await self.begin(Server(door, told["host"], told["prometheus_port"], "ingest"))
        _tell(workers, "no events to ingest")


def _remembered(told: Settings, prompts: Prompts, metrics: IndexMetrics) -> Chains:
    """Where names are remembered; a scrape shows them, and the prompts'."""
    chains = chains_of(told)
    metrics.watch_chains(chains)
    metrics.registry.register(RecallState(prompts.recall))
    return chains


async def _look_at(store: Store) -> None:
    """A store that is down may come back; one that is unfit, or was made otherwise, ends the
    process: raises."""
    try:
        await store.fit()
    except StoreDown as error:
        log.warning("store down why=%s action=go on, try again", error)


def _tell(workers: Sequence[WorkerUp], without: str) -> None:
    """Say whom this process follows, and what it means to follow nobody."""
    if workers:
        log.info("following workers=%d: %s", len(workers), " ".join(w.pod for w in workers))
    else:
        log.warning("no workers: %s; name some with --prefill, --decode or [[workers]]", without)

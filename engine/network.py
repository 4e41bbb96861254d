"""Network: the ways of an engine to other engines.

Edge. Builds transfer/ and bootstrap/ for the role: a prefill offers and registers, a decode pulls
and resolves, `both` needs nobody. Open it to change which backend moves pages.

    prefill   backend + Offers per dp rank, Registrar of all
    decode    backend + Puller per dp rank, one Resolver for all
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

import aiohttp

from kvplane.bootstrap import BootstrapClient, Resolver
from kvplane.runtime import Clock, cancel, supervise
from kvplane.transfer import (
    BACKENDS,
    Layout,
    Offers,
    Puller,
    Region,
    TransferMetrics,
    TransferSettings,
)
from kvplane.vocabulary import Generation, Role, Shape, StageRecord

from .faults import DisturbedResolver, Faults
from .metrics import EngineMetrics
from .model import PAGE_TOKENS, REVISION, Size
from .registration import DTYPE, LAYOUT, Registered, Registrar
from .settings import EngineSettings
from .unit import Unit

BACKEND = "tcp"


class Network:
    """Everything between this engine and others; empty for role both."""

    def __init__(
        self,
        settings: EngineSettings,
        units: Sequence[Unit],
        generation: Generation,
        faults: Faults,
        record: Callable[[StageRecord], None],
        clock: Clock,
        metrics: EngineMetrics,
    ) -> None:
        self._settings, self._units, self._generation = settings, units, generation
        self._faults, self._record, self._clock = faults, record, clock
        self._metrics = metrics
        self._transfer = TransferSettings(
            checksums=settings.checksums, bootstrapping_s=settings.room_s
        )
        self._transfer_metrics = TransferMetrics(metrics.registry)
        self._layout = layout_of(settings.model)
        self._registrar: Registrar | None = None
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Open what the role needs; undone by stop, also when this raises."""
        if self._settings.role is Role.BOTH:
            return
        session = aiohttp.ClientSession()
        self._stack.push_async_callback(session.close)
        client = BootstrapClient(session)
        for unit in self._units:
            unit.backend = BACKENDS[BACKEND](self._transfer, self._transfer_metrics)
            self._stack.push_async_callback(unit.backend.stop)
            parts = [part for memory in unit.pool for part in memory.reshape(-1, *memory.shape[2:])]
            regions = [Region.of(part) for part in parts]
            await unit.backend.start(self._settings.advertised, regions, self._settings.host)
        if self._settings.role is Role.PREFILL:
            await self._offer(client)
        else:
            resolver = Resolver(client, self._clock)
            self._stack.push_async_callback(resolver.close)
            self._pull(resolver)

    async def stop(self) -> None:
        """Close it all, last opened first."""
        await self._stack.aclose()

    def registered(self, dp_rank: int) -> Registered:
        """Can decodes find this rank?"""
        assert self._registrar is not None, "only a prefill registers"
        return self._registrar.rank(dp_rank)

    def not_ready(self) -> str | None:
        """Why a prefill cannot be found yet."""
        if self._registrar is None or self._registrar.ready.is_set():
            return None
        ranks = (self._registrar.rank(unit.dp_rank) for unit in self._units)
        return next((rank.detail for rank in ranks if not rank.ok), "registering")

    async def _offer(self, client: BootstrapClient) -> None:
        ports: dict[int, int] = {}
        for unit in self._units:
            assert unit.backend is not None
            unit.offers = Offers(
                unit.backend, self._layout, self._generation, self._record, self._clock,
                self._transfer, self._transfer_metrics, self._faults, self._settings.known_as,
            )  # fmt: skip
            self._stack.push_async_callback(unit.offers.close)
            ports[unit.dp_rank] = await unit.offers.start(self._settings.host)
        self._registrar = Registrar(
            client, ports, self._generation, self._settings, self._clock, self._metrics
        )
        keeping = asyncio.create_task(supervise("register", self._registrar.keep, self._clock))
        self._stack.push_async_callback(cancel, keeping)

    def _pull(self, inner: Resolver) -> None:
        resolver = DisturbedResolver(inner, self._faults)
        shape = Shape(dp=self._settings.dp, page_size=PAGE_TOKENS, kv_dtype=DTYPE, kv_layout=LAYOUT)
        for unit in self._units:
            assert unit.backend is not None
            unit.puller = Puller(
                unit.backend, self._layout, resolver, self._generation, self._record, self._clock,
                self._transfer, self._transfer_metrics, shape, self._settings.known_as,
            )  # fmt: skip
            self._stack.push_async_callback(unit.puller.close)


def layout_of(model: str) -> Layout:
    """How this engine stores KV; peers compare it before a byte moves."""
    size = Size()
    return Layout(
        model, PAGE_TOKENS, DTYPE, size.layers, size.kv_heads, size.head_dim, size.page_bytes,
        order="kv,head,page,token,dim", revision=REVISION,
    )  # fmt: skip

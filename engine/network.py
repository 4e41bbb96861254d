"""Network: the ways of an engine to other engines.

Edge. Builds transfer/ and bootstrap/ for the role: a prefill offers and registers, a decode pulls
and resolves, `both` needs nobody. Open it to change how a rank is connected.

    prefill   per rank a backend and Offers, per dp rank a Team, one Registrar
    decode    per rank a backend and a Puller, per dp rank a Team, one Resolver and its Heartbeat
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import replace

from kvplane.bootstrap import (
    Address,
    BootstrapClient,
    BootstrapMetrics,
    Heartbeat,
    Resolver,
    fresh_session,
)
from kvplane.runtime import Clock, cancel, supervise
from kvplane.transfer import (
    BACKENDS,
    Layout,
    Offers,
    Puller,
    TransferMetrics,
    TransferSettings,
)
from kvplane.vocabulary import Generation, Role, Room, Shape, StageRecord

from .cells import Cell
from .faults import DisturbedResolver, Faults
from .metrics import EngineMetrics
from .model import PAGE_TOKENS, REVISION, Size
from .ranks import Rank, regions
from .registration import DTYPE, LAYOUT, Registered, Registrar
from .settings import EngineSettings
from .stages import Stages
from .team import Team
from .unit import Unit


class Network:
    """Everything between this engine and others; empty for role both."""

    def __init__(
        self,
        settings: EngineSettings,
        units: Sequence[Unit],
        faults: Faults,
        record: Callable[[StageRecord], None],
        clock: Clock,
        metrics: EngineMetrics,
        meeting: BootstrapMetrics,
        elsewhere: Callable[[Cell], Registered] | None = None,  # ranks of other nodes
    ) -> None:
        self._settings, self._units, self._elsewhere = settings, units, elsewhere
        self._faults, self._record, self._clock = faults, record, clock
        self._metrics, self._meeting = metrics, meeting
        self._transfer = TransferSettings(
            checksums=settings.checksums,
            bootstrapping_s=settings.room_s,
            hold_every_s=min(5.0, settings.room_s / 5),
        )
        self._transfer_metrics = TransferMetrics(metrics.registry)
        self._layout = layout_of(settings.model)
        self._registrar: Registrar | None = None
        self.changed = asyncio.Event()  # of what is registered; who waits clears it
        self._stack = AsyncExitStack()

    async def start(
        self,
        generation: Generation,
        directory: Address | None = None,
        http_port: int | None = None,
    ) -> None:
        """Open what the role needs; undone by stop, also when this raises. May be started again.

        `directory` and `http_port`: of node 0, where that is another process.
        """
        if self._settings.role is Role.BOTH:
            return
        self._generation = generation
        session = fresh_session()
        self._stack.push_async_callback(session.close)
        client = BootstrapClient(session, key=self._settings.bootstrap_key)
        resolver = Resolver(client, self._clock, metrics=self._meeting)
        self._stack.push_async_callback(resolver.close)
        for unit in self._units:
            await self._team(unit, resolver)
        if self._settings.role is Role.PREFILL:
            await self._register(client, directory, http_port)
        else:
            await self._listen(resolver)

    async def stop(self) -> None:
        """Close it all, last opened first."""
        self._registrar = None
        await self._stack.aclose()

    async def _listen(self, resolver: Resolver) -> None:
        """A decode hears within seconds that a prefill died or was replaced."""
        session = fresh_session()
        self._stack.push_async_callback(session.close)
        client = BootstrapClient(session)
        heartbeat = Heartbeat(resolver, client, self._clock, metrics=self._meeting)
        resolver.watch(self._gone)
        self._stack.push_async_callback(heartbeat.stop)
        await heartbeat.start()

    def _gone(self, address: str, life: Generation | None, why: str) -> None:
        """The prefill there died or was replaced: what waits for it need not wait."""
        for unit in self._units:
            for rank in unit.team.ranks if unit.team is not None else ():
                if rank.puller is not None:
                    rank.puller.gone(address, life, why)

    def registered(self, dp_rank: int) -> Registered:
        """Can decodes find the ranks of this dp rank?"""
        assert self._registrar is not None, "only a prefill registers"
        return self._registrar.unit(dp_rank)

    def placed(self, room: Room, dp_rank: int) -> AbstractAsyncContextManager[None]:
        """While inside, the directory tells decodes which dp rank has this room."""
        assert self._registrar is not None, "only a prefill registers"
        return self._registrar.placed(room, dp_rank)

    def not_ready(self) -> str | None:
        """Why a prefill cannot be found yet."""
        if self._registrar is None:
            return None if self._settings.role is not Role.PREFILL else "not started"
        units = (self._registrar.unit(unit.dp_rank) for unit in self._units)
        return next((unit.detail for unit in units if not unit.ok), None)

    @property
    def registrar(self) -> Registrar | None:
        """Of the ranks of this process; None while there are none to register."""
        return self._registrar

    async def _team(self, unit: Unit, resolver: Resolver) -> None:
        """All ranks of one dp rank."""
        sizes = self._settings.sizes
        cells = self._settings.nodes.cells(unit.dp_rank)
        stages = Stages([sizes.name(cell) for cell in cells], self._record)
        ranks = []
        for cell in cells:
            rank = await self._rank(unit, cell)
            record = stages.of(rank.name)
            if self._settings.role is Role.PREFILL:
                await self._offer(rank, record)
            else:
                self._pull(rank, record, resolver)
            ranks.append(rank)
        unit.team = Team(ranks, stages)

    async def _rank(self, unit: Unit, cell: Cell) -> Rank:
        """Its memory, registered with a backend of its own."""
        settings = self._settings
        backend = BACKENDS[settings.backend](self._transfer, self._transfer_metrics)
        self._stack.push_async_callback(backend.stop)
        own = regions(unit.pool, self._layout, settings.sizes, cell)
        await backend.start(settings.advertised, own, settings.host)
        return Rank(cell, settings.sizes.name(cell), backend, tuple(part.name for part in own))

    async def _offer(self, rank: Rank, record: Callable[[StageRecord], None]) -> None:
        rank.offers = Offers(
            rank.backend, self._layout, self._generation, record, self._clock, self._transfer,
            self._transfer_metrics, self._faults.of(rank.name), self._settings.known_as,
        )  # fmt: skip
        self._stack.push_async_callback(rank.offers.close)
        rank.port = await rank.offers.start(self._settings.host)

    def _pull(self, rank: Rank, record: Callable[[StageRecord], None], resolver: Resolver) -> None:
        sizes = self._settings.sizes
        shape = Shape(
            tp=sizes.tp, pp=sizes.pp, dp=sizes.dp, page_size=PAGE_TOKENS, kv_dtype=DTYPE,
            kv_layout=LAYOUT,
        )  # fmt: skip
        rank.puller = Puller(
            rank.backend, self._layout, DisturbedResolver(resolver, self._faults.of(rank.name)),
            self._generation, record, self._clock, self._transfer, self._transfer_metrics, shape,
            self._settings.known_as, tp_rank=rank.cell.tp, pp_rank=rank.cell.pp,
        )  # fmt: skip
        self._stack.push_async_callback(rank.puller.close)

    async def _register(
        self, client: BootstrapClient, directory: Address | None, http_port: int | None
    ) -> None:
        teams = [unit.team for unit in self._units if unit.team is not None]
        ports = {rank.cell: rank.port for team in teams for rank in team.ranks}
        settings = self._settings
        if directory is not None:
            settings = replace(
                settings, bootstrap_host=directory.host, bootstrap_port=directory.port
            )
        self._registrar = Registrar(
            client, ports, self._generation, settings, self._clock, self._metrics,
            self._elsewhere, http_port, self.changed,
        )  # fmt: skip
        keeping = asyncio.create_task(supervise("register", self._registrar.keep, self._clock))
        self._stack.push_async_callback(cancel, keeping)


def layout_of(model: str) -> Layout:
    """How this engine stores KV, all ranks together; peers compare it before a byte moves."""
    size = Size()
    return Layout(
        model, PAGE_TOKENS, DTYPE, size.layers, size.kv_heads, size.head_dim, size.page_bytes,
        order="kv,head,page,token,dim", revision=REVISION,
    )  # fmt: skip

"""Engine: a tiny real engine, from its sockets to its pages.

Edge. Puts together what the other files are; the roof gives it a port (`app`) and, to a prefill, a
bootstrap server. Open it to change what an engine is made of, or which dp rank serves a request.

    start   events bound -> memory registered -> rank ports open -> ranks register (in background)
    stop    flows end -> offers and pulls end -> sockets close
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from kvplane.bootstrap import BootstrapMetrics
from kvplane.events import AllCleared
from kvplane.runtime import Clock
from kvplane.tokens import Tokenizer
from kvplane.vocabulary import Generation, Role, Room

from .admin import AdminRoutes
from .api import InferenceRoutes, application
from .asks import Ask, Call
from .body import Reader
from .both import Both
from .compute import Compute
from .decode import Decode
from .errors import BadRequest, NotReady, RoomFailed, Stopping
from .evidence import Evidence
from .facts import server_info
from .faults import Faults
from .flow import Flow
from .following import Following
from .handing import Handing
from .leading import Leading
from .metrics import EngineMetrics
from .model import Model
from .network import Network
from .prefill import Prefill
from .publisher import Publisher, free_range
from .sequence import Emit, Sequences
from .settings import FOLLOW, EngineSettings
from .team import Gives
from .unit import Unit

log = logging.getLogger(__name__)

_NO_ROOM = (  # SGLang's words: its gateways look for them
    "Invalid request: Disaggregated request received without bootstrap room id. "
    "bootstrap_room: must be 1 to 2**63-1"
)


class Engine:
    """One engine process; a Part. `app` is its HTTP door."""

    def __init__(
        self, settings: EngineSettings, clock: Clock, registry: CollectorRegistry | None = None
    ) -> None:
        if settings.role is not Role.BOTH:  # nobody fetches pages from a lone engine
            settings = settings.settled()
        self.settings = settings
        self.generation = Generation(f"{int(clock.wall() * 1000):x}-{secrets.token_hex(4)}")
        self.metrics = EngineMetrics(registry if registry is not None else CollectorRegistry())
        self._clock = clock
        self._compute = Compute(clock, self.metrics)
        self.evidence = Evidence(settings.rooms_kept, self.metrics)
        self.faults = Faults(settings.role, clock, self.metrics, settings.rank_names)
        model = Model(settings.model, positions=settings.context_length)
        self.units = [self._unit(rank, model) for rank in range(settings.dp)]
        meeting = BootstrapMetrics(self.metrics.registry)
        self._leading: Leading | None = None
        if settings.nnodes > 1 and settings.nodes.leads:
            self._leading = Leading(settings, self.generation, clock, meeting)
        self._network = Network(
            settings, self.units, self.faults, self.evidence.record, clock, self.metrics, meeting,
            self._leading.registered if self._leading else None,
        )  # fmt: skip
        self._following: Following | None = None
        self._roles(Tokenizer.load("builtin"), meeting)
        self._turn = itertools.count()
        self._flows: set[Flow] = set()
        self._rooms: set[Room] = set()
        self._stopping = self._started = False
        self._stack = AsyncExitStack()

    def _unit(self, rank: int, model: Model) -> Unit:
        s = self.settings
        voice = Publisher(s.event_form, rank, s.buffer_batches, self._clock, self.metrics)
        return Unit(rank, s, model, self._compute, voice, self.metrics)

    def _roles(self, tokenizer: Tokenizer, meeting: BootstrapMetrics) -> None:
        settings, faults, record = self.settings, self.faults, self.evidence.record
        sequences = Sequences(tokenizer, settings.slice_tokens, self.metrics)
        self._both = Both(sequences, faults)
        handing = Handing(sequences, settings.room_s)
        if not settings.nodes.leads:
            self._following = Following(
                settings, self.generation, self.units, self._network, handing, self._clock, meeting
            )
        self._prefill = Prefill(
            settings, handing, faults, self._network.registered, self._network.placed,
            self._begin, record, self._clock, tokenizer.decode,
        )  # fmt: skip
        self._decode = Decode(settings, sequences, faults, record, self._clock, self.metrics)
        reader = Reader(settings, tokenizer)
        inference = InferenceRoutes(self, reader, settings, self._clock)
        admin = AdminRoutes(
            self, self.units, reader, self.evidence, faults, settings, self.metrics.registry
        )
        self.app = application(inference.routes() + admin.routes())

    async def start(self) -> None:
        """Bind, register memory, open rank ports. Raises PortTaken; undoes itself on failure."""
        self._stack.callback(self._compute.stop)
        try:
            if self._following is None:
                await self._start_events()
            self._stack.push_async_callback(self._network.stop)
            for other in (self._leading, self._following):
                if other is not None:
                    self._stack.push_async_callback(other.stop)
                    await other.start()
            if self._following is None:
                await self._network.start(self.generation)
            self._stack.push_async_callback(self._end_flows)
        except BaseException:
            await self._stack.aclose()
            raise
        self._started = True
        log.info("engine up name=%s generation=%s", self.settings.known_as, self.generation)

    async def stop(self) -> None:
        """End every flow, close every socket. Never raises on purpose; bounded."""
        self._stopping = True
        await self._stack.aclose()

    async def _start_events(self) -> None:
        s = self.settings
        free = 0 if s.events_port and s.replay_port else free_range(s.host, 2 * s.dp)
        live, replay = s.events_port or free, s.replay_port or free + s.dp
        for unit in self.units:
            await unit.publisher.start(s.host, live + unit.dp_rank, replay + unit.dp_rank)
            self._stack.push_async_callback(unit.publisher.stop)
            if s.event_form == "sglang":  # a radix cache is born with a clear
                unit.publisher.publish([AllCleared()])

    async def _end_flows(self) -> None:
        """Tell every client, and see every sample gone."""
        for flow in list(self._flows):
            flow.fail(Stopping("the engine stops"))
        await asyncio.gather(*(flow.close() for flow in list(self._flows)))

    # what api.py and admin.py ask

    def admit(self, call: Call) -> None:
        """Raises BadRequest where this role cannot serve the call, before anything is begun."""
        if self._stopping or not self._started:
            raise Stopping("the engine does not serve now")
        if self._following is not None:
            raise NotReady(f"node {self.settings.node_rank} answers no requests: ask node 0")
        for ask in call.asks:
            self._pick(ask)
            if self.settings.role is Role.BOTH:
                continue
            if ask.room is None:
                raise BadRequest("bootstrap_room", _NO_ROOM)
            if ask.room in self._rooms:
                raise BadRequest("bootstrap_room", f"room {ask.room} is at work here already")
            if self.settings.role is Role.DECODE and (ask.host is None or ask.port is None):
                missing = "bootstrap_host" if ask.host is None else "bootstrap_port"
                raise BadRequest(missing, f"{missing}: a decode needs it to find the prefill")

    def begin(self, call: Call) -> Flow:
        """Set every sample to work."""
        turn = next(self._turn)
        flow = Flow(call, partial(self._sample, turn), self.metrics)
        self._flows.add(flow)
        return flow

    def end(self, flow: Flow) -> None:
        """It is closed."""
        self._flows.discard(flow)

    def abort(self, rid: str | None) -> int:
        """End the flows of one request id, or all; how many."""
        chosen = [flow for flow in self._flows if rid is None or flow.call.rid == rid]
        for flow in chosen:
            flow.abort()
        return len(chosen)

    def open_rooms(self) -> Sequence[Room]:
        """Rooms at work."""
        elsewhere = self._following.rooms if self._following else set()
        return sorted(self._rooms | elsewhere)

    def not_ready(self) -> str | None:
        """Why requests cannot be served now; None = they can."""
        if self._stopping or not self._started:
            return "not started" if not self._started else "stopping"
        return (self._following or self._network).not_ready()

    def facts(self) -> dict[str, Any]:
        """/server_info."""
        return server_info(self.settings, self.units, self.generation)

    async def _sample(self, turn: int, ask: Ask, emit: Emit) -> None:
        rank = self._pick(ask)
        unit = self.units[(turn + ask.index) % len(self.units) if rank is None else rank]
        if self.settings.role is Role.BOTH:
            await self._both.run(unit, ask, emit)
            return
        assert ask.room is not None, "admit checks"
        if ask.room in self._rooms:
            raise BadRequest("bootstrap_room", f"room {ask.room} is at work here already")
        self._rooms.add(ask.room)
        try:
            role = self._prefill if self.settings.role is Role.PREFILL else self._decode
            await role.run(unit, ask, emit)
        except RoomFailed as error:
            log.warning("room failed %s", error)
            raise
        finally:
            self._rooms.discard(ask.room)

    def _begin(self, ask: Ask, dp_rank: int, cached_tokens: int) -> Sequence[Gives]:
        """Other nodes that compute this prompt too."""
        return () if self._leading is None else self._leading.begin(ask, dp_rank, cached_tokens)

    def _pick(self, ask: Ask) -> int | None:
        """The dp rank that must serve this; None = any. Told, else by room."""
        size = self.settings.dp
        if ask.dp_rank is not None:
            if ask.dp_rank >= size:
                said = f"routed_dp_rank = {ask.dp_rank}: must be 0 to {size - 1}"
                raise BadRequest("routed_dp_rank", said)
            return ask.dp_rank
        in_turn = self.settings.role is Role.PREFILL and self.settings.load_balance != FOLLOW
        return None if ask.room is None or in_turn else ask.room % size

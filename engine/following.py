"""Following: any process of a prefill but the first; it does what node 0 asks for.

Edge, over bootstrap's rendezvous. It has no requests of its own: node 0 hands it every prompt, it
computes it too, and its ranks deliver what they own. Open it to change what a node does when it
joins, or when node 0 goes.

    join -> node 0 asks for ranks -> network up: ports open, ranks register at node 0's directory
    node 0 gone     rooms fail at once; ranks stay, and so they do when the same life is back
    another life    network down and up again, under its generation
    not welcome     network down for good: another process is in our place, or cut another way
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvplane.bootstrap import (
    Address,
    BootstrapMetrics,
    Member,
    Node,
    NotWelcome,
    RendezvousSettings,
)
from kvplane.runtime import Clock, cancel, supervise
from kvplane.vocabulary import Generation, Room, Stage

from .errors import EngineError, RoomFailed
from .handing import Handing
from .network import Network
from .questions import TOLD_S, Ranks, RanksAsked, RoomAsked, RoomTold, encode, question
from .settings import EngineSettings
from .unit import Unit

log = logging.getLogger(__name__)

FOR_EVER_S = 10.0**7  # node 0 may come much later; /health says that it has not
Wanted = tuple[Generation, Address, int]  # life, directory and HTTP port of node 0


class Following:
    """One node."""

    def __init__(
        self,
        settings: EngineSettings,
        generation: Generation,
        units: Sequence[Unit],
        network: Network,
        handing: Handing,
        clock: Clock,
        metrics: BootstrapMetrics,
    ) -> None:
        self._units, self._network, self._handing = units, network, handing
        self._clock = clock
        self._node = Node(
            Address.parse(settings.dist_init_addr or ""),
            Member(settings.node_rank, settings.nnodes, generation, settings.facts),
            self._answer, clock, RendezvousSettings(silent_s=settings.node_silent_s), metrics,
            settings.bootstrap_key,
        )  # fmt: skip
        self._name = settings.nodes.name(settings.node_rank)
        self._wanted: Wanted | None = None
        self._up: Wanted | None = None
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.rooms: set[Room] = set()  # at work

    async def start(self) -> None:
        """Begin to look for node 0; does not wait for it."""
        self._tasks = [
            asyncio.create_task(self._stay()),
            asyncio.create_task(supervise("follow", self._keep_up, self._clock)),
        ]

    async def stop(self) -> None:
        """Leave; rooms end. The network is the engine's to stop."""
        await self._node.stop()
        await cancel(*self._tasks)

    def not_ready(self) -> str | None:
        """Why this node cannot do its part now."""
        if self._node.announced is None:
            return f"{self._name}: {self._node.why}"
        return self._network.not_ready()

    async def _stay(self) -> None:
        """In touch with node 0 until it will not have us."""
        try:
            await self._node.join(FOR_EVER_S)
            await self._node.ended()
        except NotWelcome as error:
            log.error("node is not welcome name=%s error=%s action=close ranks", self._name, error)
            self._wanted = None
            self._wake.set()

    async def _keep_up(self) -> None:
        """The network as node 0's present life wants it."""
        while True:
            self._wake.clear()
            wanted = self._wanted
            if wanted != self._up:
                self._up = None
                await self._network.stop()
                if wanted is not None:
                    await self._network.start(*wanted)
                self._up = wanted
                self._network.changed.set()
            else:
                await self._wake.wait()

    async def _answer(self, body: bytes) -> bytes:
        """Whatever node 0 asks."""
        asked = question(body)
        if isinstance(asked, RoomAsked):
            return encode(await self._room(asked))
        return encode(await self._ranks(asked))

    async def _ranks(self, asked: RanksAsked) -> Ranks:
        told = self._node.announced
        if told is not None:
            directory = Address(told.bootstrap_host, told.bootstrap_port)
            self._wanted = (told.generation, directory, asked.http_port)
            self._wake.set()
        try:
            async with asyncio.timeout(TOLD_S):
                while (found := self._registered()) == asked.known:
                    self._network.changed.clear()
                    await self._network.changed.wait()
        except TimeoutError:
            pass
        return found

    def _registered(self) -> Ranks:
        registrar = self._network.registrar
        if self._up is None or self._up != self._wanted or registrar is None:
            return Ranks(why="ports are not open yet")
        there = [cell for cell in registrar.cells if registrar.rank(cell).ok]
        out = [cell for cell in registrar.cells if not registrar.rank(cell).ok]
        why = registrar.rank(out[0]).detail if out else ""
        return Ranks(there=tuple((cell.dp, cell.pp, cell.tp) for cell in there), why=why)

    async def _room(self, asked: RoomAsked) -> RoomTold:
        """Our part of one room. Cancelled where node 0 gave it up, or is gone."""
        room, unit = Room(asked.room), self._units[asked.dp]
        if unit.team is None:
            return RoomTold(stage=Stage.REGISTER.value, reason="ports are not open yet")
        self.rooms.add(room)
        try:
            token, _ = await self._handing.run(
                unit, room, asked.ids, asked.salt, cached_tokens=asked.cached_tokens
            )
            return RoomTold(first_token=token)
        except asyncio.CancelledError:
            unit.team.fail(room, "node 0 gave the room up, or is gone")
            raise
        except Exception as error:
            reason = str(error) or type(error).__name__
            unit.team.fail(room, reason)
            if isinstance(error, RoomFailed):
                return RoomTold(stage=error.stage.value, reason=error.reason)
            if isinstance(error, EngineError):
                return RoomTold(stage=Stage.VERIFY.value, reason=reason)
            raise  # ours to mend; the link logs it and tells node 0
        finally:
            self.rooms.discard(room)

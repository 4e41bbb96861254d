"""Leading: node 0 of a prefill whose ranks run in several processes.

Edge, over bootstrap's rendezvous. Knows which nodes are in and which of their ranks decodes can
find; prefill.py gets a Part of each room for every other node, which team.py treats like a rank.
Open it to change what is told of a node that is late, lost or restarted.

    has not joined -> joined, not registered -> serves        is gone: its rooms fail by its name
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvplane.bootstrap import (
    Address,
    Announced,
    BootstrapError,
    BootstrapMetrics,
    Leader,
    NodeState,
    RendezvousSettings,
)
from kvplane.runtime import Clock, cancel
from kvplane.transfer import Metadata, TransferSettings
from kvplane.vocabulary import Generation, Room, Stage, StageRecord

from .asks import Ask
from .cells import Cell
from .errors import PortTaken, RoomFailed
from .questions import TOLD_S, Ranks, RanksAsked, RoomAsked, encode, ranks, room_told
from .registration import Registered
from .settings import EngineSettings

log = logging.getLogger(__name__)

AGAIN_S = 0.2  # a node that could not tell of its ranks is asked again


class Leading:
    """Start it when the rank directory is up, before ranks register."""

    def __init__(
        self,
        settings: EngineSettings,
        generation: Generation,
        clock: Clock,
        metrics: BootstrapMetrics,
    ) -> None:
        self._settings, self._clock = settings, clock
        self._nodes = settings.nodes
        self._at = Address.parse(settings.dist_init_addr or "")
        told = Announced(generation, settings.advertised, settings.bootstrap_port, settings.facts)
        self._leader = Leader(
            self._at, settings.nnodes, told, clock,
            RendezvousSettings(silent_s=settings.node_silent_s, open_joins=settings.open_writes),
            metrics, settings.bootstrap_key,
        )  # fmt: skip
        self._known: dict[int, Ranks] = {}  # of nodes that are in
        self._asking: dict[int, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Let nodes in. Raises PortTaken."""
        self._leader.watch(self._changed)
        try:
            await self._leader.start()
        except OSError as error:
            raise PortTaken(str(error)) from error

    async def stop(self) -> None:
        """All nodes go on dialling."""
        await cancel(*self._asking.values())
        await self._leader.stop()

    def registered(self, cell: Cell) -> Registered:
        """Can decodes find this rank of another node?"""
        node = self._nodes.node_of(cell)
        known = self._known.get(node)
        there = known is not None and (cell.dp, cell.pp, cell.tp) in known.there
        return Registered(there, 0.0, self._sentence(node))

    def begin(self, ask: Ask, dp: int, cached_tokens: int) -> Sequence[Part]:
        """Every other node computes this prompt and delivers its part, from now on."""
        assert ask.room is not None, "a prefill has rooms"
        body = encode(
            RoomAsked(
                room=ask.room, dp=dp, ids=ask.ids, salt=ask.salt, cached_tokens=cached_tokens
            )
        )  # fmt: skip
        by = self._settings.known_as
        return [
            Part(self._nodes.name(node), self._ask(node, body), self._clock, by)
            for node in self._nodes.others
        ]

    def _ask(self, node: int, body: bytes) -> asyncio.Task[bytes]:
        most_s = self._settings.queue_s + self._settings.room_s + TransferSettings().most_hold_s
        return asyncio.create_task(self._leader.ask(node, body, most_s))

    def _changed(self, state: NodeState) -> None:
        """A node joined, restarted or was lost; the rendezvous logs and counts it."""
        self._known.pop(state.rank, None)
        asking = self._asking.pop(state.rank, None)
        if asking is not None:
            asking.cancel()
        if state.state == "joined":
            self._asking[state.rank] = asyncio.create_task(self._follow(state))

    async def _follow(self, state: NodeState) -> None:
        """Keep knowing which of its ranks are registered, until the node is lost."""
        node, port, known = state.rank, self._settings.port, Ranks()
        while True:
            asked = encode(RanksAsked(http_port=port, known=known))
            try:
                known = ranks(await self._leader.ask(node, asked, 3 * TOLD_S, state.generation))
            except (BootstrapError, ValueError) as error:
                known = Ranks(why=str(error))
                await self._clock.sleep(AGAIN_S)
            if known != self._known.get(node):
                log.info("ranks of %s registered=%d", self._nodes.name(node), len(known.there))
            self._known[node] = known

    def _sentence(self, node: int) -> str:
        """What is the matter with a node."""
        name, state = self._nodes.name(node), self._leader.states()[node]
        if state.state == "absent":
            return f"{name} has not joined at {self._at} yet"
        if state.state == "lost":
            return f"{name} is gone: {state.why}"
        known = self._known.get(node, Ranks())
        came = "restarted" if state.lives > 1 else "joined"
        return f"{name} {came}, ranks are not registered yet" + (f": {known.why}" * bool(known.why))


class Part:
    """What another node does for one room; a Gives of team.py."""

    def __init__(self, name: str, work: asyncio.Task[bytes], clock: Clock, by: str) -> None:
        self.name = name
        self._work, self._clock, self._by = work, clock, by
        self._began = clock.now()
        work.add_done_callback(_seen)

    async def deliver(
        self, room: Room, pages: Sequence[int], said: Metadata, deadline_s: float
    ) -> None:
        """Return when its ranks' decodes agreed. Raises RoomFailed that names it."""
        try:
            told = room_told(await self._work)
        except (BootstrapError, ValueError) as error:
            reason = f"{self.name}: {getattr(error, 'why', error)}"
            raise RoomFailed(room, Stage.VERIFY, reason) from error
        if told.stage:
            stage = Stage(told.stage) if told.stage in set(Stage) else Stage.VERIFY
            raise RoomFailed(room, stage, f"{self.name}: {told.reason}")
        if told.first_token != said.first_token:
            reason = f"{self.name}: first token {told.first_token}, node 0: {said.first_token}"
            raise RoomFailed(room, Stage.VERIFY, reason)

    def fail(self, room: Room, reason: str) -> None:
        """It need not go on; its ranks tell their decodes."""
        self._work.cancel()

    def seen(self, room: Room, error: BaseException) -> StageRecord | None:
        """Its failure as evidence: what it saw itself lies there."""
        if not isinstance(error, RoomFailed):
            return None
        took = self._clock.now() - self._began
        at = self._clock.wall()
        return StageRecord(room, error.stage, "failed", took, error.reason, self._by, at)


def _seen(work: asyncio.Task[bytes]) -> None:
    """Its failure is known, also where nobody waits for it any more."""
    if not work.cancelled():
        work.exception()

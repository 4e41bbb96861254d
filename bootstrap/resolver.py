"""Resolver: from an address to the ranks behind it, asked no more often than needed.

Edge, decode side, over client.py; transfer/ asks it for every room, heartbeat.py for all that is
in use. Open it to change what is asked or how long an answer is believed.

One call is outstanding per address and question, whoever waits for it. An answer is reused for
`fresh_s` only; every one tells which life gave it, and another life drops everything of its
address (instances.py). A failure is repeated from memory until its wait is over (standing.py).
Addresses are whole texts: h:9998 is not h:99980.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kvplane.runtime import Clock, SystemClock
from kvplane.vocabulary import Generation, Room, Stage

from .client import BootstrapClient, Endpoint, RoomRanks
from .errors import BootstrapError, NewLife
from .flights import Flights
from .instances import Instances, Listener, Record, Resolved
from .lives import Rank
from .metrics import BootstrapMetrics
from .roomline import RoomLine
from .settings import ResolverSettings
from .standing import AddressState


class Resolver:
    """Single flight, short memory, backoff after failures. Call `close` at the end."""

    def __init__(
        self,
        client: BootstrapClient,
        clock: Clock | None = None,
        settings: ResolverSettings | None = None,
        metrics: BootstrapMetrics | None = None,
    ) -> None:
        self._client, self._clock = client, clock or SystemClock()
        self._settings = settings or ResolverSettings()
        self._flights = Flights()
        self._known = Instances(
            self._line, self._flights.leave, self._clock, self._settings, metrics
        )

    async def topology(self, address: str) -> Resolved:
        """What the instance behind `address` looks like now.

        Raises a BootstrapError whose `stage` names the step: register while ranks are missing.
        """
        record = self._known.use(address)
        if record.resolved is not None and self._fresh(record.resolved.checked_at):
            return record.resolved
        record.standing.hold_back(self._clock.now())
        return await self._topology(record)

    async def endpoint(
        self,
        address: str,
        dp: int,
        cp: int,
        tp: int,
        pp: int,
        expected: Generation | None = None,
    ) -> Endpoint:
        """Where one rank listens; NewLife where the instance is not the `expected` one."""
        record, rank = self._known.use(address), (dp, cp, tp, pp)
        found, asked_at = record.ranks.get(rank, (None, 0.0))
        if found is None or not self._fresh(asked_at):
            found = await self._rank(await self._admitted(address), rank)
        if expected is not None and found.generation not in (None, expected):
            self.forget(address)
            raise NewLife(address, expected, found.generation)
        return found

    async def dp_ranks(
        self, address: str, rooms: Iterable[Room], wait_s: float = 0.0
    ) -> dict[Room, int]:
        """Which dp ranks the prefill gave these rooms to, asked for up to `wait_s`. Not kept.

        Rooms still unknown then are absent; earlier it returns when it knows all.
        """
        return await (await self._admitted(address)).line.ranks(tuple(rooms), wait_s)

    def forget(self, address: str) -> None:
        """Ask anew next time; for a caller whose connection to a rank failed."""
        self._known.forget(address)

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Call it when a life behind an address is over: replaced, or silent. Returns the undo."""
        return self._known.watch(listener)

    def states(self) -> Mapping[str, AddressState]:
        """How every address that is remembered has been doing."""
        return self._known.states()

    async def close(self) -> None:
        """End all calls that are still out."""
        await self._flights.close()
        await self._known.close()

    def lately(self) -> Sequence[str]:
        """Addresses with something to lose that were used within `idle_s`; for the heartbeat."""
        return self._known.lately()

    def answered(self, address: str, life: Generation | None, sent_at: float) -> bool:
        """The server there told its life to somebody else's question. False where it is another.

        Raises NewLife where the question is older than what is known.
        """
        record = self._known.find(address)
        if record is None or not record.life.heard:
            return True
        return self._known.hear(record, life, lambda seen: seen.answer(life, sent_at)) is record

    async def ask_again(self, address: str) -> bool:
        """Topology and known ranks as they are now; False where they are another life's.

        For servers that tell no life. Raises what the questions raise.
        """
        record = self._known.find(address)
        if record is None:
            return True
        await self._topology(record)
        for rank in record.life.ranks[: self._settings.most_ranks_beaten]:
            if record.over is None:
                await self._rank(record, rank)
        return record.over is None

    def gone(self, address: str, error: BootstrapError) -> None:
        """The life behind the address is over: drop all of it, tell who watches."""
        record = self._known.find(address)
        if record is not None:
            self._known.failed(record, error, self._clock.now())
            self._known.end(record, error)

    async def _admitted(self, address: str) -> Record:
        """Held back while the wait of a failure lasts; then one question goes ahead of all."""
        record = self._known.use(address)
        record.standing.hold_back(self._clock.now())
        if record.standing.failing:
            await self._topology(record)
        return self._known.use(address)

    async def _topology(self, record: Record) -> Resolved:
        return await self._flights.join((record.address,), lambda: self._ask_topology(record))

    async def _rank(self, record: Record, rank: Rank) -> Endpoint:
        return await self._flights.join(
            (record.address, rank), lambda: self._ask_rank(record, rank)
        )

    async def _ask_topology(self, record: Record) -> Resolved:
        sent_at, epoch = self._clock.now(), record.epoch
        async with self._known.watched(record, Stage.RESOLVE_TOPOLOGY):
            asked = self._client.topology(record.address, self._settings.topology_s)
            topology, life = await asked
        record = self._known.hear(record, life, lambda seen: seen.topology(topology, life, sent_at))
        resolved = Resolved(topology, life, sent_at)
        if record.epoch == epoch:
            record.resolved = resolved
        return resolved

    async def _ask_rank(self, record: Record, rank: Rank) -> Endpoint:
        sent_at, epoch = self._clock.now(), record.epoch
        async with self._known.watched(record, Stage.RESOLVE_RANK):
            found = await self._client.rank(record.address, *rank, self._settings.rank_s)
        where, life = (found.host, found.port), found.generation
        record = self._known.hear(record, life, lambda seen: seen.rank(rank, where, life, sent_at))
        if record.epoch == epoch:
            record.ranks[rank] = (found, sent_at)
        return found

    async def _ask_rooms(self, record: Record, rooms: Sequence[Room], wait_s: float) -> RoomRanks:
        sent_at, old = self._clock.now(), record.life.generation
        record.standing.hold_back(sent_at)
        async with self._known.watched(record, Stage.RESOLVE_RANK, timed=not wait_s):
            answer = await self._client.ask_rooms(
                record.address, rooms, wait_s, self._settings.rank_s
            )
        life = answer.generation
        now = self._known.hear(record, life, lambda seen: seen.answer(life, sent_at))
        if now is not record:
            raise NewLife(record.address, old, life)  # the rooms were another life's
        return answer

    def _line(self, record: Record) -> RoomLine:
        return RoomLine(
            lambda rooms, wait_s: self._ask_rooms(record, rooms, wait_s),
            self._clock,
            self._settings,
        )

    def _fresh(self, asked_at: float) -> bool:
        return self._clock.now() - asked_at < self._settings.fresh_s

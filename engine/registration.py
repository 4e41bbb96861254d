"""Registration: do decodes find our ranks?

Edge. A prefill's ranks enter their own bootstrap server and look now and then whether they are
still there: a directory that was restarted has forgotten them. Open it to change what a rank says
of itself. Source of the members: SGLang's PUT /route.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kvplane.bootstrap import BootstrapClient, BootstrapError, NotRegistered, Registration
from kvplane.runtime import Clock, backoff
from kvplane.vocabulary import Generation, Room, Stage

from .cells import Cell, missing
from .errors import RoomFailed
from .metrics import EngineMetrics
from .model import PAGE_TOKENS
from .settings import EngineSettings

log = logging.getLogger(__name__)

DTYPE = "float16"
LAYOUT = "kvplane-2"  # K/V, head, page, token, dim; K unrotated
TRY_S = 5.0  # one PUT or GET, as SGLang


@dataclass(frozen=True, slots=True)
class Registered:
    """Is a rank, or are all ranks of a dp rank, in the directory, and what to tell of it."""

    ok: bool
    took_s: float
    detail: str


class Registrar:
    """All ranks of one prefill at one directory; `keep` runs until cancelled."""

    def __init__(
        self,
        client: BootstrapClient,
        ports: Mapping[Cell, int],
        generation: Generation,
        settings: EngineSettings,
        clock: Clock,
        metrics: EngineMetrics,
        elsewhere: Callable[[Cell], Registered]
        | None = None,  # ranks of other nodes; None = theirs
        http_port: int | None = None,  # of node 0; None = ours
        changed: asyncio.Event | None = None,  # set when something is known that was not
        try_s: float = TRY_S,
    ) -> None:
        self._client, self._ports, self._settings = client, ports, settings
        self._try_s, self._http_port = try_s, settings.port if http_port is None else http_port
        self._generation = generation
        self._clock, self._metrics = clock, metrics
        self._elsewhere = elsewhere
        self._known: dict[Cell, Registered] = {}
        self.ready = asyncio.Event()
        self._changed = changed or asyncio.Event()

    @property
    def cells(self) -> Sequence[Cell]:
        """The ranks it registers."""
        return tuple(self._ports)

    def rank(self, cell: Cell) -> Registered:
        """What we know of one rank."""
        never = f"{self._name(cell)} is not registered at {self._settings.bootstrap_address} yet"
        return self._known.get(cell, Registered(False, 0.0, never))

    def unit(self, dp_rank: int) -> Registered:
        """All ranks of one dp rank: registered when each of them is."""
        sizes = self._settings.sizes
        known: dict[Cell, Registered] = {}
        for cell in sizes.cells(dp_rank):
            if cell in self._ports:
                known[cell] = self.rank(cell)
            elif self._elsewhere is not None:
                known[cell] = self._elsewhere(cell)
        cells = list(known)
        if len(cells) == 1:
            return known[cells[0]]
        took_s = max(rank.took_s for rank in known.values())
        there = [sizes.name(cell) for cell in cells if known[cell].ok]
        if len(there) < len(cells):
            first = next(rank.detail for rank in known.values() if not rank.ok)
            names = [sizes.name(cell) for cell in cells]
            return Registered(False, took_s, f"{missing(names, there)}: {first}")
        address = self._settings.bootstrap_address
        return Registered(True, took_s, f"{len(cells)} ranks are registered at {address}")

    @asynccontextmanager
    async def placed(self, room: Room, dp_rank: int) -> AsyncIterator[None]:
        """While inside, decodes that ask the directory for this room are sent to `dp_rank`.

        Raises RoomFailed of stage register where the directory does not take it.
        """
        address = self._settings.bootstrap_address
        try:
            await self._client.register_dp_rank(address, room, dp_rank, self._try_s)
        except BootstrapError as error:
            why = f"its dp rank {dp_rank} cannot be told: {error}"
            raise RoomFailed(room, Stage.REGISTER, why) from error
        try:
            yield
        finally:
            with suppress(BootstrapError):  # then it goes when its time is over
                await self._client.forget_rooms(address, [room], self._try_s)

    async def keep(self) -> None:
        """Register, then stay registered."""
        waits = backoff(0.1, most_s=self._settings.register_every_s)
        while True:
            if await self._all():
                waits = backoff(0.1, most_s=self._settings.register_every_s)
                await self._clock.sleep(self._settings.register_every_s)
            else:
                await self._clock.sleep(next(waits))

    async def _all(self) -> bool:
        """One round: who is not there is entered. A rank that cannot be keeps no other one out."""
        wrong = [why for why in await asyncio.gather(*map(self._enter, self._ports)) if why]
        if wrong:
            self._metrics.registrations.labels("failed").inc()
            log.warning("registration failed ranks=%d error=%s action=again", len(wrong), wrong[0])
            return False
        self.ready.set()
        return True

    async def _enter(self, cell: Cell) -> str | None:
        """See to one rank; why it is not there, None = it is."""
        try:
            if not await self._is_there(cell):
                await self._register(cell)
        except (BootstrapError, OSError, TimeoutError) as error:
            return self._failed(cell, str(error) or type(error).__name__)
        return None

    def _tell(self, cell: Cell, known: Registered) -> None:
        self._known[cell] = known
        self._changed.set()

    def _failed(self, cell: Cell, why: str) -> str:
        known = self._known.get(cell)
        if known is None or not known.ok:
            at = self._settings.bootstrap_address
            detail = f"{self._name(cell)} is not registered at {at} yet: {why}"
            self._tell(cell, Registered(False, 0.0, detail))
        return f"{self._name(cell)}: {why}"

    async def _is_there(self, cell: Cell) -> bool:
        """Only who was registered asks: before, no answer is the normal one."""
        if not self.rank(cell).ok:
            return False
        address = self._settings.bootstrap_address
        try:
            found = await self._client.rank(address, cell.dp, 0, cell.tp, cell.pp)
            if (found.host, found.port) == (self._settings.advertised, self._ports[cell]):
                return True
            why = f"{found.host}:{found.port} is in our place"
        except NotRegistered:
            return False  # others are missing there, so it tells of nobody: entering again is free
        except (BootstrapError, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
        name = self._name(cell)
        log.warning("registration lost rank=%r why=%s action=register", name, why)
        self.ready.clear()
        detail = f"{name} is no longer registered at {address}: {why}"
        self._tell(cell, Registered(False, 0.0, detail))
        return False

    async def _register(self, cell: Cell) -> None:
        began = self._clock.now()
        address = self._settings.bootstrap_address
        told = Registration.parse(self._facts(cell))
        await self._client.register(address, told, self._try_s)
        took = self._clock.now() - began
        name, place = self._name(cell), f"{self._settings.advertised}:{self._ports[cell]}"
        new = not self.rank(cell).ok
        self._tell(cell, Registered(True, took, f"{name} at {place} is registered at {address}"))
        self._metrics.registrations.labels("ok").inc()
        if new:
            log.info("registered rank=%r place=%s at=%s", name, place, address)

    def _name(self, cell: Cell) -> str:
        sizes = self._settings.sizes
        several = sizes.ranks > 1
        return f"rank {sizes.name(cell)}" if several else f"dp rank {cell.dp}"

    def _facts(self, cell: Cell) -> dict[str, Any]:
        sizes = self._settings.sizes
        return {
            "attn_tp_size": sizes.tp,
            "attn_tp_rank": cell.tp,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": sizes.dp,
            "attn_dp_rank": cell.dp,
            "system_dp_size": 1,
            "system_dp_rank": 0,
            "pp_size": sizes.pp,
            "pp_rank": cell.pp,
            "rank_ip": self._settings.advertised,
            "rank_port": self._ports[cell],
            "page_size": PAGE_TOKENS,
            "kv_cache_dtype": DTYPE,
            "kv_layout": LAYOUT,
            "load_balance_method": self._settings.load_balance,
            "prefill_http_port": self._http_port or None,
            "decode_allocation_policy": "early",
            "generation": self._generation,
        }

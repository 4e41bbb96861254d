"""Registration: do decodes find our ranks?

Edge. A prefill's ranks enter their own bootstrap server and look now and then whether they are
still there: a directory that was restarted has forgotten them. Open it to change what a rank says
of itself. Source of the members: SGLang's PUT /route.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvplane.bootstrap import BootstrapClient, BootstrapError, Registration
from kvplane.runtime import Clock, backoff
from kvplane.vocabulary import Generation

from .metrics import EngineMetrics
from .model import PAGE_TOKENS
from .settings import EngineSettings

log = logging.getLogger(__name__)

DTYPE = "float16"
LAYOUT = "kvplane-2"  # K/V, head, page, token, dim; K unrotated
TRY_S = 5.0  # one PUT or GET, as SGLang


@dataclass(frozen=True, slots=True)
class Registered:
    """Is a rank in the directory, and what to tell of it."""

    ok: bool
    took_s: float
    detail: str


class Registrar:
    """All dp ranks of one prefill at one directory; `keep` runs until cancelled."""

    def __init__(
        self,
        client: BootstrapClient,
        ports: Mapping[int, int],
        generation: Generation,
        settings: EngineSettings,
        clock: Clock,
        metrics: EngineMetrics,
    ) -> None:
        self._client, self._ports, self._settings = client, ports, settings
        self._generation = generation
        self._clock, self._metrics = clock, metrics
        self._known: dict[int, Registered] = {}
        self.ready = asyncio.Event()

    def rank(self, dp_rank: int) -> Registered:
        """What we know of one rank."""
        never = f"dp rank {dp_rank} is not registered at {self._settings.bootstrap_address} yet"
        return self._known.get(dp_rank, Registered(False, 0.0, never))

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
        try:
            for dp_rank in self._ports:
                if not await self._is_there(dp_rank):
                    await self._register(dp_rank)
        except (BootstrapError, OSError, TimeoutError) as error:
            self._metrics.registrations.labels("failed").inc()
            log.warning(
                "registration failed at=%s error=%s action=again",
                self._settings.bootstrap_address,
                error,
            )
            return False
        self.ready.set()
        return True

    async def _is_there(self, dp_rank: int) -> bool:
        """Only who was registered asks: before, no answer is the normal one."""
        if not self.rank(dp_rank).ok:
            return False
        address = self._settings.bootstrap_address
        try:
            found = await self._client.rank(address, dp_rank, 0, 0, 0)
            if (found.host, found.port) == (self._settings.advertised, self._ports[dp_rank]):
                return True
            why = f"{found.host}:{found.port} is in our place"
        except (BootstrapError, OSError, TimeoutError) as error:
            why = str(error) or type(error).__name__
        log.warning("registration lost dp_rank=%d why=%s action=register", dp_rank, why)
        self.ready.clear()
        detail = f"dp rank {dp_rank} is no longer registered at {address}: {why}"
        self._known[dp_rank] = Registered(False, 0.0, detail)
        return False

    async def _register(self, dp_rank: int) -> None:
        began = self._clock.now()
        address = self._settings.bootstrap_address
        told = Registration.parse(self._facts(dp_rank))
        await self._client.register(address, told, TRY_S)
        took = self._clock.now() - began
        place = f"{self._settings.advertised}:{self._ports[dp_rank]}"
        detail = f"dp rank {dp_rank} at {place} is registered at {address}"
        self._known[dp_rank] = Registered(True, took, detail)
        self._metrics.registrations.labels("ok").inc()
        log.info("registered dp_rank=%d place=%s at=%s", dp_rank, place, address)

    def _facts(self, dp_rank: int) -> dict[str, Any]:
        dp = self._settings.dp
        return {
            "attn_tp_size": 1,
            "attn_tp_rank": 0,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
            "attn_dp_size": dp,
            "attn_dp_rank": dp_rank,
            "system_dp_size": 1,
            "system_dp_rank": 0,
            "pp_size": 1,
            "pp_rank": 0,
            "rank_ip": self._settings.advertised,
            "rank_port": self._ports[dp_rank],
            "page_size": PAGE_TOKENS,
            "kv_cache_dtype": DTYPE,
            "kv_layout": LAYOUT,
            "load_balance_method": "follow_bootstrap_room",
            "prefill_http_port": self._settings.port or None,
            "decode_allocation_policy": "early",
            "generation": self._generation,
        }

"""Heartbeat: is the prefill behind an address alive, and still the one we know?

Edge, decode side, beside resolver.py; a Part. Open it to change how often addresses are beaten or
when one is taken for gone.

    every `beat_s`, each address in use: GET /health on a connection of its own
        our server       tells its generation; another one is another life
        SGLang's         tells none: its topology and its known ranks are asked again
        no answer        `most_misses` times in a row: gone, until somebody asks and is answered

Addresses nobody used for `idle_s` are left alone; one beat is out per address.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from kvplane.runtime import Clock, SystemClock, cancel, supervise
from kvplane.vocabulary import Generation

from .client import BootstrapClient
from .errors import BootstrapError, NewLife, NotRegistered, RankUnknown, Refused
from .metrics import BootstrapMetrics
from .resolver import Resolver
from .settings import ResolverSettings

log = logging.getLogger(__name__)


class Heartbeat:
    """Beats what the resolver has lately been asked for; `Resolver.watch` tells what it finds.

    The client's session must not keep connections (`fresh_session`).
    """

    def __init__(
        self,
        resolver: Resolver,
        client: BootstrapClient,
        clock: Clock | None = None,
        settings: ResolverSettings | None = None,
        metrics: BootstrapMetrics | None = None,
    ) -> None:
        self._resolver, self._client = resolver, client
        self._clock, self._settings = clock or SystemClock(), settings or ResolverSettings()
        self._metrics = metrics
        self._misses: dict[str, int] = {}  # in a row, by address; no more than are in use
        self._out: dict[str, asyncio.Task[None]] = {}
        self._beaten: dict[str, float] = {}  # when last
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to beat."""
        self._task = asyncio.create_task(supervise("heartbeat", self._run, self._clock))

    async def stop(self) -> None:
        """End all beats that are out."""
        await cancel(self._task, *self._out.values())

    async def _run(self) -> None:
        while True:
            self.round()
            await self._clock.sleep(self._settings.beat_s)

    def round(self) -> None:
        """One beat for every address in use that has none out, those that waited longest first."""
        now = self._clock.now()
        used = self._resolver.lately()
        for kept in (self._misses, self._beaten):
            for address in kept.keys() - set(used):
                del kept[address]
        due = [address for address in used if address not in self._out]
        due.sort(key=lambda address: self._beaten.get(address, 0.0))
        room = max(self._settings.most_beats - len(self._out), 0)
        for address in due[:room]:
            self._beaten[address] = now
            task = asyncio.create_task(self._beat(address), name=f"beat {address}")
            self._out[address] = task
            task.add_done_callback(partial(self._ended, address))
        for _ in due[room:]:
            self._count("skipped")

    async def _beat(self, address: str) -> None:
        sent_at = self._clock.now()
        try:
            life = await self._life(address)
            same = life is not None or await self._resolver.ask_again(address)
            same = self._resolver.answered(address, life, sent_at) and same
        except (NewLife, NotRegistered):  # the resolver has dropped it
            same = False
        except RankUnknown as error:  # it was there before
            self._resolver.gone(address, error)
            same = False
        except BootstrapError as error:
            self._missed(address, error)
            return
        self._misses.pop(address, None)
        self._count("ok" if same else "changed")

    async def _life(self, address: str) -> Generation | None:
        try:
            return await self._client.health(address, self._settings.beat_wait_s)
        except Refused:  # it lives, and has no such route
            return None

    def _missed(self, address: str, error: BootstrapError) -> None:
        misses = self._misses[address] = self._misses.get(address, 0) + 1
        self._count("missed")
        log.debug("beat missed address=%s misses=%d error=%s", address, misses, error)
        if misses >= self._settings.most_misses:
            del self._misses[address]
            self._resolver.gone(address, error)

    def _ended(self, address: str, task: asyncio.Task[None]) -> None:
        self._out.pop(address, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("beat failed address=%s", address, exc_info=task.exception())

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.beats.labels(outcome).inc()

"""Holding: a request that waits here for pages keeps its KV alive at the prefill.

Edge, decode side. Used by pull.py; offer.py hears the renewals. Without it a prefill gives a room
up when its lease ends, and a queue longer than the lease fails every request in it. Open it to
change how often a lease is renewed.

    resolve -> dial each prefill rank that has a part -> hold ... hold ... hold -> close
"""

from __future__ import annotations

import asyncio
import logging

from kvplane.runtime import Clock, backoff, cancel
from kvplane.vocabulary import BootstrapTriple, Shape, StageRecord

from .control import Channel, address_text
from .errors import PeerGone, TransferError
from .frames import PROTOCOL, HoldFrame
from .resolve import Rank, Resolver, Source, resolve
from .settings import TransferSettings
from .waiting import Steps, all_of

log = logging.getLogger(__name__)


class Holder:
    """One per decode rank."""

    def __init__(
        self,
        resolver: Resolver,
        shape: Shape,
        rank: Rank,
        clock: Clock,
        settings: TransferSettings,
    ) -> None:
        self._resolver, self._shape, self._rank = resolver, shape, rank
        self._clock, self._settings = clock, settings

    async def keep(self, triple: BootstrapTriple, dp_rank: int | None) -> None:
        """Renew until cancelled, `most_hold_s` at most. A prefill that is away is asked again."""
        settings = self._settings
        try:
            async with asyncio.timeout(settings.most_hold_s):
                for wait in backoff(0.1, most_s=settings.hold_every_s):
                    try:
                        await self._hold(triple, dp_rank)
                    except TransferError as error:
                        log.debug("not held room=%d why=%s", triple.room, error)
                    await self._clock.sleep(wait)
        except TimeoutError:
            log.warning("held too long room=%d most_s=%g", triple.room, settings.most_hold_s)

    async def _hold(self, triple: BootstrapTriple, dp_rank: int | None) -> None:
        steps = Steps(triple.room, self._settings.connect_s * 2, _unrecorded, self._clock, "")
        reach = await resolve(steps, self._resolver, triple, self._shape, self._rank, dp_rank)
        await all_of(*(self._renew(source, triple) for source in reach.sources))

    async def _renew(self, source: Source, triple: BootstrapTriple) -> None:
        """Ends when the prefill does not want to hear more: the room is over, or it is gone."""
        endpoint = source.endpoint
        try:
            async with asyncio.timeout(self._settings.connect_s):
                channel = await Channel.dial(endpoint.host, endpoint.port)
        except TimeoutError as error:
            raise PeerGone(address_text(endpoint.host, endpoint.port), "no answer") from error
        over = asyncio.ensure_future(channel.read())
        try:
            while not over.done():
                channel.post(HoldFrame(protocol=PROTOCOL, room=triple.room))
                await asyncio.wait({over}, timeout=self._settings.hold_every_s)
            over.result()
        finally:
            await cancel(over)
            channel.close()


def _unrecorded(record: StageRecord) -> None:
    """The pull that follows tells the stages; holding is nobody's evidence."""

"""Follower: any node but the first; it finds node 0 and stays in touch.

Edge. The other end is rendezvous.py. Open it to change how node 0 is dialled, or what a node does
when it loses it.

    dial -> welcome -> work -> link lost -> dial again ... until `stop`
                 \\-> refused, for a reason that dialling again does not change: the end
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

from kvplane.runtime import Clock, SystemClock, backoff, cancel
from kvplane.vocabulary import Generation

from .addresses import Address, bare, is_host, is_wildcard
from .errors import BootstrapError, NodesMissing, NotWelcome
from .joining import (
    MOST_TEXT,
    NONCE_BYTES,
    PROTOCOL,
    BadFrame,
    Challenge,
    Hello,
    Message,
    Refusal,
    Welcome,
    is_signed,
    signed,
)  # fmt: skip
from .link import MOST_REASON, Handler, Link
from .metrics import BootstrapMetrics
from .roster import Announced, Member
from .settings import RendezvousSettings
from .wire import Closed, Wire

log = logging.getLogger(__name__)

Watcher = Callable[[Announced | None, str], None]


class Node:
    """One node that is not the first; `handler` does what node 0 asks for."""

    def __init__(
        self,
        leader: Address,
        me: Member,
        handler: Handler | None = None,
        clock: Clock | None = None,
        settings: RendezvousSettings | None = None,
        metrics: BootstrapMetrics | None = None,
        secret: str = "",
    ) -> None:
        self._leader, self._me, self._handler, self._secret = leader, me, handler, secret
        self._clock, self._settings = clock or SystemClock(), settings or RendezvousSettings()
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._watchers: list[Watcher] = []
        self._joined = asyncio.Event()
        self.announced: Announced | None = None  # by node 0, while the link stands
        self.why = f"has not reached node 0 at {leader} yet"  # there is no link

    async def join(self, deadline_s: float) -> Announced:
        """Dial until node 0 lets us in; from then on the link is kept until `stop`.

        Raises NotWelcome where it never will, NodesMissing when the time is over.
        """
        assert self._task is None, "a node joins once"
        self._task = asyncio.create_task(self._keep(), name="rendezvous")
        joined = asyncio.ensure_future(self._joined.wait())
        over = asyncio.ensure_future(self._clock.sleep(deadline_s))
        try:
            await asyncio.wait((joined, over, self._task), return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()
            if self.announced is None:
                raise NodesMissing(f"{self}: {self.why} (tried for {deadline_s:.0f} s)")
            return self.announced
        finally:
            await cancel(joined, over)

    async def stop(self) -> None:
        """Leave."""
        await cancel(self._task)

    async def ended(self) -> None:
        """Until this node may not come back; raises NotWelcome that says why."""
        assert self._task is not None, "join first"
        await asyncio.shield(self._task)

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call it with what node 0 announced at each join, with None and why at each loss."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def __str__(self) -> str:
        return f"node {self._me.node_rank} of {self._me.nnodes}"

    async def _keep(self) -> None:
        first, most = self._settings.first_wait_s, self._settings.most_wait_s
        waits = backoff(first, most_s=most)
        while True:
            began = self._clock.now()
            try:
                await self._stay(await self._dial())
            except NotWelcome as error:
                self._lost(str(error))
                log.error("node refused name=%s error=%s action=end", self, error)
                raise
            except (BootstrapError, TimeoutError, OSError) as error:
                self._lost(self._said(error))
            if self._clock.now() - began > most:
                waits = backoff(first, most_s=most)
            await self._clock.sleep(next(waits))

    async def _dial(self) -> Wire:
        """A connection on which we are welcome."""
        async with asyncio.timeout(self._settings.hello_s):
            streams = await asyncio.open_connection(self._leader.host, self._leader.port)
            wire = Wire(*streams, self._clock)
            try:
                self._announce(await self._introduce(wire))
            except BaseException:
                wire.close()
                raise
            return wire

    async def _introduce(self, wire: Wire) -> Welcome:
        challenge = self._passed(await wire.read())
        if not isinstance(challenge, Challenge):
            raise BadFrame(f"{type(challenge).__name__} where a challenge was due")
        if challenge.protocol != PROTOCOL:
            said = challenge.protocol[:MOST_TEXT]
            raise NotWelcome(str(self._leader), f"it speaks {said!r}, we speak {PROTOCOL}")
        me, ours, theirs = self._me, challenge.nonce, secrets.token_bytes(NONCE_BYTES)
        hello = Hello(
            protocol=PROTOCOL, node_rank=me.node_rank, nnodes=me.nnodes, generation=me.generation,
            nonce=theirs, facts=dict(me.facts),
        )  # fmt: skip
        wire.post(signed(self._secret, "node", ours, theirs, hello))
        welcome = self._passed(await wire.read())
        if not isinstance(welcome, Welcome):
            raise BadFrame(f"{type(welcome).__name__} where a welcome was due")
        if not is_signed(self._secret, "leader", ours, theirs, welcome):
            raise NotWelcome(str(self._leader), "it does not know the secret (--write-key)")
        return welcome

    def _passed(self, message: Message) -> Message:
        """Any message but a refusal."""
        if not isinstance(message, Refusal):
            return message
        reason = message.reason[:MOST_REASON]
        if message.final:
            raise NotWelcome(str(self._leader), reason)
        raise Closed(f"refused: {reason}")

    async def _stay(self, wire: Wire) -> None:
        """The life of a link; its end is an error that says why."""
        name = f"node 0 at {self._leader}"
        link = Link(wire, name, self._clock, self._settings, self._handler, self._metrics)
        log.info("joined name=%s leader=%s life=%s", self, self._leader, self._life)
        self._tell("")
        why = await link.run()
        if link.refused is not None and link.refused.final:
            raise NotWelcome(str(self._leader), link.refused.reason[:MOST_REASON])
        raise Closed(why)

    def _announce(self, told: Welcome) -> None:
        host = bare(told.bootstrap_host) or self._leader.host
        if not is_host(host) or is_wildcard(host) or not 1 <= told.bootstrap_port <= 65_535:
            raise BadFrame(f"bootstrap {host}:{told.bootstrap_port} is no address")
        life = Generation(told.generation)
        self.announced = Announced(life, host, told.bootstrap_port, told.facts)
        self.why = ""
        self._joined.set()

    def _lost(self, why: str) -> None:
        had, news = self.announced is not None, why != self.why
        self.announced, self.why = None, why
        if had:
            log.warning("node 0 lost name=%s why=%s action=dial again", self, why)
            self._tell(why)
        else:  # said once for each reason, not at each try
            level = logging.INFO if news else logging.DEBUG
            log.log(level, "node 0 not reached name=%s why=%s action=dial again", self, why)

    def _tell(self, why: str) -> None:
        for watcher in tuple(self._watchers):
            try:
                watcher(self.announced, why)
            except Exception:
                log.exception("watcher failed name=%s action=go on", self)

    @property
    def _life(self) -> Generation | None:
        return None if self.announced is None else self.announced.generation

    def _said(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            why = f"no welcome within {self._settings.hello_s:g} s"
        elif isinstance(error, ConnectionRefusedError):
            why = "connection refused"
        elif isinstance(error, BadFrame):
            why = f"no node 0 of ours: {error}"
        else:
            why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return f"node 0 at {self._leader}: {why}"

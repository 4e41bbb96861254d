"""Rendezvous: the nodes of one instance meet at node 0, before their ranks register.

Edge. Node 0 runs a Leader on the init address, every other a Node (follower.py). Open it to change
how a node is let in or how people learn who is missing. What is said is in joining.py, who may
join in roster.py.

    node 0 knows where the rank directory is; each node that joins is told, so that all ranks of
    the instance register at one place, whatever port it got
    a node that dials again with another generation has restarted: the old link is fenced, and
    that life may not come back
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping

from kvplane.runtime import Clock, SystemClock, cancel
from kvplane.vocabulary import Generation

from .access import Writer, is_local
from .addresses import Address
from .errors import NodeLost, NodesMissing
from .joining import (
    NONCE_BYTES,
    PROTOCOL,
    BadFrame,
    Challenge,
    Hello,
    Refusal,
    Welcome,
    is_signed,
    signed,
)  # fmt: skip
from .link import Link
from .metrics import BootstrapMetrics
from .roster import JOINED, LOST, Announced, No, NodeState, Roster
from .settings import RendezvousSettings
from .wire import Closed, Wire

log = logging.getLogger(__name__)

Watcher = Callable[[NodeState], None]
ELSEWHERE = (
    "must be on this machine; to join from elsewhere start all nodes with the same --write-key "
    "KEY, or node 0 with --open-writes"
)


class Leader:
    """Node 0; a Part. Start it when the rank directory has its port."""

    def __init__(
        self,
        listen: Address,
        nnodes: int,
        announced: Announced,
        clock: Clock | None = None,
        settings: RendezvousSettings | None = None,
        metrics: BootstrapMetrics | None = None,
        secret: str = "",
    ) -> None:
        self._listen, self._announced, self._secret = listen, announced, secret
        self._clock, self._settings = clock or SystemClock(), settings or RendezvousSettings()
        self._metrics = metrics
        self._roster = Roster(nnodes, announced.facts, self._clock.now())
        self._links: dict[int, Link] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers = 0
        self._watchers: list[Watcher] = []
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.port = listen.port

    async def start(self) -> None:
        """Listen. Raises OSError that names the address."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._listen.host, self._listen.port
            )
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(f"rendezvous cannot listen on {self._listen}: {why}") from error
        self.port = self._server.sockets[0].getsockname()[1]
        at = Address(self._listen.host, self.port)
        log.info("rendezvous listens at=%s nodes=%d", at, self._roster.nnodes)

    async def stop(self) -> None:
        """All links end; the nodes dial until somebody listens again."""
        if self._server is not None:
            self._server.close()
        await cancel(*self._tasks)

    def states(self) -> Mapping[int, NodeState]:
        """Every other node, by rank."""
        return self._roster.states()

    def missing(self) -> str:
        """One sentence that names each node that is late or lost; "" where all are in."""
        return self._roster.missing(self._clock.now())

    def watch(self, watcher: Watcher) -> Callable[[], None]:
        """Call it with the new state of a node that joined, restarted or was lost. The undo."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    async def complete(self, deadline_s: float) -> None:
        """Wait until all nodes are in; raises NodesMissing that names those who are not."""
        end = self._clock.now() + deadline_s
        over = asyncio.ensure_future(self._clock.sleep(deadline_s))
        try:
            while not self._roster.complete():
                if self._clock.now() >= end:
                    raise NodesMissing(self.missing())
                self._changed.clear()
                change = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait((change, over), return_when=asyncio.FIRST_COMPLETED)
                await cancel(change)
        finally:
            await cancel(over)

    async def ask(
        self,
        node: int,
        body: bytes,
        deadline_s: float | None = None,
        expected: Generation | None = None,
    ) -> bytes:
        """What the node's handler makes of `body`; leaving early cancels the work there.

        `expected`: only this life of it. Raises NodeLost, NodeFailed or NodeSilent.
        """
        link, state = self._links.get(node), self._roster.states().get(node)
        name = self._name(node)
        if state is None:
            raise NodeLost(name, f"must be 1 to {self._roster.nnodes - 1}")
        if link is None:
            raise NodeLost(name, state.why or "has not joined yet")
        if expected is not None and state.generation != expected:
            raise NodeLost(name, f"restarted: is now {state.generation}, was {expected}")
        return await link.ask(body, self._settings.ask_s if deadline_s is None else deadline_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "streams serve in a task"
        self._tasks.add(task)
        wire = Wire(reader, writer, self._clock)
        try:
            hello = await self._let_in(wire)
            if hello is not None:
                await self._keep(wire, hello)
        except asyncio.CancelledError:
            pass  # we stop; streams would log it
        finally:
            wire.close()
            self._tasks.discard(task)

    async def _let_in(self, wire: Wire) -> Hello | None:
        """The hello of a node that has joined; None for a stranger, who is told why."""
        if self._strangers >= self._settings.most_strangers:
            self._refuse(wire, No("full", "too many connections have not joined yet", False))
            return None
        self._strangers += 1
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            async with asyncio.timeout(self._settings.hello_s):
                wire.post(Challenge(protocol=PROTOCOL, nonce=nonce))
                hello = await wire.read()
        except TimeoutError:
            why = f"no hello within {self._settings.hello_s:g} s"
            self._refuse(wire, No("silent", why, False))
            return None
        except Closed as error:
            self._refuse(wire, No("closed", str(error), False))
            return None
        except BadFrame as error:
            self._refuse(wire, No("garbage", str(error)))
            return None
        finally:
            self._strangers -= 1
        no = self._judge(wire, hello, nonce)
        if no is None and isinstance(hello, Hello):
            wire.post(self._welcome(hello, nonce))
            return hello
        assert no is not None, "a hello is judged"
        self._refuse(wire, no)
        return None

    def _judge(self, wire: Wire, hello: object, nonce: bytes) -> No | None:
        if not isinstance(hello, Hello):
            return No("garbage", "no hello")
        known = self._secret or self._settings.open_joins
        if not known and not is_local(Writer(wire.host, wire.reached)):
            return No("address", f"node at {wire.host}: {ELSEWHERE}")
        if not is_signed(self._secret, "node", nonce, hello.nonce, hello):
            return No("secret", "secret (--write-key): must be the same on all nodes")
        return self._roster.refusal(hello)

    def _welcome(self, hello: Hello, nonce: bytes) -> Welcome:
        told = self._announced
        welcome = Welcome(
            generation=told.generation,
            bootstrap_host=told.bootstrap_host,
            bootstrap_port=told.bootstrap_port,
            facts=dict(told.facts),
        )
        return signed(self._secret, "leader", nonce, hello.nonce, welcome)

    def _refuse(self, wire: Wire, no: No) -> None:
        level = logging.INFO if no.kind == "closed" else logging.WARNING  # a probe of the port
        log.log(level, "stranger refused peer=%s reason=%s action=close", wire.peer, no.reason)
        if self._metrics is not None:
            self._metrics.strangers.labels(no.kind).inc()
        wire.close(Refusal(reason=no.reason, final=no.final))

    async def _keep(self, wire: Wire, hello: Hello) -> None:
        """The life of a link."""
        rank = hello.node_rank

        def ended(why: str) -> None:
            if self._links.get(rank) is link:
                del self._links[rank]
                self._roster.lost(rank, why, self._clock.now())
                self._tell(rank, LOST, before)

        name, settings = self._name(rank), self._settings
        link = Link(wire, name, self._clock, settings, None, self._metrics, ended)
        before = self._roster.joined(hello, wire.peer, self._clock.now())
        self._fence(rank, before, hello.generation)
        self._links[rank] = link
        restarted = before.generation not in (None, hello.generation)
        self._tell(rank, "restarted" if restarted else JOINED, before)
        await link.run()

    def _fence(self, rank: int, before: NodeState, life: str) -> None:
        """End the link that the same node had."""
        old = self._links.pop(rank, None)
        if old is None:
            return
        if before.generation == life:
            old.end("the same life dialled again")
        else:
            reason = f"generation {before.generation} was replaced by {life}"
            old.end(f"restarted: {reason}", Refusal(reason=reason, final=True))

    def _tell(self, rank: int, change: str, before: NodeState) -> None:
        state = self._roster.states()[rank]
        level = logging.INFO if change == JOINED else logging.WARNING
        log.log(
            level, "node %s name=%s life=%s before=%s address=%s why=%s", change, self._name(rank),
            state.generation, before.generation, state.address, state.why or "-",
        )  # fmt: skip
        if self._metrics is not None:
            self._metrics.nodes.labels(change).inc()
        self._changed.set()
        for watcher in tuple(self._watchers):
            try:
                watcher(state)
            except Exception:
                log.exception("watcher failed node=%d action=go on", rank)

    def _name(self, rank: int) -> str:
        return f"node {rank} of {self._roster.nnodes}"

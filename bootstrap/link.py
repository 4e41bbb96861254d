"""Link: two nodes that have met stay in touch, and one lets the other work.

Edge. Made by rendezvous.py when a node has joined. Open it to change when a silent peer is given
up, or how questions travel.

    ask(bytes) ... answer(bytes)      many at once, in any order; a question nobody waits for any
                                      more is cancelled there
    both ends beat; silence for `silent_s`, garbage or a closed connection end the link, and with
    it all questions, on both sides
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable

from kvplane.runtime import Clock, cancel

from .errors import BadInput, NodeFailed, NodeLost, NodeSilent
from .joining import Answer, Ask, BadFrame, Beat, Cancel, Failed, Message, Refusal
from .metrics import BootstrapMetrics
from .settings import RendezvousSettings
from .wire import Closed, Wire

log = logging.getLogger(__name__)

Handler = Callable[[bytes], Awaitable[bytes]]
MOST_REASON = 2000  # characters of a reason that travels
HEAD = 1024  # bytes of a frame beside its body


class Link:
    """One joined connection. `run` is its life; `peer` names the other end for people."""

    def __init__(
        self,
        wire: Wire,
        peer: str,
        clock: Clock,
        settings: RendezvousSettings,
        handler: Handler | None = None,
        metrics: BootstrapMetrics | None = None,
        ended: Callable[[str], None] | None = None,
    ) -> None:
        self._ended = ended  # told why, before those who wait for answers are
        self._wire, self.peer, self._clock, self._settings = wire, peer, clock, settings
        self._handler, self._metrics = handler, metrics
        self._ids = itertools.count(1)
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._work: dict[int, asyncio.Task[None]] = {}
        self._over = asyncio.Event()
        self.why = ""
        self.refused: Refusal | None = None  # the other end will not have us any more
        wire.allow(settings.most_bytes + HEAD)

    async def run(self) -> str:
        """Until the link ends; why it did."""
        reading = asyncio.create_task(self._read())
        beating = asyncio.create_task(self._beat())
        try:
            await self._over.wait()
        finally:
            self.end("closed by this end")
            await cancel(reading, beating, *self._work.values())
        return self.why

    def end(self, why: str, last: Message | None = None) -> None:
        """Close, after a last message; who waits for an answer is told. Idempotent."""
        if self._over.is_set():
            return
        self.why = why
        self._over.set()
        self._wire.close(last)
        if self._ended is not None:
            self._ended(why)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(NodeLost(self.peer, why))

    async def ask(self, body: bytes, deadline_s: float) -> bytes:
        """What the other end's handler makes of `body`. Leaving early cancels it there.

        Raises NodeLost where the link ends, NodeFailed where the handler does, NodeSilent.
        """
        most = self._settings.most_asks
        if len(body) > self._settings.most_bytes:
            raise BadInput("body", f"{len(body)} bytes", f"at most {self._settings.most_bytes}")
        if self._over.is_set():
            raise NodeLost(self.peer, self.why)
        if len(self._asked) >= most:
            self._count("busy")
            raise NodeFailed(self.peer, f"{most} questions are not answered yet")
        number, future = next(self._ids), asyncio.get_running_loop().create_future()
        self._asked[number] = future
        outcome = "left"
        try:
            async with asyncio.timeout(deadline_s):
                await self._wire.send(Ask(id=number, body=body))
                answer: bytes = await future
            outcome = "ok"
            return answer
        except TimeoutError:
            outcome = "silent"
            raise NodeSilent(self.peer, f"no answer within {deadline_s:.1f} s") from None
        except NodeLost as error:
            outcome = "failed" if isinstance(error, NodeFailed) else "lost"
            raise
        finally:
            del self._asked[number]
            if future.cancel() or outcome in ("left", "silent"):
                self._wire.post(Cancel(id=number))
            elif future.done():
                future.exception()  # seen
            self._count(outcome)

    async def _read(self) -> None:
        try:
            while not self._over.is_set():
                self._take(await self._wire.read())
        except Closed as error:
            self.end(str(error))
        except BadFrame as error:
            self._stranger("garbage")
            self.end(f"garbage: {error}")

    def _take(self, message: Message) -> None:
        if isinstance(message, Ask):
            self._begin(message)
        elif isinstance(message, Answer | Failed):
            self._settle(message)
        elif isinstance(message, Cancel):
            task = self._work.get(message.id)
            if task is not None:
                task.cancel()
        elif isinstance(message, Refusal):
            self.refused = message
            self.end(f"refused: {message.reason[:MOST_REASON]}")
        elif not isinstance(message, Beat):
            raise BadFrame(f"{type(message).__name__} on a link that has joined")

    def _settle(self, message: Answer | Failed) -> None:
        future = self._asked.get(message.id)
        if future is None or future.done():
            self._count("late")
        elif isinstance(message, Answer):
            future.set_result(message.body)
        else:
            future.set_exception(NodeFailed(self.peer, message.reason[:MOST_REASON]))

    def _begin(self, ask: Ask) -> None:
        if ask.id in self._work:
            raise BadFrame(f"question {ask.id} is asked twice")
        if self._handler is None:
            self._wire.post(Failed(id=ask.id, reason="no questions are answered here"))
        elif len(self._work) >= self._settings.most_asks:
            self._wire.post(Failed(id=ask.id, reason=f"{len(self._work)} questions are in work"))
        else:
            self._work[ask.id] = asyncio.create_task(self._answer(ask, self._handler))

    async def _answer(self, ask: Ask, handler: Handler) -> None:
        reply: Answer | Failed
        try:
            body = await handler(ask.body)
            reply = Answer(id=ask.id, body=body)
            if len(body) > self._settings.most_bytes:
                most = self._settings.most_bytes
                reason = f"answer of {len(body)} bytes: must be at most {most}"
                reply = Failed(id=ask.id, reason=reason)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            reply = Failed(id=ask.id, reason="the work was cancelled")
        except Exception as error:
            log.warning("question failed peer=%s error=%s action=tell", self.peer, error)
            reason = (str(error) or type(error).__name__)[:MOST_REASON]
            reply = Failed(id=ask.id, reason=reason)
        finally:
            self._work.pop(ask.id, None)
        await self._wire.send(reply)

    async def _beat(self) -> None:
        beat_s, silent_s = self._settings.beat_s, self._settings.silent_s
        before = self._clock.now()
        while True:
            await self._clock.sleep(beat_s)
            now = self._clock.now()
            if now - before > beat_s + silent_s / 2:
                self._wire.heard_at = now  # it was us who slept; what they said is still unread
            before = now
            if now - self._wire.heard_at > silent_s:
                self.end(f"silent for {now - self._wire.heard_at:.1f} s")
                return
            if not self._wire.waiting:
                self._wire.post(Beat())

    def _count(self, outcome: str) -> None:
        if self._metrics is not None:
            self._metrics.asks.labels(outcome).inc()

    def _stranger(self, reason: str) -> None:
        if self._metrics is not None:
            self._metrics.strangers.labels(reason).inc()

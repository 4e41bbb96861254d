"""Gateway: THE LIFE OF A REQUEST, top to bottom.

Edge: asks the pure parts what to do and does it. api.py hands over an Ask and a Client; choice.py
says who serves; journey.py takes and gives back what one attempt needs; dispatch.py runs the legs.
Open it to see or change the order of things.

    tokens -> choice -> rooms, load, meeting -> both legs -> answer -> all given back
                 ^                                 |
                 +--- fresh rooms, without the guilty: only before the first byte
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvplane.bootstrap import compatible
from kvplane.index import Chains, View
from kvplane.runtime import Clock, SystemClock
from kvplane.tallies import Count
from kvplane.vocabulary import Pod, StageRecord, Worker

from . import facts
from .aftermath import Aftermath
from .availability import AllShut
from .blame import LegFailed
from .breaker import Breakers
from .choice import Choice, Chooser, Weighed
from .closed_loop import ClosedLoop
from .counted import Counted
from .dispatch import Client, pause
from .doubts import Doubts
from .errors import GatewayError, let_go
from .evidence import Ledger
from .evidence_shared import SharedEvidence
from .fleet import Fleet
from .foretold import Foretold
from .journey import Journey, Means
from .legs import Legs
from .legs_wire import Origin
from .meeting import INPUT, POOL, Meeting, Trail
from .metrics import RouterMetrics
from .places import Places
from .prompts import Prompt, Prompts
from .request import LONG_BYTES, Ask
from .retry import Again, Budget, Failed, decide
from .sending import Sending
from .settings import RouterSettings
from .walks import Walks

log = logging.getLogger(__name__)


class FollowerPort(Protocol):
    """What the gateway wants to know of the index's follower."""

    ready: asyncio.Event

    def down_s(self) -> float: ...  # how long the store has been away
    def in_touch_at(self) -> float: ...  # it could be heard after this


class Gateway:
    """Everything a request needs, put together. A Part: stop() ends what is still collected."""

    places: Places | None = None  # how many are let in and how many wait; the door's
    refuses: Callable[[], Awaitable[str]] | None = None  # why the index store takes no writes

    def __init__(
        self,
        view: View,
        fleet: Fleet,
        prompts: Prompts,
        legs: Legs,
        ledger: Ledger,
        metrics: RouterMetrics,
        settings: RouterSettings | None = None,
        clock: Clock | None = None,
        follower: FollowerPort | None = None,
        breakers: Breakers | None = None,
        chance: Callable[[], float] = random.random,
        chains: Chains | None = None,
    ) -> None:
        self.settings, self.clock = settings or RouterSettings(), clock or SystemClock()
        self.view, self.fleet, self.ledger = view, fleet, ledger
        self.metrics, self.legs, self._prompts = metrics, legs, prompts
        self.breakers = breakers or Breakers(self.settings.breaker)
        self.aftermath = Aftermath(
            legs, ledger, self._book_cached, self._book_stage, metrics.evidence_dropped.inc
        )
        self._follower, self._chance, self._budget = follower, chance, Budget(self.settings.retry)
        way = (follower.down_s, self._blind, follower.in_touch_at) if follower is not None else ()
        told = (self.settings.drift, self._book_compared, *way)
        self.loop = ClosedLoop(view, fleet, self.clock, *told)
        ledger.on_close.append(Walks(metrics.stage_s, metrics.request_s).ended)
        metrics.watch_drift(self.loop.errors, self.loop.verdict)
        metrics.watch_open(self._open())
        self.doubts = Doubts(view, fleet, self.loop, self._blind)
        self._counted = Counted(metrics, self.doubts)
        self._chooser = Chooser(
            view, fleet, self.breakers, self.settings, compatible, chance, self._blind,
            self.doubts.doubt, (chains or Chains()).unrolled,
        )  # fmt: skip
        fleet.on_turn, fleet.on_restart = self._book_health, self._book_restart
        self.fit: Callable[[], Awaitable[None]] | None = None  # may the index store be relied on?
        self.shared: SharedEvidence | None = None  # where other gateways' rooms can be asked for
        sent = Sending(legs, fleet, metrics, self.clock)
        self._means = Means(fleet, self.breakers, ledger, sent, self.aftermath, metrics, self.clock)

    async def start(self) -> None:
        """Ready to serve."""
        await self.aftermath.start()
        await self.loop.start()

    async def stop(self) -> None:
        """End what is still being collected."""
        await self.loop.stop()
        await self.aftermath.stop()

    async def handle(self, ask: Ask, client: Client) -> None:
        """Answer one request. Raises GatewayError where no answer began; ClientGone, BrokenBody."""
        settings, metrics, clock = self.settings, self.metrics, self.clock.now
        begun = clock()
        prompt = self._prompts.untold(ask.model) if ask.plain else None
        if prompt is None:
            prompt = await self._tokens(ask)
        since = now = clock()
        metrics.tokenise_s.observe(now - begun)
        self._budget.earn()
        deadline, number, spared = now + settings.request_timeout_s, 1, False
        trail = Trail(clock, INPUT, begun, POOL, now)
        guilty: tuple[Worker, ...] = ()
        before: GatewayError | None = None
        while True:
            try:
                choice = self._chooser.choose(ask, prompt, now, guilty, trail)
            except GatewayError as error:
                most_s = min(deadline, since + settings.retry.most_wait_s) - now
                now = await self._wait(error, ask, trail, before, most_s, client)
                continue
            if (count := self._counted.get(choice)) is None:
                count = self._chosen(ask, choice, prompt, before is not None)
            count.value += 1
            metrics.choose_s.observe(clock() - now)
            journey = Journey(self._means, ask, choice, number, trail)
            try:
                await journey.travel(client)
                return
            except LegFailed as failed:
                before, spared = failed.cause, spared or failed.stale  # that is no attempt, once
                again = self._again(failed, journey, number - spared, deadline)
                let_go(failed)
            finally:
                journey.arrive(client)
            if again is None:
                raise before
            await pause(again.wait_s, client)
            since = now = clock()
            guilty, number, trail = guilty + again.without, number + 1, Trail(clock, POOL, now)

    async def weigh(self, ask: Ask) -> tuple[Prompt, Weighed]:
        """Whom this request would be given to now; nothing is sent or taken for it."""
        prompt = await self._tokens(ask)
        return prompt, self._chooser.weigh(ask, prompt, self.clock.now())

    # -- in order of use

    async def _tokens(self, ask: Ask) -> Prompt:
        """Told at once where nobody has to be asked."""
        model, most = self.fleet.asked_for(ask.model)
        long = len(ask.raw) > LONG_BYTES
        prompt = self._prompts.look(ask.path, ask.body, model, most * facts.CHARS_PER_TOKEN, long)
        if not isinstance(prompt, Prompt):
            prompt = await prompt
        facts.check_length(ask, prompt, most)  # before anybody hashes it
        return prompt

    async def _wait(
        self,
        error: GatewayError,
        ask: Ask,
        trail: Trail,
        before: GatewayError | None,
        most_s: float,
        client: Client,
    ) -> float:
        """Nobody can serve this attempt now. When to ask again: where all of several circuits are
        open, the first that is tried again is waited for, for a while: the client would have to
        come back then anyway. Raises the error; where nobody is left for a further attempt, the
        failure before is what the client should hear."""
        shut = error if before is None and isinstance(error, AllShut) else None
        if shut is None or shut.alone or shut.wait_s >= most_s:
            self.ledger.refuse(facts.refused(ask), trail, error)
            raise before or error from None
        let_go(error)
        await pause(shut.wait_s, client)
        now = self.clock.now()
        trail.steps += (POOL, now)
        return now

    def _chosen(self, ask: Ask, choice: Choice, prompt: Prompt, again: bool) -> Count:
        """What counts this choice; whose pair is too short for the prompt goes no way."""
        if prompt.tokens is not None and (most := facts.pair_tokens(choice)):
            facts.check_length(ask, prompt, most)
        return self._counted.of(choice, prompt, again)

    def _again(
        self, failed: LegFailed, journey: Journey, number: int, deadline: float
    ) -> Again | None:
        """May it be tried again? Counts both answers."""
        if failed.stale:  # whatever cut it may have cut the other side's too
            for target in filter(None, (journey.choice.prefill, journey.choice.decode)):
                self.legs.renew(Origin.parse(target.url))
        how = Failed(
            journey.account.without,
            failed.status or None,
            failed.started,
            failed.retry_after_s,
            others=self._chooser.others(
                journey.ask.model, journey.account.without, self.clock.now()
            ),
        )
        left_s = deadline - self.clock.now()
        verdict = decide(how, number, self.settings.retry, self._budget, left_s, self._chance())
        if isinstance(verdict, Again):
            self.metrics.retries.labels(failed.cause.code).inc()
            return verdict
        self.metrics.stops.labels(verdict.why).inc()
        journey.meeting.stopped = verdict.why
        return None

    def _open(self) -> dict[str, Callable[[], int]]:
        """What is under way now, by the names of metrics.OPEN."""
        legs = self.legs
        return {
            "legs_open": lambda: legs.live,
            "connections_busy": lambda: legs.sockets - legs.idling,
            "connections_idle": lambda: legs.idling,
            "aftermath_open": lambda: self.aftermath.pending,
            "tasks": _tasks,
        }

    # -- what others tell us

    def _blind(self) -> str:
        if self._follower is not None and not self._follower.ready.is_set():
            return "the index is still being read"
        return ""

    def _book_stage(self, record: StageRecord) -> None:
        self.metrics.stage_s.labels(record.stage, record.outcome).observe(record.duration_s)

    def forget(self, pod: Pod) -> None:
        """A pod left, or began a new life: nothing is held against it, nor kept open to it."""
        self.legs.keep_only({Origin.parse(up.url) for up in self.fleet.pods()})
        self.breakers.forget(pod)
        self.loop.forget(pod)

    def _book_health(self, pod: Pod, healthy: bool) -> None:
        self.metrics.health.labels(pod, "healthy" if healthy else "unhealthy").inc()
        if healthy:
            log.info("worker healthy pod=%s", pod)
            return
        whys = (one.pulse.reason for one in self.fleet.targets() if one.worker.pod == pod)
        why = next(whys, "")
        log.warning("worker unhealthy pod=%s why=%s action=no requests", pod, why)

    def _book_restart(self, pod: Pod) -> None:
        self.metrics.restarts.labels(pod).inc()

    def _book_cached(self, meeting: Meeting, foretold: Foretold | None) -> None:
        """Predicted against actual, where both are known."""
        if meeting.predicted_tokens is not None and meeting.actual_tokens is not None:
            worker = meeting.parties[0].worker
            self.metrics.predicted.of[(worker,)].value += meeting.predicted_tokens
            self.metrics.actual.of[(worker,)].value += meeting.actual_tokens
        if foretold is not None and meeting.outcome == "ok":
            self.loop.answered(foretold, meeting.actual_tokens, meeting.begun)

    def _book_compared(self, worker: Worker, outcome: str) -> None:
        self.metrics.comparisons.of[worker, outcome].value += 1


def _tasks() -> int:
    """Of the loop that serves the scrape; 0 where it is read from outside of one."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0

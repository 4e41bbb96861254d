"""Closed loop: is the index right about each worker, as its engine sees it?

Edge: one small task. aftermath.py brings what was foretold and what the engine told; unsettled.py
says when it may be judged, drift.py and suspicions.py judge; choice.py asks `doubt`, admin.py and
metrics.py read. Open it to change what is believed of a comparison. Nothing here is on the path of
a request.

    answered --> right: counted          wrong: waits for news on its way
                                           |--> trouble on that way since it was routed: doubted
                                           \\--> judged, tested --> window --> verdict --> doubt
    trouble over: what was wrong meanwhile is forgotten, unless a cause was proven
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from kvplane.index import View
from kvplane.runtime import Clock, cancel, supervise
from kvplane.vocabulary import Epoch, Knowledge, Pod, Worker

from .drift import Compared, Stream, Window, compared
from .fleet import Fleet
from .foretold import Foretold
from .settings import DriftSettings
from .suspicions import Cause, Scene, explain
from .unsettled import Unsettled, Waiting
from .verdicts import Verdict, drifted, silent

log = logging.getLogger(__name__)

MOST_SALTS = 4  # of other requests, to be tried where one is wrong


@dataclass(slots=True)
class Watched:
    """What is remembered of one life of a worker."""

    epoch: Epoch | None
    window: Window
    stream: Stream
    verdict: Verdict | None = None
    trouble_since: float | None = None  # on the way of its news; None = that is whole
    trouble_at: float = -math.inf  # last seen


class ClosedLoop:
    """Compares, judges and remembers. A Part."""

    def __init__(
        self,
        view: View,
        fleet: Fleet,
        clock: Clock,
        settings: DriftSettings | None = None,
        on_compared: Callable[[Worker, str], None] = lambda worker, outcome: None,
        store_down_s: Callable[[], float] = lambda: 0.0,
        blind: Callable[[], str] = lambda: "",  # why the view itself cannot be believed now
        in_touch_at: Callable[[], float] = lambda: math.inf,  # the store could be heard after this
    ) -> None:
        self._view, self._fleet, self._clock = view, fleet, clock
        self._settings = settings or DriftSettings()
        self._on_compared, self._store_down_s, self._blind = on_compared, store_down_s, blind
        self._in_touch_at = in_touch_at
        self._watched: dict[Worker, Watched] = {}
        self._unsettled = Unsettled(self._settings)
        self._salts: dict[str, None] = {}
        self._tests = float(self._settings.tests_a_minute)  # that may be made now
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look."""
        work = supervise("closed loop", self._look, self._clock)
        self._task = asyncio.create_task(work, name="closed loop")

    async def stop(self) -> None:
        """End; what waits is dropped."""
        await cancel(self._task)

    # -- what others ask

    def verdict(self, worker: Worker) -> Verdict | None:
        """What is wrong between the index and this worker's engine; None where nothing is."""
        found = self._watched.get(worker)
        return found.verdict if found else None

    def verdicts(self) -> Mapping[Worker, Verdict]:
        """Of all workers there is one of."""
        return {who: one.verdict for who, one in self._watched.items() if one.verdict}

    def doubt(self, worker: Worker) -> tuple[Knowledge, str] | None:
        """How far a worker may be believed at most, and why; None where our check has no word."""
        found = self._watched.get(worker)
        if found is not None and found.verdict is not None:
            return found.verdict.state, found.verdict.sentence
        down_s = self._store_down_s()
        if down_s > 1:
            return Knowledge.PARTIAL, f"the index store does not answer since {down_s:.0f} s"
        return None

    def store_down_s(self) -> float:
        """For how long the index store did not answer; 0 while it does."""
        return self._store_down_s()

    def errors(self) -> Mapping[Worker, tuple[float, float]]:
        """Of every worker compared: shares of tokens claimed too much and too little."""
        now = self._clock.now()
        return {worker: one.window.errors(now) for worker, one in self._watched.items()}

    def forget(self, pod: Pod) -> None:
        """A pod left, or began a new life: its past is not held against it."""
        self._watched = {who: one for who, one in self._watched.items() if who.pod != pod}

    # -- what the aftermath brings

    def answered(self, told: Foretold, actual: int | None, routed: float | None = None) -> None:
        """A worker served a request. `actual`: tokens its engine found cached; None = not told.
        `routed`: when, at the earliest; None = now."""
        now, facts = self._clock.now(), self._view.facts(told.worker)
        if facts is None or facts.epoch != told.epoch:
            return  # not known, or another life by now
        watched, predicted = self._of(told.worker, facts.epoch), told.predicted
        found = predicted if actual is None else actual
        stores = told.most > found and (actual is not None or self._sure(told))
        if stores:
            owes = told.last == facts.last  # else it need not be told apart
            watched.stream.served(told.last, facts.last, told.mark if owes else 0, now)
        if salt := told.space.salt:
            self._remember(salt)
        if actual is None:
            self._on_compared(told.worker, "untold")
        elif not told.exact:
            self._on_compared(told.worker, "doubted")
        elif actual != predicted or (stores and watched.window.uneasy(now)):
            waiting = Waiting(told, actual, now if routed is None else routed, now)
            if not self._unsettled.add(waiting):
                self._on_compared(told.worker, "skipped")
        else:
            self._book(watched, Compared(now, predicted, actual), told)

    def _remember(self, salt: str) -> None:
        if salt not in self._salts:
            self._salts[salt] = None
            while len(self._salts) > MOST_SALTS:
                del self._salts[next(iter(self._salts))]

    def _sure(self, told: Foretold) -> bool:
        """Where the engine does not tell: is what the index does not hold really not there? So
        it is while the index is exact, and something must come where nothing ever came."""
        return told.exact or told.last is None

    def _of(self, worker: Worker, epoch: Epoch | None) -> Watched:
        found = self._watched.get(worker)
        if found is None or found.epoch != epoch:
            fresh = Watched(epoch, Window(self._settings), Stream(self._settings))
            found = self._watched[worker] = fresh
        return found

    # -- what is done about it

    async def _look(self) -> None:
        while True:
            await self._clock.sleep(self._settings.tick_s)
            most = float(self._settings.tests_a_minute)
            self._tests = min(most, self._tests + most / 60 * self._settings.tick_s)
            now, in_touch_at = self._clock.now(), self._in_touch_at()
            for worker, watched in self._watched.items():
                self._note(worker, watched, now)
            while waiting := self._unsettled.due(now, in_touch_at):
                self._judge(waiting, now, in_touch_at)
                await asyncio.sleep(0)  # prompts are hashed: one at a time
            for worker, watched in list(self._watched.items()):
                self._decide(worker, watched, now)

    def _note(self, worker: Worker, watched: Watched, now: float) -> None:
        """Is the way of its news whole? An index that was mended is judged anew; a cause that was
        proven is not mended by that."""
        known, unheard = self._view.known(worker), self._unheard(worker)
        if unheard:
            watched.stream.forgive()
        if unheard or known is None or known.state is not Knowledge.EXACT:
            watched.trouble_at = now
            if watched.trouble_since is None:
                watched.trouble_since = now
        elif watched.trouble_since is not None:
            if watched.verdict is None or not watched.verdict.proven:
                watched.window.mended(watched.trouble_since - self._settings.unnoticed_s)
            watched.trouble_since = None

    def _judge(self, waiting: Waiting, now: float, in_touch_at: float) -> None:
        """Only where all that was told since it was routed could be heard."""
        told, actual = waiting.told, waiting.actual
        watched = self._watched.get(told.worker)
        if watched is None or watched.epoch != told.epoch:
            return
        late = watched.trouble_at >= waiting.routed or in_touch_at <= waiting.answered
        if late or self._view.epoch(told.worker) != told.epoch:
            return self._on_compared(told.worker, "doubted")
        later = told.now(self._view)
        one = compared(told.predicted, later.get(told.worker, 0), actual, now)
        if self._tests >= 1 and told.tokens <= self._settings.most_tested:
            self._tests -= 1
            one = structs.replace(one, suspicions=explain(told, actual, self._scene(told, later)))
        self._book(watched, one, told)

    def _scene(self, told: Foretold, later: Mapping[Worker, int]) -> Scene:
        target, salts = self._fleet.target(told.worker), tuple(self._salts)
        if target is None:
            return Scene(self._view, later, salts=salts)
        return Scene(self._view, later, target.up.adapters, salts, target.up.block_size)

    def _book(self, watched: Watched, one: Compared, told: Foretold) -> None:
        watched.window.add(one)
        self._on_compared(told.worker, one.outcome)

    def _decide(self, worker: Worker, watched: Watched, now: float) -> None:
        """The verdict as it is now; a line where it changed."""
        facts, verdict = self._view.facts(worker), None
        if facts is None or facts.epoch != watched.epoch:
            self._watched.pop(worker, None)
        else:
            watched.stream.heard(facts.last)
            verdict = self._found(worker, watched, now)
        before, watched.verdict = watched.verdict, verdict
        if verdict and (before is None or before.named != verdict.named):
            log.warning("drift worker=%s action=believe less: %s", worker, verdict.sentence)
        elif before is not None and verdict is None:
            rests = watched.window.resting and before.cause is Cause.UNKNOWN
            how = "rests" if rests else "over"
            log.info("drift %s worker=%s cause=%s", how, worker, before.cause)

    def _unheard(self, worker: Worker) -> bool:
        """Could nobody have brought us a batch? No fault of the engine: the store is away or still
        being read, or no ingest lives that follows it."""
        if self._store_down_s() > 0 or self._blind():
            return True
        known, living = self._view.known(worker), self._view.living
        return known is None or (living is not None and known.by not in living)

    def _found(self, worker: Worker, watched: Watched, now: float) -> Verdict | None:
        """A cause that was proven says more than silence: a stream that is another worker's does
        not speak of what this one serves. Silence says more than an error without a cause, and
        that may be our own late news: it rests while nothing confirms it."""
        found, window = None, watched.window
        if window.alarmed(now):
            found = drifted(worker, window.wrong(now), window.recent(now))
        if found is not None and found.proven:
            return found
        if found is not None and window.rests(now, whole=watched.trouble_since is None):
            found = None
        quiet_s = watched.stream.silent_s(now)
        return silent(worker, watched.stream.owed, quiet_s) if quiet_s else found

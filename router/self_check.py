"""Self-check: does each engine make the same tokens of a prompt as we do?

Edge: one small task, and a question to each worker now and then, never on the path of a request.
samples.py has the prompts; choice.py asks `doubt`, admin.py and metrics.py read. Open it to change
when a worker is compared, or what follows from it.

    up --> compared --equal--> again in 30 s     differs twice --> dark, with the first difference
              \\--> the engine cannot be asked: said, and tried again

Where only chats with tools or with several parts differ, plain prompts are still right: prompts.py
then asks engines for the tokens of those.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from kvplane.runtime import Clock, cancel, supervise
from kvplane.vocabulary import Knowledge, Pod, Role, Worker, WorkerUp

from .engine_tokens import EngineTokens, Untold, questions
from .fleet import Fleet
from .plans import Kind, plan
from .prompts import Prompts
from .samples import SPECIAL, Sample, difference, samples
from .settings import SelfCheckSettings
from .suspicions import Cause
from .verdicts import Verdict

log = logging.getLogger(__name__)

OUTCOMES = ("equal", "differs", "unable")
Facts = tuple[str, object, str, str, str]


@dataclass(slots=True)
class Checked:
    """What is known of one worker's tokens."""

    facts: Facts  # what it was compared under; other facts are another worker
    outcome: str = "new"  # new | equal | differs | unable
    reason: str = "not compared yet"
    due: float = 0.0
    wrong: dict[Kind, str] = field(default_factory=dict)  # kind -> first difference


class SelfCheck:
    """Compares, judges and remembers. A Part."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: Prompts,
        source: EngineTokens,
        clock: Clock,
        settings: SelfCheckSettings | None = None,
    ) -> None:
        self._fleet, self._prompts, self._source, self._clock = fleet, prompts, source, clock
        self._settings = settings or SelfCheckSettings()
        self.counted: Counter[str] = Counter()  # comparisons by outcome
        self._states: dict[Pod, Checked] = {}
        self._running: dict[Pod, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._number = 0  # of comparisons: each has prompts of its own
        self.differing: frozenset[Pod] = frozenset()  # pods whose plain prompts are wrong here

    async def start(self) -> None:
        """Begin to compare."""
        work = supervise("self-check", self._look, self._clock)
        self._task = asyncio.create_task(work, name="self-check")

    async def stop(self) -> None:
        """End."""
        await cancel(self._task, *self._running.values())

    # -- what others ask

    def states(self) -> Mapping[Pod, Checked]:
        """Every worker that is compared, and what came of it."""
        return self._states

    def doubt(self, worker: Worker) -> tuple[Knowledge, str] | None:
        """How far a worker may be believed at most, and why; None where tokens are no reason."""
        found = self._states.get(worker.pod)
        if found is None or found.outcome != "differs":
            return None
        return Knowledge.DARK, found.reason

    def verdict(self, worker: Worker) -> Verdict | None:
        """The same with a culprit and a next step."""
        doubt = self.doubt(worker)
        if doubt is None:
            return None
        step = (
            "give the gateway the tokenizer folder and chat template this engine was started with "
            "(tokenizer of its [[workers]] table, or --tokenizer)"
        )
        culprit = f"tokenizer of {worker.pod} at the gateway"
        return Verdict(Cause.TOKENS, "", doubt[0], doubt[1], culprit, step)

    # -- what is done about it

    async def _look(self) -> None:
        while True:
            self._sort()
            now = self._clock.now()
            for up in self._fleet.pods():
                if len(self._running) >= self._settings.together:
                    break
                state = self._states.get(up.pod)
                if state is not None and state.due <= now and up.pod not in self._running:
                    self._begin(up, state)
            await self._clock.sleep(self._settings.tick_s)

    def _begin(self, up: WorkerUp, state: Checked) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._running.pop(up.pod, None)

        task = asyncio.create_task(self._check(up, state), name=f"check {up.pod}")
        self._running[up.pod] = task
        task.add_done_callback(ended)

    def _sort(self) -> None:
        """Newcomers and those with new facts are due; who left is forgotten."""
        now, states = self._clock.now(), {}
        for up in self._fleet.pods():
            if up.role is Role.DECODE or not up.events:
                continue  # chosen by load: nobody asks what it knows
            facts: Facts = (up.url, up.generation, up.tokenizer, up.model, up.engine)
            known = self._states.get(up.pod)
            states[up.pod] = known if known and known.facts == facts else Checked(facts, due=now)
        self._states = states
        self._mark()

    def _mark(self) -> None:
        found = (pod for pod, one in self._states.items() if one.outcome == "differs")
        self.differing = frozenset(found)

    async def _check(self, up: WorkerUp, state: Checked) -> None:
        """Compare one worker and remember it."""
        settings, self._number = self._settings, self._number + 1
        kinds: dict[Kind, str | None] = {}
        unable = ""
        try:
            async with asyncio.timeout(settings.deadline_s):
                for sample in samples(self._number):
                    told = await self._compared(up, sample)
                    if isinstance(told, Untold):
                        unable = unable or str(told)
                    else:
                        kinds[sample.kind] = told
        except TimeoutError:
            unable = f"comparing took longer than {settings.deadline_s:g} s"
        except Exception as error:  # whatever an engine makes of it, the others are compared
            log.exception("self-check failed pod=%s", up.pod)
            unable = f"comparing failed: {error!r}"
        self._judge(up, state, kinds, unable)

    async def _compared(self, up: WorkerUp, sample: Sample) -> str | Untold | None:
        """The first difference, None where there is none, or why that cannot be said. What differs
        is looked at twice: the engine or our tokenizer may just have been exchanged."""
        found = None
        for _ in range(2):
            body = {**sample.body, **({"model": up.model} if up.model else {})}
            (question,) = questions(plan(sample.path, body), body, up.model)
            try:
                theirs = await self._source.ask(up.url, msgspec.json.encode(question))
            except Untold as error:
                return error
            ours = await self._prompts.tokenise(sample.path, body, up.model, own=True)
            if ours.reason == "no_tokenizer":  # asked of engines: do they agree among themselves?
                ours = await self._prompts.tokenise(sample.path, body, up.model)
            if ours.tokens is None:
                return Untold("no_tokenizer", f"no tokens here: {ours.reason}")
            found = difference(sample.kind, ours.tokens[0], theirs)
            if found is None:
                return None
        return found

    def _judge(
        self, up: WorkerUp, state: Checked, kinds: Mapping[Kind, str | None], unable: str
    ) -> None:
        """The new state, and a line where it changed."""
        if self._states.get(up.pod) is not state:
            return  # another life by now, or gone
        for kind, found in kinds.items():
            if found is None:
                state.wrong.pop(kind, None)
            else:
                state.wrong[kind] = found
            if kind in SPECIAL:
                self._prompts.distrust(up.model, kind, up.pod, found is not None)
        before = state.outcome, state.reason
        state.outcome, state.reason = _outcome(up.pod, state.wrong, kinds, unable)
        soon = state.outcome == "differs"
        wait = self._settings.again_s if soon else self._settings.interval_s
        state.due = self._clock.now() + wait
        self.counted[state.outcome] += 1
        self._mark()
        if (state.outcome, state.reason) != before:
            level = logging.WARNING if state.wrong else logging.INFO
            log.log(level, "tokens %s pod=%s: %s", state.outcome, up.pod, state.reason)


def _outcome(
    pod: Pod, wrong: Mapping[Kind, str], kinds: Collection[Kind], unable: str
) -> tuple[str, str]:
    """equal | differs | unable, and why. What differed differs until it was seen to be equal."""
    plain = [found for kind, found in wrong.items() if kind not in SPECIAL]
    if plain:
        return "differs", f"tokens of the gateway are not those of {pod}: {plain[0]}"
    if not kinds:
        return "unable", f"tokens of {pod} cannot be compared: {unable or 'nothing was told'}"
    asked = f"; such prompts are asked of engines: {next(iter(wrong.values()))}" if wrong else ""
    return "equal", f"the same tokens of {', '.join(sorted(kinds))}{asked}"

"""Doubts: what do our own checks hold against a worker, all of them together?

Pure: asks the checks it is given. choice.py believes a worker no further, GET /index/workers and
GET /diagnosis show it, and gateway.py counts each request by `why`. Open it to add a check, or a
label of kvplane_router_knowledge_total.

    self_check.py   other tokens of a prompt      dark
    closed_loop.py  other tokens in the cache     partial, or dark where its stream is silent
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from kvplane.index import View
from kvplane.vocabulary import Knowledge, Pod, Worker

from .choice import Choice
from .fleet import Fleet
from .plans import Prompt
from .verdicts import Verdict

Doubted = tuple[Knowledge, str]
EXACT, OFF = Knowledge.EXACT, Knowledge.OFF  # asked for with every request
WORSE = list(Knowledge)  # worst last


class Loop(Protocol):
    """What is asked of the closed loop."""

    def doubt(self, worker: Worker) -> Doubted | None: ...
    def verdict(self, worker: Worker) -> Verdict | None: ...
    def verdicts(self) -> Mapping[Worker, Verdict]: ...
    def store_down_s(self) -> float: ...


class Tokens(Protocol):
    """What is asked of the self-check."""

    @property
    def differing(self) -> Collection[Pod]: ...
    def doubt(self, worker: Worker) -> Doubted | None: ...
    def verdict(self, worker: Worker) -> Verdict | None: ...


class Doubts:
    """All checks of one gateway."""

    def __init__(self, view: View, fleet: Fleet, loop: Loop, blind: Callable[[], str]) -> None:
        self._view, self._fleet, self._loop, self._blind = view, fleet, loop, blind
        self.tokens: Tokens | None = None  # where there is a self-check

    def doubt(self, worker: Worker) -> Doubted | None:
        """How far a worker may be believed at most, and why; None where no check has a word."""
        found, checked = self._loop.doubt(worker), self.tokens
        if checked is None or worker.pod not in checked.differing:
            return found
        tokens = checked.doubt(worker)
        return found if tokens is None or _worse(found, tokens) else tokens

    def verdict(self, worker: Worker) -> Verdict | None:
        """The same with a culprit and a next step; wrong tokens explain all that follows."""
        tokens = self.tokens.verdict(worker) if self.tokens is not None else None
        return tokens or self._loop.verdict(worker)

    def told(self) -> dict[Worker, Doubted]:
        """Every worker a check holds something against; asked for with each question."""
        found = {who: (one.state, one.sentence) for who, one in self._loop.verdicts().items()}
        if self.tokens is not None and self.tokens.differing:
            for target in self._fleet.targets():
                if (doubt := self.doubt(target.worker)) is not None:
                    found[target.worker] = doubt
        return found

    def why(self, choice: Choice, prompt: Prompt) -> str:
        """A choice's reason out of a closed set: a label. "" where knowledge is exact."""
        if choice.knowledge is EXACT:
            return ""
        if choice.knowledge is OFF:
            return "no_events"
        if prompt.reason is not None:
            return prompt.reason
        worker = choice.holder.worker
        verdict = self.verdict(worker)
        if verdict is not None and verdict.sentence == choice.reason:
            return str(verdict.cause)
        if self._blind():
            return "index_loading"
        if self._view.known(worker) is None:
            return "never_heard"
        away = self._loop.store_down_s() > 1 and choice.reason.startswith("the index store")
        return "store_away" if away else "stream"


def _worse(found: Doubted | None, other: Doubted) -> bool:
    return found is not None and WORSE.index(found[0]) > WORSE.index(other[0])

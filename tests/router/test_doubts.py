"""Doubts: all checks of a worker, the worse of them, and a label for each."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from kit.gatehouse import worker

from kvplane.index import View
from kvplane.router.choice import Choice
from kvplane.router.doubts import Doubted, Doubts
from kvplane.router.fleet import Fleet
from kvplane.router.foretold import Depth
from kvplane.router.plans import Prompt
from kvplane.router.suspicions import Cause
from kvplane.router.verdicts import Verdict
from kvplane.vocabulary import Epoch, Knowledge, Known, Pod, Role, Worker

P1, P2 = Worker(Pod("p1")), Worker(Pod("p2"))
PARTIAL, DARK = Knowledge.PARTIAL, Knowledge.DARK


def verdict(state: Knowledge, cause: Cause = Cause.SALT) -> Verdict:
    return Verdict(cause, "", state, f"{cause} is wrong", "c", "n")


@dataclass
class Check:
    """Says what it was told to."""

    found: dict[Worker, Verdict] = field(default_factory=dict)
    away_s: float = 0.0

    @property
    def differing(self) -> set[Pod]:
        return {worker.pod for worker in self.found}

    def doubt(self, worker: Worker) -> Doubted | None:
        one = self.found.get(worker)
        return None if one is None else (one.state, one.sentence)

    def verdict(self, worker: Worker) -> Verdict | None:
        return self.found.get(worker)

    def verdicts(self) -> dict[Worker, Verdict]:
        return self.found

    def store_down_s(self) -> float:
        return self.away_s


class Desk:
    def __init__(self) -> None:
        self.view, self.fleet, self.blind = View(), Fleet(), ""
        for name in ("p1", "p2"):
            self.fleet.up(worker(name, f"http://{name}:1", Role.PREFILL))
        self.loop, self.tokens = Check(), Check()
        self.doubts = Doubts(self.view, self.fleet, self.loop, lambda: self.blind)
        self.doubts.tokens = self.tokens

    def why(self, knowledge: Knowledge, reason: str = "", prompt: Prompt | None = None) -> str:
        target = self.fleet.target(P1)
        assert target is not None
        choice = Choice(None, target, Depth(), knowledge, reason, "", "", 1)
        return self.doubts.why(choice, prompt or Prompt(((1,),)))


@pytest.mark.parametrize(
    ("loop", "tokens", "counts"),
    [
        (None, None, None),
        (PARTIAL, None, "salt is wrong"),
        (None, DARK, "tokens is wrong"),
        (PARTIAL, DARK, "tokens is wrong"),
        (DARK, DARK, "tokens is wrong"),  # what follows from it is no finding of its own
    ],
)
def test_the_worse_word_counts(
    loop: Knowledge | None, tokens: Knowledge | None, counts: str | None
) -> None:
    desk = Desk()
    if loop:
        desk.loop.found[P1] = verdict(loop)
    if tokens:
        desk.tokens.found[P1] = verdict(tokens, Cause.TOKENS)
    found = desk.doubts.doubt(P1)
    assert (found[1] if found else None) == counts
    shown = desk.doubts.verdict(P1)
    assert (shown.sentence if shown else None) == counts
    assert desk.doubts.told() == ({P1: found} if found else {})
    assert desk.doubts.doubt(P2) is None


def test_without_a_self_check_the_loop_alone_speaks() -> None:
    desk = Desk()
    desk.doubts.tokens = None
    desk.loop.found[P1] = verdict(PARTIAL)
    assert desk.doubts.told() == {P1: (PARTIAL, "salt is wrong")}
    assert desk.doubts.verdict(P1) == verdict(PARTIAL)


def test_every_reason_has_a_label_out_of_a_closed_set() -> None:
    desk = Desk()
    assert desk.why(Knowledge.EXACT) == ""
    assert desk.why(Knowledge.OFF, "events of p1 are not configured") == "no_events"
    assert desk.why(DARK, "x", Prompt(None, "busy")) == "busy"
    assert desk.why(DARK, "p1 was never heard of") == "never_heard"
    desk.view.apply(Known(P1, Epoch(1), PARTIAL, "gap", 0.0))
    assert desk.why(PARTIAL, "gap") == "stream"
    desk.loop.away_s = 9.0
    assert desk.why(PARTIAL, "the index store does not answer since 9 s") == "store_away"
    assert desk.why(PARTIAL, "gap") == "stream"
    desk.blind = "the index is still being read"
    assert desk.why(DARK, desk.blind) == "index_loading"
    desk.loop.found[P1] = verdict(PARTIAL)
    assert desk.why(PARTIAL, "salt is wrong") == "salt"
    desk.tokens.found[P1] = verdict(DARK, Cause.TOKENS)
    assert desk.why(DARK, "tokens is wrong") == "tokens"

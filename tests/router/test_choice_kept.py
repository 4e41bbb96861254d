"""Kept between requests: whatever changes, a choice is the one that fresh eyes would make.

Fleet, view and chooser remember what is the same for all requests while nothing changes. Random
changes by seed, and after each the same questions are asked of those who remember and of new ones.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from msgspec import structs

from kvplane.bootstrap import compatible
from kvplane.index import Chains, View, chain
from kvplane.router.breaker import Breakers, Outcome, Ticket
from kvplane.router.choice import Chooser
from kvplane.router.errors import GatewayError
from kvplane.router.fleet import Fleet
from kvplane.router.plans import Prompt
from kvplane.router.request import CHAT, Ask, parse
from kvplane.router.settings import BreakerSettings, FleetSettings, RouterSettings
from kvplane.router.target import Booking, Lost, Uneasy
from kvplane.vocabulary import (
    Change,
    Cleared,
    ClearReason,
    Epoch,
    Generation,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Removed,
    Role,
    Shape,
    Stage,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

NAMES, MODELS, SIZES = ("a", "b", "c", "d", "e"), ("tiny", "tiny", "big", ""), (8, 16)
ASKED = ("tiny", "big", "lora", "", "nobody's")
PROMPTS = [list(range(at, at + 70)) for at in (0, 100)]
BODIES = {
    "/generate": '{"text":"x","model":"%s"}',
    CHAT: '{"messages":[{"role":"user","content":"x"}],"model":"%s"}',  # plain
}
SETTINGS = FleetSettings(failures=2, successes=1, ramp_s=3.0, stuck_s=4.0)


class Scene:
    """What a choice looks at, and who remembers."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 1.0
        self.changes: list[Change] = []
        self.view, self.fleet = View(), Fleet(SETTINGS)
        self.breakers = Breakers(BreakerSettings(faults=2, pause_s=3.0, quick_s=1.0, successes=1))
        self.blind = ""
        self.doubts: dict[Worker, tuple[Knowledge, str]] = {}
        self.loads: list[Booking] = []
        self.tickets: list[tuple[Worker, Ticket]] = []
        self.kept = self.chooser(self.view, self.fleet, Chains().unrolled)

    def chooser(self, view: View, fleet: Fleet, names: Any) -> Chooser:
        settings = RouterSettings(prefill_policy="prefix", fleet=SETTINGS)
        made = Chooser(
            view, fleet, self.breakers, settings, compatible, lambda: 0.5,
            lambda: self.blind, self.doubts.get, names,
        )  # fmt: skip
        self.breakers.on_closed = self.fleet.returned
        return made

    def fresh(self) -> tuple[Chooser, Fleet]:
        """The same facts, and nothing remembered."""
        view, fleet = View(), copy.copy(self.fleet)
        view.living, view.cut_off = self.view.living, self.view.cut_off
        for change in self.changes:
            view.apply(change)
        fleet._chosen, fleet._sides, fleet._asked = {}, {}, {}
        fleet.uneasy = Uneasy(fleet.targets())  # who looks at everybody
        return self.chooser(view, fleet, chain), fleet

    # -- what may change

    def worker(self) -> Worker:
        targets = self.fleet.targets()
        if targets and self.chance.random() < 0.9:
            return self.chance.choice(targets).worker
        return Worker(Pod(self.chance.choice(NAMES)))

    def up(self) -> None:
        pick, name = self.chance.choice, self.chance.choice(NAMES)
        known = self.fleet.target(Worker(Pod(name)))
        role = known.role if known and pick((0, 1, 1)) else pick((*Role, *list(Role)[:2]))
        self.fleet.up(
            WorkerUp(
                Pod(name), f"http://{name}:1", role, engine=pick(("kvplane", "kvplane", "sglang")),
                model=pick(MODELS), adapters=pick(((), ("lora",))), dp_size=pick((1, 1, 2)),
                block_size=pick((None, *SIZES)), events=pick(((), ("tcp://x:1",))),
                max_tokens=pick((None, 60, 1000)), generation=pick((None, Generation("g"))),
                shape=Shape(page_size=pick((16, 16, 64))), draining=pick((False,) * 5 + (True,)),
            ),
            self.now,
        )  # fmt: skip

    def gone(self) -> None:
        pod = self.worker().pod
        self.fleet.down(pod)
        self.breakers.forget(pod)

    def state(self) -> None:
        pod, pick = self.worker().pod, self.chance.choice
        what = pick(("drain", "health", "health", "lost", "found"))
        if what == "drain":
            self.fleet.drain(pod, pick((True, False, False)))
        elif what == "health":
            self.fleet.mark_health(pod, pick((True, True, False)), self.now, "x")
        elif what == "lost":
            self.fleet.mark_lost(pod, Lost(Stage.REGISTER, "x"))
        else:
            self.fleet.mark_found(pod, Shape(page_size=pick((16, 16, 64))))

    def told(self) -> None:
        self.changes.append(change := self._change())
        self.view.apply(change)

    def _change(self) -> Change:
        pick, worker = self.chance.choice, self.worker()
        epoch = Epoch(pick((1, 1, 1, 1, 2)))
        what, tier = self.chance.randrange(10), pick((Tier.GPU, Tier.GPU, Tier.CPU))
        size = self.view.block_size(worker) or pick(SIZES)
        space = Namespace(pick(("tiny", "big")), size, pick(("", "", "lora")))
        blocks = chain(pick(PROMPTS), space).blocks[: pick((1, 2, 4, 9))]
        if what < 5:
            group = Group(1, GroupKind.WINDOW, 32) if pick((0,) * 9 + (1,)) else None
            return Stored(worker, epoch, tier, None, blocks, size, group)
        if what < 6:
            return Removed(worker, epoch, tier, blocks[-1:])
        if what < 8:
            return Cleared(worker, epoch, pick(list(ClearReason)), pick((None, tier)))
        state = pick((Knowledge.EXACT, Knowledge.EXACT, *Knowledge))
        return Known(worker, epoch, state, "as told", 0.0, pick(("", "i1")))

    def believed(self) -> None:
        pick, worker = self.chance.choice, self.worker()
        self.blind = pick(("", "", "", "being read"))
        self.view.living = pick((None, frozenset(), frozenset({"i1"})))
        self.view.cut_off = pick((frozenset(), frozenset({worker})))
        self.doubts.pop(worker, None)
        if pick((0, 1)):
            self.doubts[worker] = pick((Knowledge.DARK, Knowledge.PARTIAL)), "we saw it"

    def circuit(self) -> None:
        worker, pick = self.worker(), self.chance.choice
        if ticket := self.breakers.of(worker).admit(self.now):
            self.breakers.of(worker).book(ticket, pick((Outcome.FAULT, *Outcome)), self.now)
        if self.chance.random() < 0.2:
            pair = self.worker(), self.worker()
            for _ in range(3):
                self.breakers.pairs.failed(*pair, self.now)
            if pick((0, 1)):
                self.breakers.pairs.succeeded(*pair)

    def load(self) -> None:
        pick = self.chance.choice
        if self.loads and pick((0, 1)):
            self.loads.pop(self.chance.randrange(len(self.loads))).release()
        elif targets := self.fleet.targets():
            target = pick(targets)
            self.loads.append(self.fleet.book(target.worker, pick((0, 10, 500))))
            if pick((0, 0, 1)):
                self.fleet.uneasy.busy(target, self.now + 2.0)

    def time(self) -> None:
        self.now += self.chance.choice((0.1, 1.0, 5.0))


CHANGES = (
    Scene.up, Scene.up, Scene.gone, Scene.state, Scene.state, Scene.told, Scene.told, Scene.told,
    Scene.believed, Scene.circuit, Scene.load, Scene.time,
)  # fmt: skip


def answers(chooser: Chooser, fleet: Fleet, ask: Ask, prompt: Prompt, scene: Scene) -> list[Any]:
    """Whom they would take and why, or why nobody."""
    without = [scene.worker()] if scene.chance.random() < 0.2 else []
    found: list[Any] = [fleet.asked_for(ask.model), fleet.models()]
    found += [fleet.selectable(role, ask.model) for role in Role]
    try:
        choice = chooser.choose(ask, prompt, scene.now, without)
        firsts, seconds, _ = chooser.weigh(ask, prompt, scene.now)
    except GatewayError as error:
        return [*found, error.code, str(error)]
    ranked = [(c.target, c.depth_blocks, c.share) for one in (firsts, seconds) for c in one]
    return [*found, structs.astuple(choice), ranked, chooser.others(ask.model, without, scene.now)]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_changed_those_who_remember_choose_as_fresh_ones_do(seed: int) -> None:
    scene, served = Scene(seed), 0
    for _ in range(6):
        scene.up()
    for _ in range(250):
        for _ in range(scene.chance.choice((1, 1, 3))):
            scene.chance.choice(CHANGES)(scene)
        model, own = scene.chance.choice(ASKED), scene.chance.random() < 0.2
        path, body = scene.chance.choice(list(BODIES.items()))
        ask = parse(path, (body % model).encode(), "id")
        tokens = (scene.chance.choice(PROMPTS),) if scene.chance.random() < 0.6 else None
        prompt = Prompt(tokens, None if tokens else "slow", False, "lora" if own else "")
        state = scene.chance.getstate()
        kept = answers(scene.kept, scene.fleet, ask, prompt, scene)
        scene.chance.setstate(state)
        assert kept == answers(*scene.fresh(), ask, prompt, scene)
        served += len(kept) == 8
    assert served > 5, "the scenes are of use"

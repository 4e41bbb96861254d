"""Fleet: who can serve, and how much is each doing now?

Pure: time is an argument. discovery/ says who comes and goes, traffic and then probes say who is
well, directories.py who can be found, the gateway books load; policies/ read the Targets. Open it
to change who is selected from, and what is said where nobody can be.

    pod (WorkerUp) --- dp rank 0 -> Target    each its own cache, load and circuit
                   \\-- dp rank 1 -> Target    health, draining and being found are the pod's
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol

from kvplane.vocabulary import Generation, Pod, Role, Shape, Stage, Worker, WorkerUp

from .drains import Drains
from .errors import GatewayError
from .settings import FleetSettings
from .sides import Sides
from .target import Booking, Lost, Pulse, Target, Uneasy, beat

MOST_LIVES = 4096  # pods whose last life is remembered, for the count of restarts


class Waited(Protocol):
    """A worker somebody named that does not serve yet; discovery has them."""

    @property
    def declared(self) -> WorkerUp: ...
    @property
    def reason(self) -> str: ...
    @property
    def stage(self) -> str | None: ...


class Fleet:
    """All pods we were told of, in order of name."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self.settings = settings or FleetSettings()
        self._pods: dict[Pod, tuple[Target, ...]] = {}  # never empty
        self._chosen: dict[tuple[Role, str], tuple[Target, ...]] = {}  # selectable(), remembered
        self._sides: dict[str, Sides] = {}  # sides(), remembered
        self._asked: dict[str, tuple[str, int]] = {}  # asked_for(), remembered
        self._lives: dict[Pod, Generation] = {}  # the last one of each pod, gone ones too
        self.drains = Drains()  # by hand; whatever life a pod has
        self._turn = 0  # requests booked so far
        self.uneasy = Uneasy()  # who may have to be left out
        self.ramping_until = 0.0  # after this nobody is new any more
        self.waiting: Callable[[], Iterable[Waited]] = tuple  # discovery's, where there is one
        self.on_restart: Callable[[Pod], None] = lambda pod: None  # a known pod has a new life
        self.on_turn: Callable[[Pod, bool], None] = lambda pod, healthy: None  # its health changed

    # What discovery says --------------------------------------------------------------------

    def up(self, worker: WorkerUp, now: float = 0.0) -> None:
        """A pod serves, or its facts changed. Another generation or dp size starts afresh: load
        of the life before is given back to nobody."""
        known = self._pods.get(worker.pod)
        same = known is not None and _same_life(known[0].up, worker)
        if known is not None and same:
            for target in known:
                target.up = worker
                target.__post_init__()
        else:
            pulse = Pulse(draining=self.drains.of(worker), since=now)
            ranks = range(max(1, worker.dp_size))
            fresh = tuple(Target(Worker(worker.pod, rank), worker, pulse) for rank in ranks)
            self._pods = dict(sorted({**self._pods, worker.pod: fresh}.items()))
            self._ramp(fresh, now)
        self._note_life(worker)
        self._changed()

    def down(self, pod: Pod) -> None:
        """A pod is gone; what is booked on it is released into nothing."""
        self._pods.pop(pod, None)
        self._changed()

    def drain(self, pod: Pod, draining: bool = True) -> None:
        """Take no new requests there (or again), in this life and later ones; running ones end."""
        self.drains.say(pod, draining)
        for target in self._pods.get(pod, ()):
            target.pulse.draining = draining
        self._changed()

    def mark_health(self, pod: Pod, ok: bool, now: float, reason: str = "") -> bool:
        """One sign of life or of trouble. True where the pod's health changed by it."""
        targets = self._pods.get(pod)
        if targets is None or not beat(targets[0].pulse, ok, now, reason, self.settings):
            return False
        if ok:
            self._ramp(targets, now)
        self._changed()
        self.on_turn(pod, ok)
        return True

    def healthy(self, pod: Pod) -> bool:
        """May it be asked, as far as health goes? False where it is gone."""
        targets = self._pods.get(pod)
        return targets is not None and targets[0].pulse.healthy

    def answered(self, target: Target, now: float) -> None:
        """An answer began there: traffic says that it works, whatever a probe said before."""
        target.signs += 1
        if not target.pulse.sound and self._has(target):
            self.mark_health(target.worker.pod, True, now)

    def refused(self, target: Target, now: float, reason: str) -> bool:
        """Nobody listens there, traffic says. True where its health changed by it; the last one of
        its kind is not given up for it: a probe must say so too."""
        pod = target.worker.pod
        roles = {target.role, Role.BOTH}  # a unified worker is in need of nobody else
        others = [one for role in roles for one in self.selectable(role, target.model)]
        if not self._has(target) or all(other.worker.pod == pod for other in others):
            return False
        return self.mark_health(pod, False, now, reason)

    def returned(self, worker: Worker, now: float) -> None:
        """Its circuit closed: it takes load gradually."""
        if (target := self.target(worker)) is not None:
            self._ramp((target,), now)

    def mark_lost(self, pod: Pod, lost: Lost) -> bool:
        """No decode could find it: no new requests. True where that is news."""
        targets = self._pods.get(pod)
        if targets is None:
            return False
        before, targets[0].pulse.lost = targets[0].pulse.lost, lost
        self._changed()
        return before != lost

    def mark_found(self, pod: Pod, shape: Shape) -> bool:
        """Its ranks are registered, in this shape. True where it could not be found before."""
        targets = self._pods.get(pod)
        if targets is None:
            return False
        before, targets[0].pulse.lost = targets[0].pulse.lost, None
        for target in targets:
            target.up = replace(target.up, shape=shape)
        self._changed()
        return before is not None

    # What the gateway asks ------------------------------------------------------------------

    def pods(self) -> tuple[WorkerUp, ...]:
        """Facts of all pods."""
        return tuple(targets[0].up for targets in self._pods.values())

    def targets(self, role: Role | None = None) -> tuple[Target, ...]:
        """All targets (of a role), well or not."""
        found = (target for targets in self._pods.values() for target in targets)
        return tuple(target for target in found if role in (None, target.role))

    def target(self, worker: Worker) -> Target | None:
        """One target, or None where it is gone."""
        targets = self._pods.get(worker.pod, ())
        return targets[worker.dp_rank] if worker.dp_rank < len(targets) else None

    def asked_for(self, name: str) -> tuple[str, int]:
        """The model behind a name that is asked for (an adapter's base; the name itself where
        nobody has it), and the longest context of any worker of it; 0 where one does not say."""
        found = self._asked.get(name)
        if found is None:
            ups = self.pods()
            base = next((up.model for up in ups if name in (up.model, *up.adapters)), name)
            limits = [up.max_tokens or 0 for up in ups if not base or up.model in ("", base)]
            found = base, max(limits) if limits and all(limits) else 0
            if len(self._asked) < 1024:
                self._asked[name] = found
        return found

    def models(self) -> tuple[str, ...]:
        """Names that can be asked for, adapters included."""
        ups = self.pods()
        names = {up.model for up in ups} | {name for up in ups for name in up.adapters}
        return tuple(sorted(names - {""}))

    def selectable(self, role: Role, model: str = "") -> tuple[Target, ...]:
        """Targets of this role that serve this model and may get a request now. "" asks for any
        model: right only where one is served, which `lack` checks."""
        found = self._chosen.get((role, model))
        if found is None:
            found = tuple(t for t in self._wanted(role, model) if t.usable)
            if len(self._chosen) < 1024:  # names come from clients
                self._chosen[role, model] = found
        return found

    def sides(self, model: str = "") -> Sides:
        """Prefills and decodes that may serve this model now, or unified workers and nobody.
        Raises GatewayError where there are none."""
        found = self._sides.get(model)
        if found is None:
            found = self._find_sides(model)
            if len(self._sides) < 1024:
                self._sides[model] = found
        return found

    def lack(self, role: Role, model: str = "") -> GatewayError | None:
        """Why nobody can be selected, as the client is told; None where somebody can."""
        models = self.models()
        if not model and len({up.model for up in self.pods()} - {""}) > 1:
            return GatewayError(
                "invalid_request", f"'model' is needed: one of {', '.join(models)}", "model"
            )
        if self.selectable(role, model):
            return None
        if model and models and not any(target.serves(model) for target in self.targets()):
            known = ", ".join(models)
            return GatewayError("model_not_found", f"no model {model!r} here: {known}", "model")
        code = "no_decode_available" if role is Role.DECODE else "no_prefill_available"
        wanted, waiting = self._wanted(role, model), self._waited(role, model)
        lost = [t.pulse.lost.stage for t in wanted if t.pulse.lost is not None]
        stages = [*lost, *(one.stage for one in waiting if one.stage)]
        why = _why_none(role, wanted, waiting)
        at = Stage.AVAILABILITY if wanted or waiting else Stage.POOL
        return GatewayError(code, why, stage=stages[0] if stages else None, at=at)

    def book(self, worker: Worker, tokens: int) -> Booking:
        """Count load from now on. Raises KeyError where the worker is gone."""
        target = self.target(worker)
        if target is None:
            raise KeyError(f"worker {worker} left the fleet")
        self.load(target, tokens)
        return Booking(target, tokens, True, True)

    def load(self, target: Target, tokens: int) -> None:
        """Load begins on one that was chosen just now; a Booking gives it back."""
        assert tokens >= 0, "load cannot be negative"
        self._turn = target.turn = self._turn + 1
        target.inflight_tokens += tokens
        target.inflight_requests += 1
        target.waiting_requests += 1
        if target.waiting_requests == self.settings.stuck_requests:
            target.signs_seen = -1  # an older silence was not theirs
            self.uneasy.add(target)

    def _find_sides(self, model: str) -> Sides:
        prefills = self.selectable(Role.PREFILL, model)
        decodes = self.selectable(Role.DECODE, model)
        unified = self.selectable(Role.BOTH, model)
        alone = not self.targets(Role.PREFILL) and not self.targets(Role.DECODE)
        if (unified and not (prefills and decodes)) or (alone and self.targets(Role.BOTH)):
            error = self.lack(Role.BOTH, model)
        else:
            error = self.lack(Role.PREFILL, model) or self.lack(Role.DECODE, model)
        if error is not None:
            raise error
        return Sides(prefills, decodes) if prefills and decodes else Sides(unified)

    def _note_life(self, worker: WorkerUp) -> None:
        if worker.generation is None:
            return
        if self._lives.pop(worker.pod, worker.generation) != worker.generation:
            self.on_restart(worker.pod)
        self._lives[worker.pod] = worker.generation
        if len(self._lives) > MOST_LIVES:
            del self._lives[next(iter(self._lives))]

    def _has(self, target: Target) -> bool:
        """Is it of a life that still serves?"""
        return self.target(target.worker) is target

    def _ramp(self, targets: Iterable[Target], now: float) -> None:
        for target in targets:
            target.fresh_since = now
        self.ramping_until = max(self.ramping_until, now + self.settings.ramp_s)

    def _changed(self) -> None:
        """Who can be selected is looked up again."""
        self._chosen.clear()
        self._sides.clear()
        self._asked.clear()

    def _wanted(self, role: Role, model: str) -> tuple[Target, ...]:
        return tuple(t for t in self.targets(role) if not model or t.serves(model))

    def _waited(self, role: Role, model: str) -> list[Waited]:
        found = (one for one in self.waiting() if one.declared.role is role)
        return [one for one in found if not model or one.declared.model in ("", model)]


def _same_life(old: WorkerUp, new: WorkerUp) -> bool:
    return (old.generation, old.dp_size, old.url) == (new.generation, new.dp_size, new.url)


def _why_none(role: Role, wanted: Iterable[Target], waiting: Iterable[Waited]) -> str:
    """A sentence: how many there are and what keeps each."""
    found = [f"{target.worker} {target.trouble}" for target in wanted]
    found += [f"{one.declared.pod} does not serve yet ({one.reason})" for one in waiting]
    kind = "unified" if role is Role.BOTH else role
    if not found:
        return f"no {kind} worker is registered"
    return f"no {kind} worker of {len(found)} can be used: " + ", ".join(found[:8])

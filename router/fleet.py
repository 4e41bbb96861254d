"""Fleet: who can serve, and how much is each doing now?

Pure: time is an argument. discovery/ says who comes and goes, traffic and probes say who is well,
the gateway books load; policies/ read the Targets. Open it to change what makes a worker
selectable or how its load is counted.

    pod (WorkerUp) --- dp rank 0 -> Target    each its own cache, load and circuit
                   \\-- dp rank 1 -> Target    health and draining are the pod's
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

from .errors import GatewayError
from .settings import FleetSettings


@dataclass(slots=True, eq=False)
class Pulse:
    """Health of one pod with hysteresis, and whether it is being emptied."""

    healthy: bool = True
    draining: bool = False
    reason: str = ""  # why not healthy, or the last failure
    since: float = 0.0  # monotonic seconds of the last change
    streak: int = 0  # successes above zero, failures below


@dataclass(slots=True, eq=False)
class Target:
    """One worker as policies see it. Only the fleet and its bookings write to it."""

    worker: Worker
    up: WorkerUp
    pulse: Pulse
    inflight_tokens: int = 0
    inflight_requests: int = 0
    url: str = field(init=False)
    role: Role = field(init=False)
    model: str = field(init=False)

    def __post_init__(self) -> None:
        self.url, self.role, self.model = self.up.url, self.up.role, self.up.model

    @property
    def healthy(self) -> bool:
        """May new requests go there, as far as health goes?"""
        return self.pulse.healthy

    @property
    def draining(self) -> bool:
        """Is it finishing what it has, taking nothing new?"""
        return self.pulse.draining

    @property
    def bootstrap_host(self) -> str:
        """Where its rank directory answers: as declared, else the host of its URL; no brackets."""
        return self.up.bootstrap_host or urlsplit(self.up.url).hostname or ""

    def serves(self, model: str) -> bool:
        """Does it answer to this name? One whose model is not known yet answers to all."""
        return not self.model or model == self.model or model in self.up.adapters

    def __repr__(self) -> str:
        state = "draining" if self.draining else "healthy" if self.healthy else "unhealthy"
        load = f"{self.inflight_tokens} tokens in {self.inflight_requests}"
        return f"<{self.worker} {self.role} {self.model or '?'} {state} {load}>"


class Booking:
    """Load of one leg on one target, from selection on. release() counts once, however often."""

    __slots__ = ("_open", "target", "tokens")

    def __init__(self, target: Target, tokens: int) -> None:
        assert tokens >= 0, "load cannot be negative"
        self.target, self.tokens, self._open = target, tokens, True
        target.inflight_tokens += tokens
        target.inflight_requests += 1

    def release(self) -> None:
        """Give the load back."""
        if self._open:
            self._open = False
            self.target.inflight_tokens -= self.tokens
            self.target.inflight_requests -= 1

    def __enter__(self) -> Booking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()


class Fleet:
    """All pods we were told of, in order of name."""

    def __init__(self, settings: FleetSettings | None = None) -> None:
        self._settings = settings or FleetSettings()
        self._pods: dict[Pod, tuple[Target, ...]] = {}  # never empty
        self._chosen: dict[tuple[Role, str], tuple[Target, ...]] = {}  # selectable(), remembered

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
            pulse = Pulse(since=now)
            ranks = range(max(1, worker.dp_size))
            fresh = tuple(Target(Worker(worker.pod, rank), worker, pulse) for rank in ranks)
            self._pods = dict(sorted({**self._pods, worker.pod: fresh}.items()))
        self._chosen.clear()

    def down(self, pod: Pod) -> None:
        """A pod is gone; what is booked on it is released into nothing."""
        self._pods.pop(pod, None)
        self._chosen.clear()

    def drain(self, pod: Pod, draining: bool = True) -> None:
        """Take no new requests there (or again); running ones finish."""
        for target in self._pods.get(pod, ()):
            target.pulse.draining = draining
        self._chosen.clear()

    def mark_health(self, pod: Pod, ok: bool, now: float, reason: str = "") -> bool:
        """One sign of life or of trouble. True where the pod's health changed by it."""
        targets = self._pods.get(pod)
        if targets is None or not beat(targets[0].pulse, ok, now, reason, self._settings):
            return False
        self._chosen.clear()
        return True

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
            found = tuple(t for t in self._wanted(role, model) if t.healthy and not t.draining)
            if len(self._chosen) < 1024:  # names come from clients
                self._chosen[role, model] = found
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
        return GatewayError(code, _why_none(role, self._wanted(role, model)))

    def book(self, worker: Worker, tokens: int) -> Booking:
        """Count load from now on. Raises KeyError where the worker is gone."""
        target = self.target(worker)
        if target is None:
            raise KeyError(f"worker {worker} left the fleet")
        return Booking(target, tokens)

    def _wanted(self, role: Role, model: str) -> tuple[Target, ...]:
        return tuple(t for t in self.targets(role) if not model or t.serves(model))


def beat(pulse: Pulse, ok: bool, now: float, reason: str, settings: FleetSettings) -> bool:
    """Move a pulse by one sign; True where `healthy` changed.

    failures 3, successes 2:   healthy - - - unhealthy + - + + healthy
    """
    pulse.streak = max(pulse.streak, 0) + 1 if ok else min(pulse.streak, 0) - 1
    if not ok:
        pulse.reason = reason
    turned = (
        not pulse.healthy and pulse.streak >= settings.successes
        if ok
        else pulse.healthy and -pulse.streak >= settings.failures
    )
    if turned:
        pulse.healthy, pulse.since = ok, now
        pulse.reason = "" if ok else reason
    return turned


def _same_life(old: WorkerUp, new: WorkerUp) -> bool:
    return (old.generation, old.dp_size, old.url) == (new.generation, new.dp_size, new.url)


def _why_none(role: Role, wanted: Iterable[Target]) -> str:
    """A sentence: how many there are and what keeps each."""
    found = list(wanted)
    if not found:
        return f"no {role} worker is registered"
    each: Callable[[Target], str] = lambda t: (  # noqa: E731
        f"{t.worker} draining" if t.draining else f"{t.worker} unhealthy ({t.pulse.reason or '?'})"
    )
    return f"no {role} worker of {len(found)} can be used: " + ", ".join(map(each, found[:8]))

"""Target: one worker as policies see it: facts, health, load.

Pure: time is an argument. fleet.py makes Targets and moves their pulse; a Booking is the load of
one leg. Open it to change what makes a worker usable, how its load is counted, how one that is
new or back takes load gradually, or how often those that may be stuck are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

import msgspec

from kvplane.bootstrap import local
from kvplane.vocabulary import Knowledge, Role, Stage, Worker, WorkerUp

from .handoffs import way
from .settings import FleetSettings

LONG_AGO = float("-inf")
LOOKS = 30  # at who may be stuck, in the time after which it is

Judged = tuple[Knowledge, str]  # how far a worker is believed, and why


@dataclass(frozen=True, slots=True)
class Lost:
    """Why no decode could find a prefill at its rank directory."""

    stage: Stage
    reason: str

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}"


@dataclass(slots=True, eq=False)
class Pulse:
    """Health of one pod with hysteresis, whether it is being emptied, whether it can be found."""

    healthy: bool = True
    draining: bool = False
    lost: Lost | None = None
    reason: str = ""  # why not healthy, or the last failure
    since: float = 0.0  # monotonic seconds of the last change
    streak: int = 0  # successes above zero, failures below
    sound: bool = True  # healthy, and its last sign was no failure


@dataclass(slots=True, eq=False)
class Target:
    """One worker as policies see it. Only the fleet and its bookings write to it."""

    worker: Worker
    up: WorkerUp
    pulse: Pulse
    inflight_tokens: int = 0
    inflight_requests: int = 0
    waiting_requests: int = 0  # of them: those whose answer did not begin yet
    turn: int = 0  # when it was last taken, in requests of the whole fleet: who is next in turn
    fresh_since: float = LONG_AGO  # monotonic seconds since which it takes load gradually
    busy_until: float = LONG_AGO  # it asked to be left alone until then
    signs: int = 0  # answers that began, refusals included: whatever shows that it works at all
    name: str = field(init=False)
    url: str = field(init=False)
    role: Role = field(init=False)
    model: str = field(init=False)
    way: str = field(init=False)  # of HANDOFFS, in which it takes part
    deaf: Judged | None = field(init=False)  # what is known of its blocks, where it has no events
    bootstrap_host: str = field(init=False)  # where its rank directory answers; no brackets
    signs_seen: int = -1  # at the last look; -1: it was not looked at since so many wait
    quiet_since: float = 0.0  # monotonic seconds of that look, if none was seen since

    def __post_init__(self) -> None:
        self.name = str(self.worker)
        self.url, self.role, self.model = self.up.url, self.up.role, self.up.model
        self.way, self.bootstrap_host = way(self.up), bootstrap_host(self.up)
        off = Knowledge.OFF, f"events of {self.worker} are not configured"
        self.deaf = None if self.up.events else off

    @property
    def healthy(self) -> bool:
        """May new requests go there, as far as health goes?"""
        return self.pulse.healthy

    @property
    def draining(self) -> bool:
        """Is it finishing what it has, taking nothing new?"""
        return self.pulse.draining

    @property
    def trouble(self) -> str:
        """What keeps new requests away from it; "" where nothing does."""
        if self.pulse.draining:
            return "draining"
        if not self.pulse.healthy:
            return f"unhealthy ({self.pulse.reason or '?'})"
        return str(self.pulse.lost or "")

    @property
    def usable(self) -> bool:
        """May it get a new request now?"""
        return self.pulse.healthy and not self.pulse.draining and self.pulse.lost is None

    def serves(self, model: str) -> bool:
        """Does it answer to this name? One whose model is not known yet answers to all."""
        return not self.model or model == self.model or model in self.up.adapters

    def share(self, now: float, settings: FleetSettings) -> float:
        """Of the load others have, what this one should: from `ramp_least` to 1 over `ramp_s`."""
        age = now - self.fresh_since
        if age >= settings.ramp_s:
            return 1.0
        return settings.ramp_least + (1 - settings.ramp_least) * max(0.0, age) / settings.ramp_s

    def stuck(self, now: float, settings: FleetSettings) -> bool:
        """Do several requests wait there, and none got a sign of life for long? Health checks may
        well say 200 meanwhile. Looked at when somebody is chosen (Uneasy.look); the first look
        since so many wait sets the time."""
        if self.waiting_requests < settings.stuck_requests:
            return False
        if self.signs != self.signs_seen:
            self.signs_seen, self.quiet_since = self.signs, now
        return now - self.quiet_since >= settings.stuck_s

    def __repr__(self) -> str:
        well = "lost" if self.pulse.lost else "healthy"
        state = "draining" if self.draining else well if self.healthy else "unhealthy"
        load = f"{self.inflight_tokens} tokens in {self.inflight_requests}"
        return f"<{self.worker} {self.role} {self.model or '?'} {state} {load}>"


class Uneasy(set[Target]):
    """Those that may be stuck, or asked to be left alone; usually nobody, and then nobody looks."""

    late = False  # one of them has to be left out
    again = LONG_AGO  # no other one has to be before this

    def busy(self, target: Target, until: float) -> None:
        """It asked to be left alone until then."""
        target.busy_until, self.late = until, True
        self.add(target)

    def look(self, now: float, settings: FleetSettings) -> None:
        """Let go of those that are as others again. Looked so often that no silence is seen much
        too late, and not for each request: many may wait at each of many."""
        if now < self.again:
            return
        self.late, self.again = False, now + settings.stuck_s / LOOKS
        for target in tuple(self):
            if now < target.busy_until or target.stuck(now, settings):
                self.late = True
            elif target.waiting_requests < settings.stuck_requests:
                self.discard(target)
            else:
                self.again = min(self.again, target.quiet_since + settings.stuck_s)


def bootstrap_host(up: WorkerUp) -> str:
    """Where a prefill's rank directory answers: without brackets, and never a wildcard: a worker
    that is reached at one is on this machine."""
    return up.bootstrap_host or local(urlsplit(up.url).hostname or "")


class Booking(msgspec.Struct, eq=False, gc=False):
    """Load of one leg on one target, from `Fleet.load` on. release() counts once, however often."""

    target: Target
    tokens: int
    open: bool
    waiting: bool  # for its answer to begin

    def began(self) -> None:
        """Its answer begins: it waits no more."""
        if self.waiting:
            self.waiting = False
            self.target.waiting_requests -= 1

    def release(self) -> None:
        """Give the load back."""
        if self.open:
            self.open, target = False, self.target
            target.inflight_tokens -= self.tokens
            target.inflight_requests -= 1
            if self.waiting:
                target.waiting_requests -= 1

    def __enter__(self) -> Booking:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()


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
    pulse.sound = ok and pulse.healthy
    return turned

"""Availability: who of those that serve is asked now?

Pure: time is an argument. Between fleet.py (who is well) and policies/ (in which order): circuits
that are open, workers that failed this very request, or asked to be left alone, or where everything
waits. Open it to change who is left out, and what is done where nobody would be left.

    open circuit        left out; where all of one side are: unified workers serve, and where there
                        is none, asked again soon, and the caller is told when
    failed this request |
    busy, it said       left out as long as others can serve, unified workers included: the last one
    stuck               | is never refused for it

One that is new, or back, is not left out: the policies give it a smaller share (Candidate.share).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from kvplane.vocabulary import Role, Stage, Worker

from .breaker import Breakers
from .depths import NOTHING
from .errors import GatewayError
from .fleet import Fleet
from .foretold import Depth
from .policies import Candidate
from .settings import FleetSettings
from .sides import Sides
from .target import Target


class AllShut(GatewayError):
    """Every circuit of a role is open. `wait_s`: until the first of them is tried again."""

    def __init__(self, targets: Sequence[Target], wait_s: float) -> None:
        role = targets[0].role
        side = "decode" if role is Role.DECODE else "prefill"
        super().__init__(
            f"no_{side}_available",
            f"every {role} worker failed too often lately; the next is tried in {wait_s:.0f} s",
            retry_after=f"{max(1, round(wait_s))}",
            at=Stage.AVAILABILITY,
        )
        self.wait_s, self.alone = wait_s, len(targets) == 1


def available(
    targets: Sequence[Target],
    breakers: Breakers,
    settings: FleetSettings,
    now: float,
    without: Collection[Worker] = (),
) -> Sequence[Target]:
    """Those that may be asked, never nobody. Raises AllShut."""
    if not (breakers.shut or without):
        few = settings.stuck_requests
        for target in targets:
            if now < target.busy_until or (
                target.waiting_requests >= few and target.stuck(now, settings)
            ):
                break
        else:
            return targets
    found = targets
    if breakers.shut:
        found = [target for target in targets if breakers.admits(target.worker, now)]
        if not found:
            workers = [target.worker for target in targets]
            breakers.hasten(workers, now)
            if (wait_s := breakers.wait_s(workers, now)) > 0:
                raise AllShut(targets, wait_s)
            found = [target for target in targets if breakers.admits(target.worker, now)]
    if without:
        found = [target for target in found if target.worker not in without] or found
    late = [t for t in found if now < t.busy_until or t.stuck(now, settings)]
    if late and len(late) < len(found):
        return [target for target in found if target not in late]
    return found


def left(
    both: Sides,
    breakers: Breakers,
    now: float,
    without: Collection[Worker],
    calm: FleetSettings | None = None,
) -> bool:
    """Is there somebody on each side who may be asked and is none of `without`? `calm`: nor one
    that asked to be left alone or is stuck, as these settings have it."""

    def may(t: Target) -> bool:
        if t.worker in without or not breakers.admits(t.worker, now):
            return False
        return calm is None or not (now < t.busy_until or t.stuck(now, calm))

    return all(any(map(may, side)) for side in both if side)


def served(
    sides: Sides,
    fleet: Fleet,
    model: str,
    breakers: Breakers,
    now: float,
    without: Collection[Worker],
) -> Sides:
    """Pairs; unified workers where only they are left, or only they are not busy."""
    if fleet.uneasy:
        fleet.uneasy.look(now, fleet.settings)
    calm = fleet.settings if fleet.uneasy.late else None
    if not (without or breakers.shut or calm) or not sides.decodes:
        return sides
    if left(sides, breakers, now, without, calm):
        return sides
    whole = unified(fleet, model, breakers, now, without, calm)
    if whole is None and calm is not None and not left(sides, breakers, now, without):
        whole = unified(fleet, model, breakers, now, without)
    return whole or sides


def unified(
    fleet: Fleet,
    model: str,
    breakers: Breakers,
    now: float,
    without: Collection[Worker],
    calm: FleetSettings | None = None,
) -> Sides | None:
    """Those that do both, where one of them is left."""
    found = Sides(fleet.selectable(Role.BOTH, model))
    return found if found.prefills and left(found, breakers, now, without, calm) else None


def candidates(
    targets: Sequence[Target],
    depths: Mapping[Worker, Depth],
    settings: FleetSettings,
    now: float,
    ramping: bool = False,
) -> list[Candidate]:
    """What the policies are told of each. A share counts only beside somebody who has a whole one:
    where all are new, all are equal."""
    found = [
        Candidate(target, depth.blocks, depth.tokens)
        if (depth := depths.get(target.worker, NOTHING)).blocks
        else Candidate(target)
        for target in targets
    ]
    if not ramping:
        return found
    shares = [target.share(now, settings) for target in targets]
    if max(shares, default=1.0) < 1.0:
        return found
    return [replace(one, share=share) for one, share in zip(found, shares, strict=True)]

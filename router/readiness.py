"""Readiness: could a request be served now, and which models could?

Pure: time is an argument. GET /readiness and GET /v1/models show it: a process that lives is not
yet one that serves. Open it to change what is needed to be ready.

    ready      a prefill and a decode, or a unified worker, that may be asked
    degraded   the same, but what is known of caches is not kept up to date
    not ready  503: which side is missing, and what keeps its workers
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvplane.vocabulary import Role, Worker

from .breaker import Breakers, State
from .fleet import Fleet
from .target import Target

DOWN_S = 1.0  # shorter absences of the index store change nothing


def readiness(
    fleet: Fleet, breakers: Breakers, now: float, store_down_s: float
) -> tuple[bool, dict[str, Any]]:
    """Ready or not, and the answer's body."""
    states, targets = breakers.states(now), fleet.targets()
    asked = [target for target in targets if _askable(target, states)]
    counts = {"healthy_workers": len(asked), "total_workers": len(targets)}
    if lacking := _lacking({target.role for target in asked}):
        reason = "; ".join(_why(side, targets, states) for side in lacking)
        return False, {"status": "not ready", "reason": reason, **counts}
    if reason := _apart(targets, asked, states):
        return False, {"status": "not ready", "reason": reason, **counts}
    if store_down_s > DOWN_S:
        reason = f"the index store does not answer since {store_down_s:.0f} s"
        return True, {"status": "degraded", "reason": reason, **counts}
    return True, {"status": "ready", **counts}


def marks(fleet: Fleet, breakers: Breakers, now: float, name: str) -> dict[str, Any]:
    """What a model's entry says: can it be served by a pair, or by a unified worker?"""
    states = breakers.states(now)
    serving = [target for target in fleet.targets() if target.serves(name)]
    lacking = _lacking({target.role for target in serving if _askable(target, states)})
    if not lacking:
        return {"ready": True}
    reason = "; ".join(_why(side, serving, states) for side in lacking)
    return {"ready": False, "reason": reason}


def _apart(targets: Sequence[Target], asked: Sequence[Target], states: dict[Worker, State]) -> str:
    """Why no model has all it needs though each side has somebody; "" where one has."""
    lacking = dict[str, list[Role]]()
    for name in sorted({one.model for one in asked if one.model} or {""}):
        lacking[name] = _lacking({one.role for one in asked if one.serves(name)})
        if not lacking[name]:
            return ""  # one is enough: every scrape asks, and models may be many
    return "; ".join(
        f"model {name!r}: {_why(side, [one for one in targets if one.serves(name)], states)}"
        for name, sides in lacking.items()
        for side in sides
    )


def _askable(target: Target, states: dict[Worker, State]) -> bool:
    return target.usable and states.get(target.worker) is not State.OPEN


def _lacking(roles: set[Role]) -> list[Role]:
    """The sides nobody can serve; none where a unified worker does it all."""
    if Role.BOTH in roles:
        return []
    return [side for side in (Role.PREFILL, Role.DECODE) if side not in roles]


def _why(side: Role, targets: Iterable[Target], states: dict[Worker, State]) -> str:
    """A sentence: what keeps each of them."""
    kept = [
        f"{target.worker} {target.trouble or 'failed too often: its circuit is open'}"
        for target in targets
        if target.role is side
    ]
    return f"no healthy {side}" + (f": {', '.join(kept[:8])}" if kept else "")

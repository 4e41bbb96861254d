"""Picture: the whole plane at one moment, as the page draws it.

Edge: looks at the gateway's parts and changes none; time is an argument. door.py sends it a few
times a second to whoever watches, and makes none where nobody does. Open it to show something more.

    totals    counters since the start: the page makes rates of their differences
    recent    shares and times of the last requests
    workers   one line each (lines.py)       requests   the newest, newest first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..evidence import Ledger
from ..fleet import Waited
from ..gateway import Gateway
from ..meeting import Meeting
from ..readiness import readiness
from ..remembered import UNCHOSEN
from . import lines

MOST_REQUESTS = 40  # listed on the page
MOST_RECENT = 200  # that shares and times are taken of
Json = dict[str, Any]


def picture(
    gateway: Gateway, waiting: Iterable[Waited], lag_ms: float, now: float, wall: float
) -> Json:
    """Everything the page shows live. Holds no prompt, no key and no salt."""
    recent = gateway.ledger.meetings(MOST_RECENT)
    return {
        "at": wall,
        "models": list(gateway.fleet.models()),
        "policies": {
            "prefill": gateway.settings.prefill_policy,
            "decode": gateway.settings.decode_policy,
        },
        "state": state(gateway),
        "totals": totals(gateway),
        "recent": shares(recent),
        "rooms_open": gateway.ledger.open_rooms,
        "lag_ms": round(lag_ms, 1),
        "store_down_s": round(gateway.loop.store_down_s(), 1),
        "workers": lines.workers(gateway, waiting, now, wall),
        "requests": [request(meeting) for meeting in newest(gateway.ledger, recent)],
    }


def newest(ledger: Ledger, recent: Sequence[Meeting]) -> list[Meeting]:
    """Attempts as they began, newest first, those included for which nobody could be chosen."""
    found = [*recent[:MOST_REQUESTS], *ledger.refusals(MOST_REQUESTS)]
    return sorted(found, key=lambda meeting: meeting.begun, reverse=True)[:MOST_REQUESTS]


def state(gateway: Gateway) -> Json:
    """Could a request be served now? As GET /readiness judges it."""
    now, down_s = gateway.clock.now(), gateway.loop.store_down_s()
    ready, told = readiness(gateway.fleet, gateway.breakers, now, down_s)
    return {"ready": ready, "reason": told.get("reason", "")}


def totals(gateway: Gateway) -> Json:
    """Answers by how they ended, and tokens, since the process began."""
    metrics = gateway.metrics
    ended = {"ok": 0.0, "refused": 0.0, "failed": 0.0, "gone": 0.0}
    for labels, value in lines.samples(metrics.requests):
        ended[_kind(labels.get("status", ""))] += value
    return {
        **{kind: int(count) for kind, count in ended.items()},
        "retries": int(sum(value for _, value in lines.samples(metrics.retries))),
        "prompt_tokens": int(sum(value for _, value in lines.samples(metrics.prompt_tokens))),
    }


def _kind(status: str) -> str:
    if not status.isdecimal():
        return "gone"
    return "ok" if status < "400" else "refused" if status < "500" else "failed"


def shares(meetings: Sequence[Meeting]) -> Json:
    """Hit share (cached tokens over prompt tokens, both as told), what was foretold, and times."""
    told = [
        (
            (meeting.why and meeting.why.prompt_tokens) or 0,
            meeting.predicted_tokens,
            meeting.actual_tokens,
        )
        for meeting in meetings
        if meeting.predicted_tokens is not None and meeting.actual_tokens is not None
    ]
    prompt, predicted, actual = (sum(each[at] or 0 for each in told) for at in range(3))
    first = sorted(m.first_byte_s for m in meetings if m.first_byte_s is not None)
    return {
        "count": len(meetings),
        "compared": len(told),
        "prompt_tokens": prompt,
        "predicted_tokens": predicted,
        "actual_tokens": actual,
        "hit_share": round(actual / prompt, 4) if prompt else None,
        "first_byte_p50_s": quantile(first, 0.5),
        "first_byte_p95_s": quantile(first, 0.95),
    }


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share lies (nearest rank); None of nothing.

    [1, 2, 3, 4], 0.5 -> 2        [1, 2, 3, 4], 0.95 -> 4
    """
    if not ordered:
        return None
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def request(meeting: Meeting) -> Json:
    """One attempt in a line: who, how deep, how long, and how it ended."""
    error, why = meeting.error or {}, meeting.why or UNCHOSEN
    return {
        "request_id": meeting.request_id,
        "attempt": meeting.attempt,
        "rooms": [str(room) for room in meeting.rooms[:4]],  # text: 64-bit numbers break JavaScript
        "more_rooms": max(0, len(meeting.rooms) - 4),
        "at": meeting.opened_at,
        "path": meeting.path,
        "model": meeting.model,
        "outcome": meeting.outcome,
        "prefill": meeting.prefill and meeting.prefill.worker,
        "decode": meeting.decode and meeting.decode.worker,
        "held_blocks": why.depth_blocks,
        "asked_blocks": why.asked_blocks,
        "knowledge": why.knowledge,
        "predicted_tokens": meeting.predicted_tokens,
        "actual_tokens": meeting.actual_tokens,
        "first_byte_s": meeting.first_byte_s,
        "duration_s": meeting.duration_s,
        "code": error.get("code"),
        "stage": error.get("stage"),
    }

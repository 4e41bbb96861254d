"""Patterns: what many attempts show together, and none of them alone.

Pure. Rules of diagnosis.py over the newest attempts. Open it to add one.

    stuck          several wait at a worker for long, and nothing of it ended meanwhile
    clients-leave  most requests end by the client's leaving: they give up before an answer begins
    one-culprit    most failures have one worker in common, beside workers that do well
    no-such-route  a worker refuses all that it is asked: it is no engine (key-refused: it wants
                   another key; full: it says that it is)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from kvplane.vocabulary import Stage

from .findings import MOST_NAMED, Finding, Rule
from .meeting import Meeting

NONE: Mapping[str, str] = {}
STUCK_S = 15.0  # nobody waits so long in silence while others pass
STUCK = 3  # that wait; fewer may be one very long prompt
LEFT = 10  # requests that were left, and more than were answered
SHARED = 10  # failures before a common worker is looked for
SHARE = 0.8  # of them it must be part of
REFUSED = 3  # refusals in a row, and nothing else, of one worker
_STRANGER: tuple[Rule, str, str] = (
    "no-such-route",
    "no such route or model is there",
    "see what answers at its URL: name an engine's own HTTP port, with the role it has",
)
_LOCKED: tuple[Rule, str, str] = (
    "key-refused",
    "it wants a key that nobody gave it",
    "give the gateway its key: api_key in its [[workers]] table, or --api-key",
)
_FULL: tuple[Rule, str, str] = (
    "full", "it is full", "add workers, or let fewer in: --max-concurrent-requests"
)  # fmt: skip
REFUSALS = {404: _STRANGER, 405: _STRANGER, 401: _LOCKED, 403: _LOCKED, 429: _FULL}


def patterns(
    meetings: Sequence[Meeting], now: float, queues: Mapping[str, str] = NONE
) -> Iterable[Finding]:
    """All of them; `meetings` newest first. `queues`: what engines themselves say of theirs."""
    yield from stuck(meetings, now, queues)
    yield from left(meetings)
    yield from common(meetings)
    yield from refuses(meetings)


def stuck(
    meetings: Sequence[Meeting], now: float, queues: Mapping[str, str] = NONE
) -> Iterable[Finding]:
    """Where requests queue and nothing ends. Until a prefill answered they wait for it; after that
    for the decode."""
    waiting: dict[str, list[Meeting]] = {}
    moved: dict[str, float] = {}  # when a worker last brought something to its end
    for one in meetings:
        for name, when in _signs(one):
            moved[name] = max(moved.get(name, 0.0), when)
        if one.outcome == "open" and one.first_byte is None and (name := _waits_for(one)):
            waiting.setdefault(name, []).append(one)
    for name, those in waiting.items():
        old = [one for one in those if now - one.begun >= STUCK_S]
        if len(old) < STUCK or now - moved.get(name, 0.0) < STUCK_S:
            continue
        longest = max(now - one.begun for one in old)
        sentence = (
            f"{len(those)} requests wait at {name}, the oldest for {longest:.0f} s, and nothing of "
            "it ended meanwhile: its queue grows though it may look healthy"
        )
        if own := queues.get(name):
            sentence += f"; its own metrics: {own}"
        step = "look at its log and queues; PUT /workers/ID {draining: true}, or start it again"
        rooms = tuple(str(room) for one in those[:MOST_NAMED] for room in one.rooms)
        yield Finding(
            f"worker {name}",
            True,
            sentence,
            name,
            step,
            Stage.FIRST_BYTE,
            "stuck",
            rooms,
            len(those),
        )


def _waits_for(meeting: Meeting) -> str:
    side = meeting.decode
    if meeting.prefill is not None and meeting.prefill_ended is None:
        side = meeting.prefill
    return side.worker if side is not None else ""


def _signs(meeting: Meeting) -> Iterable[tuple[str, float]]:
    """When each of its workers last brought something to its end."""
    if meeting.prefill is not None and meeting.prefill_ended is not None:
        yield meeting.prefill.worker, meeting.prefill_ended
    if meeting.first_byte is not None:
        for party in meeting.parties:
            yield party.worker, meeting.ended or meeting.first_byte


def left(meetings: Sequence[Meeting]) -> Iterable[Finding]:
    """Clients that give up before an answer begins."""
    over = [one for one in meetings if one.outcome != "open"]
    gone = [one for one in over if one.outcome == "client_gone" and one.first_byte is None]
    if len(gone) < LEFT or 2 * len(gone) <= len(over):
        return
    waited = sorted((one.ended or one.begun) - one.begun for one in gone)[len(gone) // 2]
    at = Counter(filter(None, map(_waits_for, gone))).most_common(1)
    name = at[0][0] if at else "plane"
    sentence = (
        f"{len(gone)} of the last {len(over)} requests were left by their clients before an answer "
        f"began, half of them within {waited:.1f} s; most waited for {name}"
    )
    step = "let clients wait longer, add workers, or limit what is taken: --max-concurrent-requests"
    rooms = tuple(str(room) for one in gone[:MOST_NAMED] for room in one.rooms)
    yield Finding(
        "plane", False, sentence, name, step, Stage.FIRST_BYTE, "clients-leave", rooms, len(gone)
    )


def common(meetings: Sequence[Meeting]) -> Iterable[Finding]:
    """A worker that is part of most failures, while others do well without it."""
    failed = [one for one in meetings if one.outcome == "failed" and one.rooms]
    if len(failed) < SHARED:
        return
    seen: Counter[str] = Counter()
    for one in failed:
        seen.update(_workers(one))
    name, count = seen.most_common(1)[0]
    others = [one for one in meetings if one.outcome == "ok" and name not in _workers(one)]
    if count < SHARE * len(failed) or not others or seen.most_common(2)[-1][1] == count:
        return
    sentence = f"{name} is part of {count} of the last {len(failed)} failures; others do well"
    step = f"take {name} out (PUT /workers/ID) and look at its log and network"
    rooms = tuple(str(room) for one in failed[:MOST_NAMED] for room in one.rooms)
    yield Finding(
        f"worker {name}", False, sentence, name, step, Stage.FIRST_BYTE, "one-culprit", rooms, count
    )


def refuses(meetings: Sequence[Meeting]) -> Iterable[Finding]:
    """A worker of which every request lately was told that there is no such thing, or no such key.
    One that answers others is right: then the caller is wrong."""
    rows: dict[str, list[Meeting]] = {}
    other: set[str] = set()  # those that did something else since
    for one in meetings:
        name = _refuser(one)
        if name and name not in other:
            rows.setdefault(name, []).append(one)
        elif one.outcome not in ("open", "client_gone"):
            other |= _workers(one)
    for name, those in rows.items():
        if len(those) >= REFUSED:
            yield _refuses(name, those)


def _refuses(name: str, those: Sequence[Meeting]) -> Finding:
    error = those[0].error or {}
    rule, why, step = REFUSALS[error["status"]]
    sentence = f"{error['message']} (so were the last {len(those)} requests answered): {why}"
    rooms = tuple(str(room) for one in those[:MOST_NAMED] for room in one.rooms)
    blocks = any(one.stopped for one in those)  # nobody else took them
    return Finding(
        f"worker {name}", blocks, sentence, name, step, Stage.FIRST_BYTE, rule, rooms, len(those)
    )


def _refuser(meeting: Meeting) -> str:
    """The worker that refused this one so; "" where none did."""
    error = meeting.error or {}
    if meeting.outcome != "rejected" or error.get("status") not in REFUSALS:
        return ""
    side = meeting.prefill if error.get("side") == "prefill" else meeting.decode
    return side.worker if side is not None else ""


def _workers(meeting: Meeting) -> set[str]:
    return {party.worker for party in meeting.parties}

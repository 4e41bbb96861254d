"""Fitness: may this Redis keep an index at all?

Edge: warns in the log; else pure over what INFO answered. redis.py asks at start. Open it to judge
one more setting.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from redis.exceptions import AuthenticationError, NoPermissionError

from ..errors import StoreDown, StoreUnfit

log = logging.getLogger(__name__)

WANT = "noeviction"


def facts(answer: bytes) -> dict[str, str]:
    """INFO's lines; values stay text."""
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def judge(answers: Sequence[tuple[str, bytes]]) -> None:
    """Raises StoreUnfit for a server that throws keys away when its memory is full."""
    for name, answer in answers:
        found = facts(answer)
        policy, most = found.get("maxmemory_policy", WANT), found.get("maxmemory", "0")
        if policy == WANT:
            continue
        if most != "0":
            raise StoreUnfit(
                name,
                f"maxmemory-policy is {policy} with maxmemory {most} bytes: it would throw parts "
                f"of the index away unseen; must be {WANT}",
            )
        log.warning(
            "store maxmemory-policy=%s without maxmemory at=%s action=go on: set %s before a limit",
            policy, name, WANT,
        )  # fmt: skip


def let_in(error: StoreDown) -> None:
    """Raises StoreUnfit where the server answers and refuses us: waiting would not help."""
    cause = error.__cause__
    if isinstance(cause, AuthenticationError):
        wrong = "the user and password of the URL must be right, redis://USER:PASSWORD@HOST:PORT/DB"
    elif isinstance(cause, NoPermissionError):
        wrong = "the user must be allowed this command"
    elif "DB index" in str(cause):
        wrong = "the number behind the URL's last / must be one of its databases"
    else:
        return
    raise StoreUnfit(error.store, f"it refuses us ({cause}): {wrong}") from error


def refusal(answers: Sequence[tuple[str, bytes]]) -> str:
    """Why one of the servers takes no writes; "" where each does. Nothing to end a process for: a
    replica becomes a master, and memory is given."""
    for name, answer in answers:
        found = facts(answer)
        used, most = int(found.get("used_memory", 0)), int(found.get("maxmemory", 0))
        if 0 < most <= used:
            return f"{name} is full: {used} bytes of maxmemory {most}"
        if found.get("role") == "slave" and found.get("slave_read_only", "1") == "1":
            return (
                f"{name} is a read-only replica of {found.get('master_host')}:"
                f"{found.get('master_port')}"
            )
    return ""


def evicted(answers: Sequence[tuple[str, bytes]]) -> int:
    """Keys thrown away since the servers started."""
    return sum(int(facts(answer).get("evicted_keys", 0)) for _, answer in answers)

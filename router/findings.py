"""Findings: one thing that is wrong, and what is said of each stage.

Pure: a noun and a table. diagnosis.py and its parts make them, GET /diagnosis, the page and
`kvplane doctor` show them. docs/operators.md has a row for each rule. Open it to add a rule, or a
stage's culprit or next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvplane.vocabulary import Stage

from .meeting import ORDER

MOST_NAMED = 5  # rooms of one finding

Rule = Literal[
    "gateway-full", "pool-empty", "pool-down", "wrong-role", "drained", "unhealthy", "circuit-open",
    "nobody-chosen", "no-tokens", "tokenizer-differs", "no-events", "no-ingest", "store-refuses",
    "stream-silent", "stream-partial", "drift", "store-away", "store-evicts", "shapes-differ",
    "ranks-missing", "wrong-bootstrap-port", "directory-away", "resolve-topology-failed",
    "resolve-rank-failed", "stale-rank", "connection-refused", "connect-failed", "room-mismatch",
    "kv-never-came", "verify-failed",
    "consume-failed", "no-answer", "first-byte-failed", "end-failed", "retries-used-up", "stuck",
    "one-culprit", "clients-leave", "no-such-route", "key-refused", "full",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: where it stops, who did it, and what to do."""

    about: str  # plane | worker NAME | room NUMBER | request ID
    blocks: bool  # do requests fail by it, or are they only served worse?
    sentence: str
    culprit: str
    next_step: str
    stage: Stage  # the first that it blocks, or makes worse
    rule: Rule  # which of the rules says so
    rooms: tuple[str, ...] = ()  # newest first
    count: int = 1  # attempts it is seen in
    model: str = ""  # the one whose requests it keeps from being served; "" = of any

    def shown(self) -> dict[str, Any]:
        """As JSON."""
        told = asdict(self) | {"stage": self.stage.value, "rooms": list(self.rooms[:MOST_NAMED])}
        del told["model"]  # the sentence says it
        return told


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """What blocks first, and of several the one that is earlier in a request's life."""
    return sorted(findings, key=lambda one: (not one.blocks, ORDER[one.stage], -one.count))


# A stage that failed, where its reason tells no more.
FAILED: dict[Stage, Rule] = {
    Stage.RESOLVE_TOPOLOGY: "resolve-topology-failed",
    Stage.RESOLVE_RANK: "resolve-rank-failed",
    Stage.CONNECT: "connect-failed",
    Stage.VERIFY: "verify-failed",
    Stage.CONSUME: "consume-failed",
    Stage.FIRST_BYTE: "first-byte-failed",
    Stage.END: "end-failed",
}

# Who is to blame for a failed stage, and what to do, as long as nobody says it better.
STAGES: dict[Stage, tuple[str, str]] = {
    Stage.POOL: ("plane", "start engines, or name them with --prefill and --decode"),
    Stage.AVAILABILITY: ("plane", "GET /workers tells what keeps each worker from being used"),
    Stage.POLICY_INPUT: ("gateway", "GET /index/workers tells how far each worker is believed"),
    Stage.PAIR: ("plane", "GET /workers tells the shape of each worker; a pair must agree"),
    Stage.REGISTER: (
        "prefill",
        "GET /ranks at the prefill's bootstrap port names the missing coordinates; look at their "
        "processes",
    ),
    Stage.RESOLVE_TOPOLOGY: (
        "prefill",
        "see that the prefill's bootstrap port answers GET /health from the decode's machine and "
        "that all its ranks have registered",
    ),
    Stage.RESOLVE_RANK: (
        "prefill",
        "GET /ranks at the prefill's bootstrap port: the wanted rank must be there under the "
        "present generation",
    ),
    Stage.CONNECT: (
        "prefill",
        "see that the rank's port is open from the decode's machine and that both sides store KV "
        "alike",
    ),
    Stage.VERIFY: (
        "prefill",
        "nothing was consumed; where it repeats, take this prefill out (PUT /workers/ID) and look "
        "at its memory and network",
    ),
    Stage.CONSUME: ("decode", "look at the decode's log and its free pages"),
    Stage.FIRST_BYTE: ("decode", "look at the log of this worker at that time"),
    Stage.END: ("decode", "look at the log of this worker at that time"),
}

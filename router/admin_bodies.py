"""Admin bodies: what /workers takes, and how a worker is shown.

Pure. sgl router's members under its names; what a person noted of a worker (priority, cost, labels)
is kept and shown, and changes nothing here. admin_workers.py has the routes. Open it to change what
of a worker can be seen or set. Source: sgl-router.md section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvplane.vocabulary import Role, WorkerUp

from .errors import GatewayError
from .fleet import Waited
from .target import Target

ROLES = {"prefill": "prefill", "decode": "decode", "regular": "both", "both": "both"}
MEMBERS = {"role": "worker_type", "engine": "runtime", "model": "model_id"}  # of a table, here
TYPES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "regular"}
MOST_TEXT = 4096  # characters of one member
MOST_LABELS = 64


def _plain(text: str) -> str:
    """Text that can be shown and sent anywhere: one bad name would break every later answer."""
    if not text.isprintable():
        raise ValueError("must hold no control characters and no half of a surrogate pair")
    return text


Plain = Annotated[str, Field(max_length=MOST_TEXT), AfterValidator(_plain)]
Sendable = Annotated[str, Field(pattern="^[!-~]*$", max_length=MOST_TEXT)]  # in a header
Count = Annotated[int, Field(ge=1, le=2**31)]
Endpoints = Plain | Annotated[list[Plain], Field(max_length=1024)]


class Notes(BaseModel):
    """What can be told of a worker at any time, as sgl router takes it; unknown members are let
    pass. Health checks are those of the whole gateway here, so theirs are checked and not used."""

    model_config = ConfigDict(extra="allow")
    priority: int | None = Field(default=None, ge=0, le=2**31)
    cost: float | None = Field(default=None, ge=0, le=1e9, allow_inf_nan=False)
    labels: Annotated[dict[Plain, Plain], Field(max_length=MOST_LABELS)] | None = None
    api_key: Sendable | None = Field(default=None, repr=False)
    health_check_timeout_secs: Count | None = None
    health_check_interval_secs: Count | None = None
    health_success_threshold: Count | None = None
    health_failure_threshold: Count | None = None
    disable_health_check: bool | None = None


class Change(Notes):
    """What of a worker can be changed while it runs."""

    draining: bool | None = None


class NewWorker(Notes):
    """A worker to look for."""

    url: Plain
    worker_type: Plain = "regular"
    bootstrap_port: int | None = Field(default=None, ge=1, le=65535)
    model_id: Plain = ""
    runtime: Plain = ""
    events: Endpoints | None = None
    replay: Endpoints | None = None
    block_size: int | None = Field(default=None, ge=1, le=2**20)
    tokenizer: Plain = ""
    handoff: Plain = ""
    draining: bool = False

    def table(self) -> dict[str, Any]:
        """The same as a [[workers]] table."""
        if self.worker_type not in ROLES:
            raise GatewayError(
                "invalid_request",
                f"worker_type {self.worker_type!r}: must be one of {', '.join(ROLES)}",
                "worker_type",
            )
        found = {
            "url": self.url,
            "role": ROLES[self.worker_type],
            "engine": self.runtime,
            "bootstrap_port": self.bootstrap_port,
            "model": self.model_id,
            "events": self.events,
            "replay": self.replay,
            "block_size": self.block_size,
            "tokenizer": self.tokenizer,
            "handoff": self.handoff,
            "draining": self.draining,
            "api_key": self.api_key,
        }
        return {name: value for name, value in found.items() if value not in (None, "", False)}


def called(fault: str, table: Mapping[str, Any]) -> tuple[str, str]:
    """A sentence about a [[workers]] table in the words of the body, and the member it is about.

    engine 'trt': must be ...   ->   runtime 'trt': must be ..., runtime
    """
    word = fault.partition(" ")[0].rstrip(":")
    if word not in table:
        return fault, "url"
    member = MEMBERS.get(word, word)
    return member + fault[len(word) :], member


@dataclass
class Noted:
    """What was noted of one worker."""

    priority: int = 50
    cost: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)

    def take(self, notes: Notes) -> None:
        """Keep what was told, leave the rest."""
        self.priority = self.priority if notes.priority is None else notes.priority
        self.cost = self.cost if notes.cost is None else notes.cost
        self.labels = self.labels if notes.labels is None else notes.labels


def shown(up: WorkerUp, id: str, noted: Noted, healthy: bool, reason: str) -> dict[str, Any]:
    """sgl router's members first, then ours."""
    port = {} if up.bootstrap_port is None else {"bootstrap_port": up.bootstrap_port}
    return {
        "id": id,
        "url": up.url,
        "model_id": up.model,
        "priority": noted.priority,
        "cost": noted.cost,
        "worker_type": TYPES[up.role],
        "is_healthy": healthy,
        "load": 0,
        "connection_mode": "http",
        **port,
        "metadata": dict(noted.labels),
        "disable_health_check": False,
        "pod": up.pod,
        "reason": reason,
        "engine": up.engine,
        "dp_size": up.dp_size,
        "block_size": up.block_size,
        "events": list(up.events),
        "generation": up.generation,
    }


def serving(up: WorkerUp, id: str, noted: Noted, targets: Iterable[Target]) -> dict[str, Any]:
    """A worker of the fleet, with its load over all its ranks."""
    ranks = list(targets)
    first = ranks[0]
    lost = str(first.pulse.lost or "")
    reason = lost if first.healthy else first.pulse.reason
    return shown(up, id, noted, first.healthy and not lost, reason) | {
        "load": sum(target.inflight_requests for target in ranks),
        "inflight_tokens": sum(target.inflight_tokens for target in ranks),
        "draining": first.draining,
        "status": _status(first, sum(target.inflight_requests for target in ranks)),
    }


def _status(first: Target, load: int) -> str:
    """In a word: drained says that it may be taken away now."""
    if first.draining:
        return "draining" if load else "drained"
    return "serving" if first.usable else "not serving"


def expected(one: Waited, id: str, noted: Noted, wall: float) -> dict[str, Any]:
    """A worker that does not serve yet: sgl router shows the job that looks for it."""
    job = {
        "job_type": "AddWorker",
        "worker_url": one.declared.url,
        "status": "processing",
        "message": one.reason,
        "timestamp": int(wall),
    }
    return shown(one.declared, id, noted, False, one.reason) | {"job_status": job}

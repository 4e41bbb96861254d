"""Admin workers: see, add, drain and remove workers at runtime, as sgl router's scripts do.

Door: /workers and /workers/{id}; admin.py mounts it. Discovery does the work behind WorkerDesk.
Needs the admin key, unless the caller is on loopback and no browser or proxy speaks for another.
Open it to change what of a worker can be seen or set.
"""

from __future__ import annotations

import hmac
import ipaddress
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kvplane.vocabulary import Pod, Role, WorkerUp

from .errors import GatewayError
from .fleet import Waited
from .gateway import Gateway

Declare = Callable[[Mapping[str, Any]], WorkerUp]  # a [[workers]] table -> WorkerUp or ValueError
ROLES = {"prefill": "prefill", "decode": "decode", "regular": "both", "both": "both"}
TYPES = {Role.PREFILL: "prefill", Role.DECODE: "decode", Role.BOTH: "regular"}
FOREIGN = ("forwarded", "x-forwarded-for", "x-real-ip", "origin")  # somebody else is behind it


class WorkerDesk(Protocol):
    """What these routes need of discovery."""

    def add(self, worker: WorkerUp) -> None: ...
    async def remove(self, pod: Pod) -> bool: ...
    def waiting(self) -> Sequence[Waited]: ...


def _plain(text: str) -> str:
    """Text that can be shown and sent anywhere: one bad name would break every later answer."""
    if not text.isprintable():
        raise ValueError("must hold no control characters and no half of a surrogate pair")
    return text


Plain = Annotated[str, AfterValidator(_plain)]


class NewWorker(BaseModel):
    """As sgl router takes it; what we do not use is accepted and ignored."""

    model_config = ConfigDict(extra="allow")
    url: Plain
    worker_type: Plain = "regular"
    bootstrap_port: int | None = Field(default=None, ge=1, le=65535)
    model_id: Plain = ""
    runtime: Plain = ""
    events: Plain | list[Plain] | None = None
    replay: Plain | list[Plain] | None = None
    block_size: int | None = Field(default=None, ge=1)
    tokenizer: Plain = ""

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
        }
        return {name: value for name, value in found.items() if value not in (None, "")}


class Change(BaseModel):
    """What of a worker can be changed while it runs."""

    draining: bool | None = None


def worker_id(pod: Pod) -> str:
    """The id sgl router's scripts expect to be a UUID; the same for the same pod, always."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, pod))


def worker_routes(gateway: Gateway, desk: WorkerDesk | None, declare: Declare | None) -> APIRouter:
    """The routes, all behind the admin check."""

    def admin(request: Request) -> None:
        admit(request, gateway.settings.admin_key)

    router = APIRouter(tags=["workers"], dependencies=[Depends(admin)])
    _reading(router, gateway, desk)
    _writing(router, gateway, desk, declare)
    return router


def _reading(router: APIRouter, gateway: Gateway, desk: WorkerDesk | None) -> None:
    @router.get("/workers")
    async def workers() -> dict[str, Any]:
        """All workers, those that do not serve yet included."""
        found = _all(gateway, desk)
        kinds = [worker["worker_type"] for worker in found]
        stats = {f"{kind}_count": kinds.count(kind) for kind in ("prefill", "decode", "regular")}
        return {"workers": found, "total": len(found), "stats": stats}

    @router.get("/workers/{id}")
    async def worker(id: str) -> Any:
        """One worker, by id or pod name."""
        pod = _pod(gateway, desk, id)
        if isinstance(pod, Response):
            return pod
        return next(worker for worker in _all(gateway, desk) if worker["pod"] == pod)


def _writing(
    router: APIRouter, gateway: Gateway, desk: WorkerDesk | None, declare: Declare | None
) -> None:
    @router.post("/workers", status_code=202)
    async def add(new: NewWorker, response: Response) -> dict[str, Any]:
        """Look for a worker from now on; it serves when it answers."""
        if desk is None or declare is None:
            raise GatewayError("forbidden", "this gateway's workers come from discovery only")
        try:
            up = declare(new.table())
            desk.add(up)
        except ValueError as error:
            raise GatewayError("invalid_request", str(error), "url") from None
        response.headers["location"] = f"/workers/{worker_id(up.pod)}"
        return _accepted(up.pod) | {"url": up.url, "location": response.headers["location"]}

    @router.put("/workers/{id}", status_code=202)
    async def change(id: str, change: Change) -> Any:
        """Drain a worker, or take it back in."""
        pod = _pod(gateway, desk, id)
        if isinstance(pod, Response):
            return pod
        if change.draining is not None:
            gateway.fleet.drain(pod, change.draining)
        return _accepted(pod)

    @router.delete("/workers/{id}", status_code=202)
    async def remove(id: str) -> Any:
        """Forget a worker; requests under way finish."""
        pod = _pod(gateway, desk, id)
        if isinstance(pod, Response):
            return pod
        if desk is None:
            raise GatewayError("forbidden", "this gateway's workers come from discovery only")
        await desk.remove(pod)
        return _accepted(pod)


def admit(request: Request, key: str) -> None:
    """Raises GatewayError 401 or 403."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    if key and _equal(given, key):
        return
    if _local(request):
        return
    if not key:
        raise GatewayError("forbidden", "admin routes answer on loopback only: no admin key is set")
    raise GatewayError("invalid_api_key", "the admin key is needed: Authorization: Bearer KEY")


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _local(request: Request) -> bool:
    if any(name in request.headers for name in FOREIGN) or request.client is None:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


def _accepted(pod: Pod) -> dict[str, Any]:
    return {"status": "accepted", "worker_id": worker_id(pod), "message": f"worker {pod}"}


def _pod(gateway: Gateway, desk: WorkerDesk | None, given: str) -> Pod | Response:
    """The pod of an id or name, else sgl router's 404 or 400."""
    waiting = [one.declared for one in desk.waiting()] if desk is not None else []
    for up in [*gateway.fleet.pods(), *waiting]:
        if given in (up.pod, worker_id(up.pod)):
            return up.pod
    try:
        uuid.UUID(given)
    except ValueError:
        return JSONResponse({"error": f"no worker {given!r}", "code": "BAD_REQUEST"}, 400)
    return JSONResponse({"error": f"no worker {given}", "code": "WORKER_NOT_FOUND"}, 404)


def _all(gateway: Gateway, desk: WorkerDesk | None) -> list[dict[str, Any]]:
    found = []
    for up in gateway.fleet.pods():
        targets = [target for target in gateway.fleet.targets() if target.worker.pod == up.pod]
        load = sum(target.inflight_requests for target in targets)
        tokens = sum(target.inflight_tokens for target in targets)
        first = targets[0]
        lost = str(first.pulse.lost or "")
        reason = lost if first.healthy else first.pulse.reason
        shown = _shown(up, first.healthy and not lost, reason)
        found.append(shown | {"load": load, "inflight_tokens": tokens, "draining": first.draining})
    known = {worker["pod"] for worker in found}
    for one in desk.waiting() if desk is not None else ():
        if one.declared.pod not in known:
            found.append(_shown(one.declared, False, one.reason))
    return found


def _shown(up: WorkerUp, healthy: bool, reason: str) -> dict[str, Any]:
    """sgl router's members first, then ours."""
    return {
        "id": worker_id(up.pod),
        "url": up.url,
        "model_id": up.model,
        "priority": 50,
        "cost": 1.0,
        "worker_type": TYPES[up.role],
        "is_healthy": healthy,
        "load": 0,
        "connection_mode": "http",
        "bootstrap_port": up.bootstrap_port,
        "metadata": {},
        "disable_health_check": False,
        "pod": up.pod,
        "reason": reason,
        "engine": up.engine,
        "dp_size": up.dp_size,
        "block_size": up.block_size,
        "events": list(up.events),
        "generation": up.generation,
    }

"""Admin workers: see, add, drain and remove workers at runtime, as sgl router's scripts do.

Door: /workers and /workers/{id}; admin.py mounts it. Discovery does the work behind WorkerDesk;
admin_bodies.py has the shapes, access.py says who may. Open it to add a route about workers.

    POST /workers            202, job_status until it serves
    PUT  /workers/{id}       202: draining, api_key, priority, cost, labels
    DELETE /workers/{id}     202: gets nothing new, is gone when its requests ended
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse

from kvplane.vocabulary import Pod, WorkerUp

from .access import admit
from .admin_bodies import Change, NewWorker, Noted, Notes, called, expected, serving
from .departures import Departures, WorkerDesk
from .errors import GatewayError
from .gateway import Gateway

__all__ = ["Declare", "WorkerDesk", "worker_id", "worker_routes"]

Declare = Callable[[Mapping[str, Any]], WorkerUp]  # a [[workers]] table -> WorkerUp or ValueError
log = logging.getLogger(__name__)

DRAINS = {True: "draining", False: "taken back"}
MOST_NAMED = 20  # workers in one sentence
ANSWERS: dict[int | str, dict[str, Any]] = {
    400: {"description": "no id, or a member that cannot be; the answer names it"},
    401: {"description": "the admin key is needed"},
    403: {"description": "loopback only, or workers come from discovery only"},
    404: {"description": "no worker of this id"},
}


def worker_id(pod: Pod) -> str:
    """The id sgl router's scripts expect to be a UUID; the same for the same pod, always."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, pod))


def worker_routes(gateway: Gateway, desk: WorkerDesk | None, declare: Declare | None) -> APIRouter:
    """The routes, all behind the admin check."""

    def admin(request: Request) -> None:
        admit(request, gateway.settings.admin_key)

    router = APIRouter(tags=["workers"], dependencies=[Depends(admin)], responses=ANSWERS)
    board = _Board(gateway, desk)
    _reading(router, board)
    _adding(router, board, declare)
    _changing(router, board)
    return router


def _reading(router: APIRouter, board: _Board) -> None:
    @router.get("/workers")
    async def workers() -> dict[str, Any]:
        """All workers, those that do not serve yet included."""
        found = board.all()
        kinds = [worker["worker_type"] for worker in found]
        stats = {f"{kind}_count": kinds.count(kind) for kind in ("prefill", "decode", "regular")}
        return {"workers": found, "total": len(found), "stats": stats}

    @router.get("/workers/{id}", response_model=None)
    async def worker(id: str) -> dict[str, Any] | Response:
        """One worker, by id, name or host:port."""
        pod = board.pod(id)
        if isinstance(pod, Response):
            return pod
        return next(worker for worker in board.all() if worker["pod"] == pod)


def _adding(router: APIRouter, board: _Board, declare: Declare | None) -> None:
    @router.post("/workers", status_code=202)
    async def add(new: NewWorker, response: Response) -> dict[str, Any]:
        """Look for a worker from now on; it serves when it answers."""
        if board.desk is None or declare is None:
            raise GatewayError("forbidden", "this gateway's workers come from discovery only")
        table = new.table()
        try:
            up = declare(table)
            board.desk.add(up)
        except ValueError as error:
            raise GatewayError("invalid_request", *called(str(error), table)) from None
        board.note(up.pod, new)
        response.headers["location"] = f"/workers/{worker_id(up.pod)}"
        told = {"url": up.url, "location": response.headers["location"]}
        return _accepted(up.pod) | told


def _changing(router: APIRouter, board: _Board) -> None:
    @router.put("/workers/{id}", status_code=202, response_model=None)
    async def change(id: str, change: Change) -> dict[str, Any] | Response:
        """Drain a worker, or take it back in; or note something about it."""
        pod = board.pod(id)
        if isinstance(pod, Response):
            return pod
        if isinstance(board.desk, Departures):
            if change.draining is False:
                await board.desk.take_back(pod)
            if change.api_key is not None:
                board.desk.change_key(pod, change.api_key)
        if change.draining is not None:
            board.gateway.fleet.drain(pod, change.draining)
            log.info("worker %s pod=%s by=admin", DRAINS[change.draining], pod)
        board.note(pod, change)
        return _accepted(pod)

    @router.delete("/workers/{id}", status_code=202, response_model=None)
    async def remove(id: str) -> dict[str, Any] | Response:
        """Forget a worker when the requests under way there ended; it gets no new ones."""
        pod = board.pod(id)
        if isinstance(pod, Response):
            return pod
        if board.desk is None:
            raise GatewayError("forbidden", "this gateway's workers come from discovery only")
        await board.desk.remove(pod)
        return _accepted(pod)


class _Board:
    """All workers, serving or expected, with what was noted of them."""

    def __init__(self, gateway: Gateway, desk: WorkerDesk | None) -> None:
        self.gateway, self.desk = gateway, desk
        self._noted: dict[Pod, Noted] = {}

    def note(self, pod: Pod, told: Notes) -> None:
        """Keep what was told; forget what was told of those that are gone."""
        known = {worker["pod"] for worker in self.all()} | {pod}
        self._noted = {one: noted for one, noted in self._noted.items() if one in known}
        self._noted.setdefault(pod, Noted()).take(told)

    def pod(self, given: str) -> Pod | Response:
        """The pod of an id, name or host:port, else sgl router's 404 or 400."""
        found = self.all()
        for one in found:
            if given in (one["pod"], one["id"]):
                return Pod(one["pod"])
        at = [one["pod"] for one in found if one["url"].partition("://")[2] == given]
        if len(at) == 1:  # a worker with a name of its own is also known by where it is
            return Pod(at[0])
        try:
            uuid.UUID(given)
        except ValueError:
            return _no(400, f"no worker {given[:100]!r}; {_names(found)}", "BAD_REQUEST")
        return _no(404, f"no worker {given}", "WORKER_NOT_FOUND")

    def all(self) -> list[dict[str, Any]]:
        """Each as it is shown."""
        fleet, wall = self.gateway.fleet, self.gateway.clock.wall()
        found = {
            up.pod: serving(up, *self._known(up.pod), _ranks(targets, up.pod))
            for targets in [fleet.targets()]
            for up in fleet.pods()
        }
        for one in self.desk.waiting() if self.desk is not None else ():
            pod = one.declared.pod
            draining = {"draining": fleet.drains.of(one.declared)}
            found.setdefault(pod, expected(one, *self._known(pod), wall) | draining)
        return list(found.values())

    def _known(self, pod: Pod) -> tuple[str, Noted]:
        return worker_id(pod), self._noted.get(pod, Noted())


def _names(found: list[dict[str, Any]]) -> str:
    names = sorted(one["pod"] for one in found)
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"there are {', '.join(names[:MOST_NAMED])}{more}" if names else "there are none"


def _ranks(targets: Any, pod: Pod) -> list[Any]:
    return [target for target in targets if target.worker.pod == pod]


def _accepted(pod: Pod) -> dict[str, Any]:
    return {"status": "accepted", "worker_id": worker_id(pod), "message": f"worker {pod}"}


def _no(status: int, error: str, code: str) -> Response:
    return JSONResponse({"error": error, "code": code}, status)

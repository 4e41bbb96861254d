"""Admin evidence: what happened to requests, and what is wrong, for people and scripts.

Door: GET /rooms, /rooms/{room}, /requests, /requests/{id} and /diagnosis; admin.py mounts them.
evidence.py remembers, diagnosing.py judges. Open it to change how evidence is asked for.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Query

from kvplane.vocabulary import MAX_ROOM, Room

from .diagnosing import Discovered, diagnose
from .errors import GatewayError
from .gateway import Gateway

SETTLE_S = 1.0  # a reader of evidence waits this long for what the engines have to tell
MOST_LISTED = 1000
ROOM = re.compile(r"[0-9]+")


def evidence_routes(gateway: Gateway, desk: Discovered | None) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["evidence"])
    _rooms(router, gateway)
    _requests(router, gateway)

    @router.get("/diagnosis")
    async def diagnosis() -> dict[str, Any]:
        """What is wrong: stage, culprit, a sentence and a next step; what blocks comes first."""
        return await diagnose(gateway, desk)

    return router


def _rooms(router: APIRouter, gateway: Gateway) -> None:
    @router.get("/rooms")
    async def rooms(
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100, failed: bool | None = None
    ) -> dict[str, Any]:
        """The newest rooms, newest first; `failed=true` for those that failed only."""
        return {"rooms": gateway.ledger.rooms(limit, failed)}

    @router.get("/rooms/{room}")
    async def room(room: str) -> dict[str, Any]:
        """What happened in one room, or is happening. Asks its engines what they saw."""
        number = _room(room)
        found = await gateway.ledger.settled(number, SETTLE_S)
        if found is None and gateway.shared is not None:
            found = await gateway.shared.room(number)
        if found is None:
            raise GatewayError("not_found", f"room {room} is not known, or no longer", "room")
        return found


def _requests(router: APIRouter, gateway: Gateway) -> None:
    @router.get("/requests")
    async def requests(
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 100, failed: bool | None = None
    ) -> dict[str, Any]:
        """The newest attempts, those included for which nobody could be chosen."""
        return {"requests": gateway.ledger.attempts(limit, failed)}

    @router.get("/requests/{request_id:path}")
    async def request(request_id: str) -> dict[str, Any]:
        """All attempts of one request, those included for which nobody could be chosen."""
        found = await gateway.ledger.settled_request(request_id, SETTLE_S)
        if found is None and gateway.shared is not None:
            found = await gateway.shared.request(request_id)
        if found is None:
            raise GatewayError(
                "not_found", f"request {request_id!r} is not known, or no longer", "request_id"
            )
        return found


def _room(text: str) -> Room:
    """Decimal text, since 64-bit numbers break JavaScript."""
    digits = len(str(MAX_ROOM))  # a number of thousands of digits is no int to Python
    if not ROOM.fullmatch(text) or len(text) > digits or not 0 < int(text) <= MAX_ROOM:
        raise GatewayError(
            "invalid_request", f"room {text[:40]!r}: must be a number, 1 to {MAX_ROOM}", "room"
        )
    return Room(int(text))

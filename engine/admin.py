"""Admin: the routes about the engine itself.

Door. What gateways ask (facts, health, models), what operators do (flush, abort), and what tests
need (/truth, /fault: on loopback only, unless a flag says otherwise). Open it to add a fact.
Source of the facts: SGLang's /server_info and /model_info, vLLM's /tokenize.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from kvplane.vocabulary import Role, Room, Stage

from .api import read_json
from .body import Reader
from .errors import BadRequest, NotReady
from .evidence import Evidence
from .faults import Faults
from .fields import Fields
from .settings import EngineSettings
from .shapes import error_body
from .truth import truth
from .unit import Unit

GET_POST = ["GET", "POST"]
ROOM = re.compile(r"[0-9]{1,19}")


class Asked(Protocol):
    """What the routes need of an engine."""

    def not_ready(self) -> str | None:
        """Why requests cannot be served now; None = they can."""

    def facts(self) -> dict[str, Any]:
        """/server_info."""

    def abort(self, rid: str | None) -> int:
        """End the flows of one request id, or all; how many."""

    def open_rooms(self) -> Sequence[Room]:
        """Rooms at work."""


class AdminRoutes:
    """One engine's own routes."""

    def __init__(
        self,
        engine: Asked,
        units: Sequence[Unit],
        reader: Reader,
        evidence: Evidence,
        faults: Faults,
        settings: EngineSettings,
        registry: CollectorRegistry,
    ) -> None:
        self._engine, self._units, self._reader = engine, units, reader
        self._evidence, self._faults, self._settings = evidence, faults, settings
        self._registry = registry

    def routes(self) -> list[BaseRoute]:
        """All of them; old names of SGLang's routes included."""
        table: list[tuple[str, Any, list[str]]] = [
            ("/health", self._health, ["GET"]),
            ("/health_generate", self._health, ["GET"]),
            ("/ready", self._health, ["GET"]),
            ("/server_info", self._server_info, ["GET"]),
            ("/get_server_info", self._server_info, ["GET"]),
            ("/model_info", self._model_info, ["GET"]),
            ("/get_model_info", self._model_info, ["GET"]),
            ("/v1/models", self._models, ["GET"]),
            ("/tokenize", self._tokenize, ["POST"]),
            ("/v1/tokenize", self._tokenize, ["POST"]),
            ("/flush_cache", self._flush, GET_POST),
            ("/abort_request", self._abort, ["POST"]),
            ("/rooms/{room}", self._room, ["GET"]),
            ("/metrics", self._metrics, ["GET"]),
        ]
        if self._settings.may_break:
            table += [
                ("/truth", self._truth, ["GET"]),
                ("/fault", self._fault, ["GET", "POST", "DELETE"]),
            ]
        return [Route(path, endpoint, methods=methods) for path, endpoint, methods in table]

    async def _health(self, request: Request) -> Response:
        why = self._engine.not_ready()
        if why is None:
            return PlainTextResponse("OK")
        # what a prefill that answers still waits for is its rank directory
        stage = Stage.REGISTER if self._settings.role is Role.PREFILL else None
        return JSONResponse(error_body(NotReady(why, stage)), NotReady.status)

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse(self._engine.facts())

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "model_path": self._settings.model,
                "tokenizer_path": "builtin",
                "is_generation": True,
                "served_model_name": self._settings.model,
                "max_context_length": self._settings.context_length,
            }
        )

    async def _models(self, request: Request) -> Response:
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "kvplane",
            "root": self._settings.model,
            "max_model_len": self._settings.context_length,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _tokenize(self, request: Request) -> Response:
        await self._faults.before(Stage.POLICY_INPUT, Room(0))
        body = await read_json(request, self._settings.most_body_bytes)
        ids = await asyncio.to_thread(self._reader.ids, body)
        most = self._settings.context_length
        return JSONResponse({"count": len(ids), "max_model_len": most, "tokens": ids})

    async def _flush(self, request: Request) -> Response:
        busy = sum(unit.cache.at_work for unit in self._units)
        if busy:
            return PlainTextResponse(f"Cache not flushed: {busy} sequences at work.\n", 400)
        for unit in self._units:
            unit.cache.clear()
            unit.tell()
        return PlainTextResponse("Cache flushed.\n")

    async def _abort(self, request: Request) -> Response:
        fields = Fields(await read_json(request, self._settings.most_body_bytes))
        rid = fields.text("rid")
        every = fields.flag("abort_all", False)
        if not rid and not every:
            raise BadRequest("rid", "rid: must be a request id; or set abort_all")
        return JSONResponse({"aborted": self._engine.abort(None if every else rid)})

    async def _room(self, request: Request) -> Response:
        room = request.path_params["room"]
        known = ROOM.fullmatch(room)  # a number of thousands of digits is no int to Python
        found = self._evidence.room(Room(int(room))) if known else None
        if found is None:
            raise HTTPException(404, f"room {room[:40]} is not known here (any more)")
        return JSONResponse(found)

    async def _metrics(self, request: Request) -> Response:
        for unit in self._units:
            unit.measure()
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def _truth(self, request: Request) -> Response:
        rooms = list(self._engine.open_rooms())
        return JSONResponse(truth(self._settings, self._units, rooms, len(self._evidence)))

    async def _fault(self, request: Request) -> Response:
        if request.method == "POST":
            self._faults.arm(await read_json(request, self._settings.most_body_bytes))
        elif request.method == "DELETE":
            self._faults.disarm()
        return JSONResponse({"armed": self._faults.armed()})

"""API: the inference routes of an engine.

Door. Above it any HTTP server; below it engine.py, which begins flows. admin.py has the routes
about the engine itself. Open it to add a route. Source: what SGLang's PD workers speak.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from kvplane.runtime import Clock

from .asks import Call
from .body import Reader
from .errors import BadRequest, EngineError
from .flow import Flow
from .serving import Answer
from .settings import EngineSettings
from .shapes import Shape, error_body

BODY_S = 120.0  # a whole request body must have come by then
PATHS = {
    "/generate": "generate",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
}


class Serves(Protocol):
    """What the routes need of an engine."""

    def admit(self, call: Call) -> None:
        """Raises BadRequest where this role cannot serve the call."""

    def begin(self, call: Call) -> Flow:
        """Set every sample to work."""

    def end(self, flow: Flow) -> None:
        """It is closed."""


class InferenceRoutes:
    """Bodies in, answers out."""

    def __init__(
        self, engine: Serves, reader: Reader, settings: EngineSettings, clock: Clock
    ) -> None:
        self._engine, self._reader = engine, reader
        self._settings, self._clock = settings, clock

    def routes(self) -> list[BaseRoute]:
        """One POST route a path."""
        return [Route(path, self._infer, methods=["POST"]) for path in PATHS]

    async def _infer(self, request: Request) -> Any:
        body = await read_json(request, self._settings.most_body_bytes)
        rid = request.headers.get("x-request-id")
        # tokenising a long prompt takes longer than the loop may be away
        call = await asyncio.to_thread(self._reader.read, PATHS[request.url.path], body, rid)
        self._engine.admit(call)
        shape = Shape(call, self._settings.model, int(self._clock.wall()))
        return Answer(call, lambda: self._engine.begin(call), self._engine.end, shape)


async def read_json(request: Request, most_bytes: int) -> Any:
    """The body as JSON; raises BadRequest for what is too large or no JSON."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most_bytes:
        raise BadRequest("body", f"more than {most_bytes} bytes")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise BadRequest("body", f"more than {most_bytes} bytes")
                parts.append(part)
    except TimeoutError:
        raise BadRequest("body", f"did not come within {BODY_S:g} s") from None
    try:
        return msgspec.json.decode(b"".join(parts))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("body", f"no JSON: {error}") from error


def application(routes: list[BaseRoute]) -> ASGIApp:
    """The ASGI app; every error in OpenAI's shape."""
    handlers: dict[Any, Any] = {
        EngineError: _engine_error,
        HTTPException: _http_error,
        Exception: _broken,
        ClientDisconnect: _nobody,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return JSONResponse(error_body(error), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    facts = {
        "message": f"{request.method} {request.url.path}: {error.detail}",
        "type": "invalid_request_error",
        "code": "invalid_request",
        "param": None,
    }
    return JSONResponse({"error": facts}, error.status_code, error.headers)


async def _broken(request: Request, error: Exception) -> Response:
    """Something of ours broke; the server logs it."""
    return JSONResponse(error_body(EngineError("the engine failed; its log says why")), 500)


async def _nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client left while sending: nobody reads this

"""Admin: everything of the gateway that is no inference.

Door: a FastAPI app for people, scripts and probes; api.py gives it all other paths. Models and
liveness here, the rest in admin_evidence.py and admin_workers.py. Open it to add an admin or query
route.

    /liveness /readiness /health     /v1/models /model_info /server_info
    /rooms /requests /diagnosis      /workers     /openapi.json /docs
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from .admin_docs import docs_page
from .admin_evidence import evidence_routes
from .admin_fleet import fleet_routes
from .admin_workers import Declare, WorkerDesk, worker_routes
from .engines import Models, ask_engine
from .errors import GatewayError
from .gateway import Gateway
from .readiness import marks
from .readiness import readiness as judge

SECRET = ("api_key",)  # its value is in no answer
SHOULD = re.compile("^(Input|String|List|Dictionary) should")  # as pydantic begins
HTTP_CODES = {404: "not_found", 413: "payload_too_large"}


class _Admin(FastAPI):
    """Answers HEAD wherever it answers GET, as sgl router does: balancers and `wget --spider` look
    at /health so. The server leaves the body out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await super().__call__(scope, receive, send)


def admin_app(
    gateway: Gateway,
    desk: WorkerDesk | None = None,
    declare: Declare | None = None,
) -> FastAPI:
    """The app. Without a desk the fleet cannot be changed at runtime: POST /workers is refused."""
    text = "Admin and query routes of the gateway."
    app = _Admin(title="kvplane", description=text, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False  # it would be to where a client's Host header says
    app.add_exception_handler(GatewayError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _broken)
    _life(app, gateway)
    _models(app, gateway)
    app.include_router(evidence_routes(gateway, desk))
    app.include_router(worker_routes(gateway, desk, declare))
    app.include_router(fleet_routes(gateway))
    _docs(app)
    return app


def _docs(app: FastAPI) -> None:
    page: list[str] = []

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    async def docs() -> str:
        """All of this for people, without anything from elsewhere."""
        if not page:
            page.append(docs_page(app.openapi()))
        return page[0]


def _life(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/liveness", tags=["life"], response_class=PlainTextResponse)
    @app.get("/health", tags=["life"], response_class=PlainTextResponse)
    async def liveness() -> str:
        """The process answers."""
        return "OK"

    @app.get("/readiness", tags=["life"])
    @app.get("/health_generate", tags=["life"], include_in_schema=False)
    async def readiness(response: Response) -> dict[str, Any]:
        """A request could be served now: a prefill and a decode, or a unified worker."""
        now, down_s = gateway.clock.now(), gateway.loop.store_down_s()
        ready, shown = judge(gateway.fleet, gateway.breakers, now, down_s)
        if not ready:
            response.status_code = 503
        return shown


def _models(app: FastAPI, gateway: Gateway) -> None:
    all_models = Models(gateway)

    @app.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """All models, each as its engine describes it."""
        return {
            "object": "list",
            "data": [_marked(gateway, one) for one in await all_models.ask()],
        }

    @app.get("/v1/models/{model:path}", tags=["models"])
    async def model(model: str) -> dict[str, Any]:
        """One model."""
        for found in await all_models.ask():
            if found["id"] == model:
                return _marked(gateway, found)
        raise GatewayError("model_not_found", f"no model {model!r} here", "model")

    @app.get("/model_info", tags=["models"])
    @app.get("/get_model_info", tags=["models"], include_in_schema=False)
    async def model_info() -> Response:
        """As the first prefill (or unified worker) says."""
        return _json(await ask_engine(gateway, "/model_info"))

    @app.get("/server_info", tags=["models"])
    @app.get("/get_server_info", tags=["models"], include_in_schema=False)
    async def server_info() -> Response:
        """As the first prefill (or unified worker) says."""
        return _json(await ask_engine(gateway, "/server_info"))


def _marked(gateway: Gateway, entry: dict[str, Any]) -> dict[str, Any]:
    """A model's entry; one that cannot be served now says so, and why."""
    said = marks(gateway.fleet, gateway.breakers, gateway.clock.now(), entry["id"])
    if said["ready"]:
        return entry
    ours = entry.get("kvplane")
    return entry | {"kvplane": (ours if isinstance(ours, dict) else {}) | said}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    headers = {name.decode(): value.decode("latin-1") for name, value in error.head()}
    return Response(error.body(), error.status, headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """A parameter or body FastAPI refused: 400 with the member named, as everywhere else."""
    assert isinstance(error, RequestValidationError)
    place, text = _refused(error.errors()[0])
    kind = request.headers.get("content-type", "")
    if place == "body" and "json" not in kind.lower():  # curl -d alone calls it a form
        text = f"body: content-type {kind[:100]!r}: must be application/json, and a JSON object"
    return await _ours(request, GatewayError("invalid_request", text, place))


def _refused(first: Mapping[str, Any]) -> tuple[str, str]:
    """The member that is wrong, and what is wrong with it, its value included where that is plain.

    Of a member that may be of several kinds, pydantic's name of the kind stands behind it: no part.
    """
    if first["type"] == "json_invalid":
        return "body", f"body is no valid JSON: {first['ctx']['error']} (byte {first['loc'][-1]})"
    parts = takewhile(lambda part: "[" not in part, map(str, first["loc"][1:]))
    place = ".".join(parts) or str(first["loc"][0])
    if place == "body":
        return place, "body: must be a JSON object"
    if first["type"] == "missing":
        return place, f"{place} is missing"
    value, said = first.get("input"), first["msg"].removeprefix("Value error, ")
    shown = isinstance(value, str | int | float) and place not in SECRET
    want = SHOULD.sub("must", said)
    return place, f"{place} {value!r:.100}: {want}" if shown else f"{place}: {want}"


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTP_CODES.get(error.status_code, "invalid_request")
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    shape = GatewayError(code, message, status=error.status_code).shape()
    return JSONResponse(shape, error.status_code, dict(error.headers or {}))


async def _broken(request: Request, error: Exception) -> Response:
    """Something of ours broke; the server logs it."""
    return await _ours(request, GatewayError("internal_error", "the gateway failed; see its log"))

"""Documents: one /openapi.json of a door that several apps share.

Edge of the roof. Used by plane.py. Both documents are made in this process, from routes that are
there: at the first question, like FastAPI's own, and kept. Open it when a path of the gateway's
port is to be documented that no app of FastAPI's has.

    GET /workers     (gateway)   -> /workers
    GET /workers     (index)     -> /index/workers
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_TEXT = {"type": "string"}
CHANGES = {  # a route of events/, which knows no FastAPI
    "summary": "Changes",
    "description": "Every change of the index from now on, or from a cursor: server-sent events "
    "without an end. 410 where the cursor is too old: take a snapshot, go on from its cursor.",
    "operationId": "changes",
    "parameters": [
        {"name": "after", "in": "query", "required": False, "schema": _TEXT},
        {"name": "Last-Event-ID", "in": "header", "required": False, "schema": _TEXT},
    ],
    "responses": {
        "200": {"description": "Changes follow", "content": {"text/event-stream": {}}},
        "410": {"description": "The cursor is too old, or none of this stream"},
    },
}


def with_index(gateway: FastAPI, index: FastAPI) -> FastAPI:
    """The gateway's app, whose document has the index's routes too, as they are reached here."""
    own = gateway.openapi

    def both() -> dict[str, Any]:
        if gateway.openapi_schema is None:
            gateway.openapi_schema = _merged(own(), index.openapi())
        return gateway.openapi_schema

    gateway.openapi = both  # type: ignore[method-assign]
    return gateway


def _merged(document: dict[str, Any], index: dict[str, Any]) -> dict[str, Any]:
    paths = {"/changes": {"get": CHANGES}, **index["paths"]}
    more = {
        f"/index{path}": {method: _placed(told) for method, told in methods.items()}
        for path, methods in paths.items()
    }
    schemas = index.get("components", {}).get("schemas", {})
    schemas = schemas | document.get("components", {}).get("schemas", {})
    components = document.get("components", {}) | {"schemas": schemas}
    return document | {"paths": document["paths"] | more, "components": components}


def _placed(told: dict[str, Any]) -> dict[str, Any]:
    """Named apart from a route of the gateway's that has the same name."""
    return told | {"tags": ["index"], "operationId": f"index_{told['operationId']}"}

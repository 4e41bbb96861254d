"""Documented: what /openapi.json says of each route of the index.

Pure. Used by api.py, whose routes read a request by themselves. Open it when a route takes more.
"""

from __future__ import annotations

from typing import Any

from .question import PACKED, PACKED_TOKENS

_TEXT = {"type": "string"}
_BYTES = {"type": "string", "format": "binary"}
_HASH = {"type": "string", "pattern": "^[0-9a-f]{16}$"}
_ITEM = {
    "type": "object",
    "properties": {"id": _TEXT, "start": {"type": "integer"}, "length": {"type": "integer"}},
    "required": ["id", "start", "length"],
}
_QUESTION = {
    "type": "object",
    "description": "a model, and exactly one way to name a prompt",
    "properties": {
        "model": _TEXT,
        "token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "prompt": _TEXT,
        "messages": {"type": "array", "items": {"type": "object"}},
        "block_hashes": {"type": "array", "items": _HASH},
        "adapter": _TEXT,
        "salt": _TEXT,
        "workers": {"type": "array", "items": _TEXT},
        "items": {"type": "array", "items": _ITEM},
    },
}


def _parameter(name: str, where: str, schema: dict[str, Any], about: str) -> dict[str, Any]:
    told = {"name": name, "in": where, "schema": schema, "description": about}
    return told | {"required": where == "path"}


_WORKER = "pod, or pod@rank"
DOCUMENTED: dict[str, dict[str, Any]] = {
    "/rank": {
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {"schema": _QUESTION},
                PACKED: {"schema": _BYTES},
                PACKED_TOKENS: {"schema": _BYTES},
            },
        }
    },
    "/workers/{worker:path}": {"parameters": [_parameter("worker", "path", _TEXT, _WORKER)]},
    "/blocks/{block}": {"parameters": [_parameter("block", "path", _HASH, "16 hex digits")]},
    "/snapshot": {"parameters": [_parameter("worker", "query", _TEXT, f"{_WORKER}; none = all")]},
}

"""Openapi: schemathesis as its users run it, over a document of routes; and one of our own for the
routes that no document of the gateway names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

# Engines at work refuse to flush, a 502 as it should be; the other never ends.
SKIPPED = ("/flush_cache", "/index/changes")
COMMAND = Path(sys.executable).with_name("schemathesis")
TESTS = Path(__file__).parents[1]
MOST_S = 1800.0


def shake(
    url: str, models: list[str], examples: int, seed: int, folder: Path, phases: str = "fuzzing"
) -> subprocess.CompletedProcess[str]:
    """Ask every route of a gateway for what it promises and for what it does not; the exit status
    is 1 where any answer is a server error."""
    document = folder / "openapi.json"
    document.write_text(json.dumps(routes(url, models)))
    words = [str(COMMAND), "--no-color", "run", str(document), "--url", url]
    words += ["--checks", "not_a_server_error", "--mode", "all"]
    words += ["--phases", phases, "--max-examples", str(examples)]
    words += ["--seed", str(seed), "--generation-database", "none", "--warnings", "off"]
    words += ["--request-timeout", "60", "--max-redirects", "0", "--suppress-health-check", "all"]
    told = os.environ | {"SCHEMATHESIS_HOOKS": "kit.openapi_hooks", "PYTHONPATH": str(TESTS)}
    return subprocess.run(
        words, cwd=folder, env=told, capture_output=True, text=True, timeout=MOST_S, check=False
    )


def routes(url: str, models: list[str]) -> dict[str, Any]:
    """All in one document, for it is the start of schemathesis that costs."""
    found = inference(models) | {"components": {"schemas": {}}}
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        told = json.load(answer)
    assert told["paths"].keys() >= {"/workers", "/index/workers", *SKIPPED}, "both apps' routes"
    found["paths"] |= {path: how for path, how in told["paths"].items() if path not in SKIPPED}
    found["components"]["schemas"] |= told.get("components", {}).get("schemas", {})
    assert len(found["paths"]) > 20, "something is documented"
    return found


def inference(models: list[str]) -> dict[str, Any]:
    """The inference routes as an OpenAPI document: small answers, all members that are read."""
    chat = {"messages": {"type": "array", "minItems": 1, "maxItems": 3, "items": _message()}}
    chat |= {"logprobs": {"type": "boolean"}, "tools": _tools(), "max_completion_tokens": _few()}
    text = {"prompt": _prompts(), "logprobs": {"type": "integer", "minimum": 0, "maximum": 3}}
    sampling = {"max_new_tokens": _few(), "n": _few(2), "stop": _texts()}
    native: dict[str, Any] = {"text": _texts(), "return_logprob": {"type": "boolean"}}
    native["sampling_params"] = _object(sampling)
    shared = {
        "model": {"enum": models},
        "stream": {"type": "boolean"},
        "max_tokens": _few(),
        "n": _few(2),
        "stop": _texts(),
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "stream_options": _object({"include_usage": {"type": "boolean"}}),
        "bootstrap_room": {},
        "rid": {"type": "string"},
    }
    routes = {
        "/v1/chat/completions": (shared | chat, "messages"),
        "/v1/completions": (shared | text, "prompt"),
        "/generate": (shared | native, "text"),
        "/tokenize": ({"model": {"enum": models}, "prompt": {"type": "string"}}, "prompt"),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "inference", "version": "1"},
        "paths": {path: {"post": _operation(*told)} for path, told in routes.items()},
    }


def _operation(members: dict[str, Any], needed: str) -> dict[str, Any]:
    limit = "sampling_params" if "sampling_params" in members else "max_tokens"
    required = [needed, *([limit] if limit in members else [])]
    schema = _object(members) | {"required": required}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, "responses": {"200": {"description": "answered"}}}


def _object(members: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": members}


def _few(most: int = 4) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


def _texts() -> dict[str, Any]:
    text = {"type": "string", "maxLength": 40, "minLength": 1}
    return {"oneOf": [text, {"type": "array", "items": text, "minItems": 1, "maxItems": 2}]}


def _prompts() -> dict[str, Any]:
    ids = {"type": "array", "minItems": 1, "maxItems": 8, "items": _few(255)}
    return {"oneOf": [*_texts()["oneOf"], ids]}


def _message() -> dict[str, Any]:
    part = _object({"type": {"const": "text"}, "text": {"type": "string", "maxLength": 40}})
    parts = {"type": "array", "items": part | {"required": ["type", "text"]}, "maxItems": 2}
    content = {"oneOf": [{"type": "string", "maxLength": 40}, {"type": "null"}, parts]}
    role = {"enum": ["system", "user", "assistant", "tool"]}
    return _object({"role": role, "content": content}) | {"required": ["role", "content"]}


def _tools() -> dict[str, Any]:
    named = _object({"name": {"type": "string"}}) | {"required": ["name"]}
    tool = _object({"type": {"const": "function"}, "function": named})
    return {"type": "array", "maxItems": 2, "items": tool | {"required": ["type", "function"]}}

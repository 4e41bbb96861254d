"""Engines: what the engines say about themselves, asked for a client.

Edge: small GETs over the legs, with a short deadline, never on a request's path. admin.py shows the
answers. Open it to change whom a question goes to.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvplane.vocabulary import Role, WorkerUp

from .errors import GatewayError
from .gateway import Gateway
from .legs_errors import LegError
from .legs_wire import Origin
from .target import Target

ASK_S = 3.0  # engines answer these in milliseconds
MOST_BYTES = 4 * 1024 * 1024


async def get(gateway: Gateway, url: str, path: str) -> tuple[int, bytes]:
    """Status and body of one GET. Raises LegError, TimeoutError."""
    leg = gateway.legs.begin(Origin.parse(url), path, method="GET")
    try:
        async with asyncio.timeout(ASK_S):
            return await leg.head(), await leg.read(MOST_BYTES)
    finally:
        leg.abort()


async def ask_engine(gateway: Gateway, path: str) -> bytes:
    """The answer of the first engine that gives one, prefills first. Raises GatewayError."""
    why = "no worker is registered"
    for target in _askable(gateway):
        try:
            status, body = await get(gateway, target.url, path)
        except (LegError, TimeoutError) as error:
            why = f"{target.worker}: {error or 'no answer'}"
            continue
        if status == 200:
            return body
        why = f"{target.worker} answered {status}"
    raise GatewayError("no_prefill_available", f"{path}: {why}")


async def ask_models(gateway: Gateway) -> list[dict[str, Any]]:
    """Every model once, with the members its engine gives it; where none answers, by name only."""
    found: dict[str, dict[str, Any]] = {}
    asked: set[str] = set()
    for target in _askable(gateway):
        if target.model in asked:
            continue
        for entry in await _listed(gateway, target):
            found.setdefault(entry["id"], entry)
            asked.add(target.model)
    for up in gateway.fleet.pods():
        for name in filter(None, (up.model, *up.adapters)):
            found.setdefault(name, _named(name, up))
    return [found[name] for name in sorted(found)]


def _askable(gateway: Gateway) -> list[Target]:
    """One target per pod; the healthy first, prefills before the rest."""
    order = {Role.PREFILL: 0, Role.BOTH: 1, Role.DECODE: 2}
    targets = [target for target in gateway.fleet.targets() if target.worker.dp_rank == 0]
    return sorted(targets, key=lambda target: (not target.healthy, order[target.role]))[:8]


async def _listed(gateway: Gateway, target: Target) -> list[dict[str, Any]]:
    try:
        status, body = await get(gateway, target.url, "/v1/models")
        told = msgspec.json.decode(body) if status == 200 else {}
    except (LegError, TimeoutError, msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return []
    data = told.get("data") if isinstance(told, dict) else None
    entries = data if isinstance(data, list) else []
    return [
        entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    ]


def _named(name: str, up: WorkerUp) -> dict[str, Any]:
    base = {"id": name, "object": "model", "created": 0, "owned_by": "kvplane", "root": up.model}
    return base | {"max_model_len": up.max_tokens}

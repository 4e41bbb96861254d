"""Engines: what the engines say about themselves, asked for a client.

Edge: small GETs and POSTs over the legs, with a short deadline, never on a request's path; many
engines are asked at once, and a silent one is left out. admin.py and admin_fleet.py show the
answers, model_list.py makes one list of many. Open it to change whom a question goes to.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from kvplane.vocabulary import Role

from .errors import GatewayError
from .gateway import Gateway
from .legs_errors import LegError
from .legs_wire import Origin
from .model_list import entries_of, merged
from .redaction import without_secrets
from .target import Target

ASK_S = 3.0  # engines answer these in milliseconds
MOST_BYTES = 4 * 1024 * 1024
MOST_ASKED = 64  # engines, for one question to all of them; the rest are known by name


async def get(gateway: Gateway, url: str, path: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and body of one call. Raises LegError, TimeoutError."""
    key = gateway.settings.admission.api_key
    headers = [(b"authorization", b"Bearer " + key.encode())] if key else []
    leg = gateway.legs.begin(Origin.parse(url), path, headers, method=method)
    try:
        async with asyncio.timeout(ASK_S):
            return await leg.head(), await leg.read(MOST_BYTES)
    finally:
        leg.abort()


async def ask_engine(gateway: Gateway, path: str) -> bytes:
    """The answer of the first engine that gives one, prefills first, without what it keeps secret.
    Raises GatewayError."""
    why = "no worker is registered"
    for target in askable(gateway)[:8]:
        try:
            status, body = await get(gateway, target.url, path)
        except (LegError, TimeoutError) as error:
            why = f"{target.worker}: {error or 'no answer'}"
            continue
        if status == 200:
            return without_secrets(body)
        why = f"{target.worker} answered {status}"
    raise GatewayError("no_prefill_available", f"{path}: {why}")


async def ask_models(gateway: Gateway) -> list[dict[str, Any]]:
    """Every model once, with the members its engines give it; where none answers, by name only."""
    asked = askable(gateway)[:MOST_ASKED]
    lists = await asyncio.gather(*(_listed(gateway, target) for target in asked))
    return merged(lists, gateway.fleet.pods())


class Models:
    """The list of models, asked once for all who want it at the same time: a reader costs us a
    question to every engine."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._asking: asyncio.Task[list[dict[str, Any]]] | None = None

    async def ask(self) -> list[dict[str, Any]]:
        """As `ask_models`. Who leaves ends it for nobody else."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(ask_models(self._gateway))
        return await asyncio.shield(self._asking)


def askable(gateway: Gateway) -> list[Target]:
    """One target per pod; the healthy first, prefills before the rest."""
    order = {Role.PREFILL: 0, Role.BOTH: 1, Role.DECODE: 2}
    targets = [target for target in gateway.fleet.targets() if target.worker.dp_rank == 0]
    return sorted(targets, key=lambda target: (not target.healthy, order[target.role]))


async def _listed(gateway: Gateway, target: Target) -> list[dict[str, Any]]:
    try:
        status, body = await get(gateway, target.url, "/v1/models")
        return entries_of(msgspec.json.decode(body)) if status == 200 else []
    except (LegError, TimeoutError, msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return []

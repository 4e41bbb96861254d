"""Admin fleet: routes about all engines together, as sgl router has them.

Door: the load of every worker, and one call that empties every engine's cache. admin.py mounts it,
access.py says who may. Open it to add a route that goes to all engines.

    GET  /get_loads      {"workers": [{"worker", "load"}]}
    POST /flush_cache    {"successful": [...], "failed": [{"worker", "error"}], ...}
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from .access import admit
from .engines import askable, get
from .gateway import Gateway
from .legs_errors import LegError
from .target import Target


def fleet_routes(gateway: Gateway) -> APIRouter:
    """The routes, behind the admin check."""

    def admin(request: Request) -> None:
        admit(request, gateway.settings.admin_key)

    router = APIRouter(tags=["workers"], dependencies=[Depends(admin)])

    @router.get("/get_loads")
    async def loads() -> dict[str, Any]:
        """Requests under way at every worker, as the gateway counts them."""
        targets = gateway.fleet.targets()
        return {"workers": [{"worker": t.url, "load": t.inflight_requests} for t in targets]}

    @router.post("/flush_cache")
    async def flush(response: Response) -> dict[str, Any]:
        """Empty the cache of every engine; 502 where one of them did not."""
        targets = askable(gateway)
        errors = await asyncio.gather(*(_flush(gateway, target) for target in targets))
        failed = [
            {"worker": target.url, "error": error}
            for target, error in zip(targets, errors, strict=True)
            if error
        ]
        if failed:
            response.status_code = 502
        done = [t.url for t, error in zip(targets, errors, strict=True) if not error]
        counts = f"{len(done)} of {len(targets)} engines emptied their cache"
        return {"successful": done, "failed": failed, "message": counts}

    return router


async def _flush(gateway: Gateway, target: Target) -> str:
    """Why it did not; "" where it did. vLLM has the route under another name."""
    path = "/reset_prefix_cache" if target.up.engine == "vllm" else "/flush_cache"
    try:
        status, _ = await get(gateway, target.url, path, "POST")
    except (LegError, TimeoutError) as error:
        return str(error) or "no answer"
    return "" if status == 200 else f"POST {path} answered {status}"

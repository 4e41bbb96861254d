"""Access: may this caller use the admin routes?

Door: the admin key, or loopback with nobody else behind it: no browser of another page, no proxy.
admin_workers.py and admin_fleet.py ask it. Open it to change who is let in.
"""

from __future__ import annotations

import hmac

from fastapi import Request

from kvplane.bootstrap import is_loopback

from .errors import GatewayError

FOREIGN = ("forwarded", "x-forwarded-for", "x-real-ip", "origin")  # somebody else is behind it


def admit(request: Request, key: str) -> None:
    """Raises GatewayError 401 or 403."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if key and kind.lower() == "bearer" and _equal(given.strip(), key):
        return
    if _local(request):
        return
    if not key:
        raise GatewayError("forbidden", "admin routes answer on loopback only: no admin key is set")
    raise GatewayError("invalid_api_key", "the admin key is needed: Authorization: Bearer KEY")


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())


def _local(request: Request) -> bool:
    if any(name in request.headers for name in FOREIGN) or request.client is None:
        return False
    return is_loopback(request.client.host)  # as ::ffff:127.0.0.1, too: a door of both families

"""Access: may this caller write?

Pure. api.py asks before it reads a body. Open it to change who may register ranks and rooms; reads
are open to all, as engines expect.

    a key is configured     `Authorization: Bearer KEY`, or 401
    none is                 from this machine; from elsewhere 403, unless writes are open or the
                            caller showed a client certificate. The header is not looked at then.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from .settings import DirectorySettings

FLAGS = "--write-key KEY, --open-writes, or TLS with client certificates"


@dataclass(frozen=True, slots=True)
class Writer:
    """What is known of who sent a request; None where the server does not tell."""

    host: str | None = None
    server: str | None = None  # the address of ours that was reached
    authorization: bytes | None = None
    certified: bool = False  # showed a client certificate that was checked


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not."""

    status: int
    reason: str  # of a closed set, for counting: key, address
    text: str


def writer(scope: Mapping[str, Any]) -> Writer:
    """What an ASGI server tells of a request."""
    given = [value for key, value in scope["headers"] if key == b"authorization"]
    tls = (scope.get("extensions") or {}).get("tls") or {}
    return Writer(
        host=(scope.get("client") or (None,))[0],
        server=(scope.get("server") or (None,))[0],
        authorization=given[0] if given else None,
        certified=bool(tls.get("client_cert_name")),
    )


def refusal(settings: DirectorySettings, who: Writer) -> Refusal | None:
    """None where the caller may write."""
    if settings.write_key:
        if _key_matches(settings.write_key, who.authorization):
            return None
        what = "authorization (absent)" if who.authorization is None else "authorization"
        return Refusal(401, "key", f"{what}: must be Bearer with the directory's write key")
    if settings.open_writes or who.certified or is_local(who):
        return None
    return Refusal(
        403, "address",
        f"writer {who.host}: must be on this machine; to register from elsewhere start the "
        f"directory with {FLAGS}",
    )  # fmt: skip


def is_local(who: Writer) -> bool:
    """On this machine: over loopback, or from the very address it reached (nobody else has it)."""
    if who.host is None:
        return True  # no network in between
    try:
        host = ip_address(who.host)
    except ValueError:
        return False
    if isinstance(host, IPv6Address) and host.ipv4_mapped is not None:
        return host.ipv4_mapped.is_loopback or who.host == who.server
    return host.is_loopback or who.host == who.server


def _key_matches(key: str, authorization: bytes | None) -> bool:
    scheme, _, given = (authorization or b"").partition(b" ")
    # Compared also where the scheme is wrong: the time tells nothing.
    same = hmac.compare_digest(given.strip(), key.encode())
    return same and scheme.lower() == b"bearer"

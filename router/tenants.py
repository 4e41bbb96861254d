"""Tenants: whose blocks may this prompt share?

Pure. A tenant's requests carry a salt that we make: engines keep salted blocks apart, and the index
ranks in the namespace of that salt, since prompts.py reads the same member. A client never chooses
it. api.py applies it to each body. Open it to change how tenants are kept apart.

    key of tenant "acme":   {}                   -> {"cache_salt":"kvplane:4f0c..."}
                            {"cache_salt": "a"}  -> {"cache_salt":"kvplane:4f0c...:9d1e..."}
    any other key:          {"cache_salt": "a"}  -> as it is; "kvplane:..." is refused
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from typing import Any

import msgspec

from .errors import invalid
from .splice import splice

OURS = "kvplane:"  # how salts begin that no client may send
SALTS = ("cache_salt", "extra_key")  # vLLM and SGLang; SGLang alone
SALTED = frozenset(SALTS)
SHOWN = 32  # hex digits: 128 bits
NATIVE = "/generate"  # older SGLang keeps apart by extra_key alone here, by either elsewhere

Body = dict[str, Any]


def tenant_salt(tenant: str, secret: str) -> str:
    """The salt of a tenant: the same in every gateway that has the same secret."""
    text = f"kvplane-tenant-v1\0{tenant}".encode()
    return OURS + hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()[:SHOWN]


def apart(path: str, raw: bytes, body: Body, salt: str) -> tuple[bytes, Body]:
    """Bytes and members of a body under this tenant's salt; "" = of no tenant, then unchanged.

    Raises GatewayError 400 for a salt that cannot be: of a tenant one that is no text, of anybody
    else one that begins as ours do.
    """
    own = [(name, body[name]) for name in SALTS if body.get(name) is not None]
    if not salt:
        _not_ours(own)
        return raw, body
    for name, value in own:
        if not isinstance(value, str):
            raise invalid(name, f"'{name}' must be a string")
    if own:  # the client's own division, inside the tenant's
        told = msgspec.json.encode(own)
        salt = f"{salt}:{hashlib.sha256(told).hexdigest()[:SHOWN]}"
    added = SALTS if path == NATIVE else SALTS[:1]
    told = msgspec.json.encode(salt)
    members = b",".join([b'"%b":%b' % (name.encode(), told) for name in added])
    raw = splice(raw, body, SALTS.__contains__, members)
    kept = {name: value for name, value in body.items() if name not in SALTS}
    return raw, kept | dict.fromkeys(added, salt)


def _not_ours(own: Sequence[tuple[str, Any]]) -> None:
    """Neither alone nor behind the member before: SGLang joins both to one text."""
    starts = [""]
    for name, value in own:
        given = value if isinstance(value, list) else [value]
        texts = [one for one in given if isinstance(one, str)]
        if any((start + text).startswith(OURS) for start in starts for text in texts):
            raise invalid(name, f"'{name}' must not begin with {OURS!r}: such salts are tenants'")
        starts += [text for text in texts if len(text) < len(OURS)]

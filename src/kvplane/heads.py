"""Heads: what a request's URL and a client's certificate mean.

Edge. connections.py asks for each head. Open it to change how a path is read.

    /v1/models?a=b   -> b"/v1/models", "/v1/models", b"a=b"
    /workers/a%2Fb   -> b"/workers/a%2Fb", "/workers/a/b", b""
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import httptools

MOST_KEPT = 256  # bytes of a URL that is remembered: the same few come over and over

Place = tuple[bytes, str, bytes]


def place(url: bytes) -> Place:
    """Path as sent, path as text, query. Raises what httptools has for a URL that is none."""
    return _known(url) if len(url) <= MOST_KEPT else _parsed(url)


def _parsed(url: bytes) -> Place:
    parsed = httptools.parse_url(url)
    path = parsed.path.decode("ascii")
    return parsed.path, unquote(path) if "%" in path else path, parsed.query or b""


_known = lru_cache(maxsize=1024)(_parsed)


def hosts(names: Sequence[bytes], version: str) -> str:
    """What is wrong with how often the host is named; nothing where it is right."""
    many = names.count(b"host")
    if many == 1 or (not many and version != "1.1"):
        return ""
    return f"{many or 'no'} Host headers came: HTTP/1.1 wants exactly one"


def awaits_100(headers: Sequence[tuple[bytes, bytes]], version: str) -> bool:
    """Does the client wait for a word before it sends its body?"""
    wanted = [value.lower() for name, value in headers if name == b"expect"]
    return version == "1.1" and b"100-continue" in wanted


def length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of these lines."""
    return sum(len(name) + len(value) + 4 for name, value in headers)


def subject(certificate: dict[str, Any] | None) -> str | None:
    """`CN=prefill-0,O=site` of a certificate that was verified; None where none was shown."""
    if not certificate:
        return None
    short = {"commonName": "CN", "organizationName": "O", "organizationalUnitName": "OU"}
    parts = [pair for group in certificate.get("subject", ()) for pair in group]
    return ",".join(f"{short.get(name, name)}={value}" for name, value in parts) or "(no subject)"

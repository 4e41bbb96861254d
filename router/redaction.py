"""Redaction: an engine's words about itself, without its secrets.

Pure: bytes of JSON in and out. engines.py passes /server_info on, and SGLang's holds all it was
started with, its API key too. Open it when engines call a secret by another name.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

SECRET = re.compile(r"(api_?key|password|secret|secret_key|access_token|hf_token)$", re.I)
HIDDEN = "***"
MOST_DEEP = 64  # levels; no engine's settings have more


def without_secrets(raw: bytes) -> bytes:
    """The same answer, each secret that is set hidden; what is no JSON has none that could be
    found, and is not shown at all."""
    try:
        told = msgspec.json.decode(raw)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return b"{}"
    return msgspec.json.encode(_clean(told, MOST_DEEP))


def _clean(told: Any, deep: int) -> Any:
    if not deep:
        return HIDDEN
    if isinstance(told, dict):
        return {
            name: HIDDEN if value and SECRET.search(name) else _clean(value, deep - 1)
            for name, value in told.items()
        }
    if isinstance(told, list):
        return [_clean(one, deep - 1) for one in told]
    return told

"""Keyring: the API keys a person wrote down, as [[keys]] tables of kvplane.toml.

Pure: tables in, ApiKeys or a KeyFault out. settings.py reads them, parts.py hands them to the
router. What is wrong is named by its place; a key is never shown. Open it to give keys a member.

    [[keys]]
    name = "team-a"                       # what logs and metrics show
    key = "sk-..."                        # or key_sha256 = "<64 hex digits>"
    tenant = "acme"                       # its blocks are shared with nobody else's
    requests_per_minute = 600
    burst = 100
    max_concurrent_requests = 8
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEMBERS = (
    "name", "key", "key_sha256", "tenant", "requests_per_minute", "burst",
    "max_concurrent_requests",
)  # fmt: skip
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-~]{8,512}")  # it travels in a header
DIGEST = re.compile(r"[0-9a-f]{64}")
MOST = 2**31


class KeyFault(ValueError):
    """A key that cannot be meant; says what would be right, and never the key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key: who has it, and what it may. The key itself is not kept."""

    name: str
    digest: str  # SHA-256 of the key, hex
    tenant: str = ""
    requests_per_minute: float = 0.0  # 0 = no limit
    burst: int = 0  # 0 = ten seconds' worth
    most_requests: int = -1  # at once; -1 = no limit


def keys_from_tables(tables: object) -> tuple[ApiKey, ...]:
    """All [[keys]] tables. Raises KeyFault for the first wrong one."""
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise KeyFault("must be [[keys]] tables")
    found = [_key(f"keys[{number}]", table) for number, table in enumerate(tables)]
    _no_twins([one.name for one in found], "name")
    _no_twins([one.digest for one in found], "key")
    return tuple(found)


def _key(place: str, table: Mapping[str, Any]) -> ApiKey:
    strangers = sorted(set(table) - set(MEMBERS))
    if strangers:
        raise KeyFault(f"{place}: {strangers[0]!r} is no member; known: {', '.join(MEMBERS)}")
    name = _text(place, table, "name", NAME, "letters, digits, '.', '_' or '-'")
    if not name:
        raise KeyFault(f"{place}: name is missing: logs and metrics call the key by it")
    return ApiKey(
        name,
        _digest(place, table),
        _text(place, table, "tenant", NAME, "letters, digits, '.', '_' or '-'"),
        _rate(place, table),
        _whole(place, table, "burst", 1, 0),
        _whole(place, table, "max_concurrent_requests", 1, -1),
    )


def _digest(place: str, table: Mapping[str, Any]) -> str:
    if ("key" in table) == ("key_sha256" in table):
        raise KeyFault(f"{place}: exactly one of key and key_sha256 is needed")
    if "key_sha256" in table:
        digest = str(table["key_sha256"]).lower()
        if not DIGEST.fullmatch(digest):
            raise KeyFault(f"{place}: key_sha256: must be 64 hex digits: the SHA-256 of the key")
        return digest
    key = table["key"]
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise KeyFault(f"{place}: key: must be 8 to 512 printable ASCII characters, no blanks")
    return hashlib.sha256(key.encode()).hexdigest()


def _text(place: str, table: Mapping[str, Any], name: str, form: re.Pattern[str], want: str) -> str:
    value = table.get(name, "")
    if value == "":
        return ""
    if not isinstance(value, str) or not form.fullmatch(value):
        raise KeyFault(f"{place}: {name} {value!r}: must be 1 to 64 {want}")
    return value


def _rate(place: str, table: Mapping[str, Any]) -> float:
    value = table.get("requests_per_minute", 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < MOST:
        raise KeyFault(f"{place}: requests_per_minute {value!r}: must be a number, 0 = no limit")
    return float(value)


def _whole(place: str, table: Mapping[str, Any], name: str, least: int, default: int) -> int:
    value = table.get(name, default)
    if value == default:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < MOST:
        raise KeyFault(f"{place}: {name} {value!r}: must be a whole number of {least} or more")
    return value


def _no_twins(values: Sequence[str], what: str) -> None:
    for number, one in enumerate(values):
        if one in values[:number]:
            raise KeyFault(f"keys[{number}]: {what}: is that of keys[{values.index(one)}] too")

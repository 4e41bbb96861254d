"""Fields: one member of a JSON object as the type it must have, or an error that names it.

Pure. Used by registration.py, topology.py and api.py. Open it to change what passes as a number or
a text; SGLang takes digits as text in some places and cuts floats for rooms, and so do we there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from .errors import BadInput


class _Missing:
    """Stands for a member that is not there; never equal to anything a caller sends."""

    def __repr__(self) -> str:
        return "(absent)"


MISSING = _Missing()
MOST_TEXT = 1024  # characters of one text member
MOST_DIGITS = 4000  # Python refuses to parse longer numbers
MOST_OBJECT = 4096  # characters of one object member as JSON
MOST_LEVELS = 16  # objects in one another


def number(name: str, value: Any, want: str = "an integer") -> int:
    """An integer out of an integer, digits or a float (cut), as Python's int() does."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise BadInput(name, value, want)
    if isinstance(value, str) and len(value) > MOST_DIGITS:
        raise BadInput(name, value, want)
    try:
        return int(value)
    except (ValueError, OverflowError):
        raise BadInput(name, value, want) from None


def size(table: Mapping[str, Any], name: str) -> int:
    """How many ranks there are along one axis."""
    return _bounded(table, name, 1, 65_536, "an integer from 1 to 65536")


def count(table: Mapping[str, Any], name: str) -> int:
    """A positive number; digits as text pass."""
    value = number(name, table.get(name, MISSING), "a positive integer")
    if not 1 <= value < 2**31:
        raise BadInput(name, table[name], "a positive integer")
    return value


def opt_count(table: Mapping[str, Any], name: str) -> int | None:
    """A positive number, null or absent."""
    return None if table.get(name) is None else count(table, name)


def port(table: Mapping[str, Any], name: str) -> int:
    """A TCP port; digits as text pass."""
    want = "a port from 1 to 65535"
    value = number(name, table.get(name, MISSING), want)
    if not 1 <= value <= 65_535:
        raise BadInput(name, table[name], want)
    return value


def opt_port(table: Mapping[str, Any], name: str) -> int | None:
    """A TCP port, null or absent."""
    return None if table.get(name) is None else port(table, name)


def rank(table: Mapping[str, Any], name: str, of: int | None) -> int | str:
    """A place on an axis of `of` ranks. Digits stay text: SGLang stores them so, never found."""
    want = "an integer from 0" + ("" if of is None else f" to {of - 1}")
    value = table.get(name, MISSING)
    if isinstance(value, float) or (isinstance(value, str) and not value.strip().isdecimal()):
        raise BadInput(name, value, want)
    if not 0 <= number(name, value, want) < (2**31 if of is None else of):
        raise BadInput(name, value, want)
    assert isinstance(value, int | str)
    return value


def text(table: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """A text that is not empty; null and absent are the default, where there is one."""
    value = table.get(name, MISSING)
    if default is not None and (value is None or value is MISSING):
        return default
    if not isinstance(value, str) or not 0 < len(value) <= MOST_TEXT or not value.isprintable():
        raise BadInput(name, value, f"a text of 1 to {MOST_TEXT} printable characters")
    return value


def opt_text(table: Mapping[str, Any], name: str) -> str | None:
    """A text, null or absent."""
    return None if table.get(name) is None else text(table, name)


def flag(table: Mapping[str, Any], name: str, default: bool) -> bool:
    """true or false; null and absent are the default."""
    value = table.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadInput(name, value, "true or false")
    return value


def opt_object(table: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A JSON object, null or absent; small, and one that can be written again."""
    value = table.get(name)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise BadInput(name, value, "an object or null")
    if not _is_flat(value, MOST_LEVELS):
        raise BadInput(name, "(deeper)", f"at most {MOST_LEVELS} objects in one another")
    try:
        length = len(json.dumps(value, allow_nan=False))
    except ValueError:
        raise BadInput(name, value, "an object of finite numbers") from None
    if length > MOST_OBJECT:
        raise BadInput(name, f"({length} characters)", f"at most {MOST_OBJECT} characters")
    return value


def _is_flat(value: Any, levels: int) -> bool:
    if not isinstance(value, Mapping | list):
        return True
    inner = value.values() if isinstance(value, Mapping) else value
    return levels > 0 and all(_is_flat(each, levels - 1) for each in inner)


def _bounded(table: Mapping[str, Any], name: str, low: int, high: int, want: str) -> int:
    value = table.get(name, MISSING)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise BadInput(name, value, want)
    return value

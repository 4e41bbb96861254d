"""Fields: one value of a body, of the right type, or a refusal that names it.

Pure. Used by body.py and admin.py. Open it to change how a wrong type is explained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import BadRequest


class Fields:
    """A JSON object of a client; absent and null are the same."""

    def __init__(self, body: object, prefix: str = "") -> None:
        if not isinstance(body, dict):
            raise BadRequest(prefix.rstrip(".") or "body", "the body must be a JSON object")
        self._body: dict[str, Any] = body
        self._prefix = prefix

    def path(self, name: str) -> str:
        """The name as a client sees it."""
        return self._prefix + name

    def get(self, name: str) -> Any:
        """Whatever is there; None where nothing is."""
        return self._body.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._body

    def text(self, name: str) -> str | None:
        """A text or None."""
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def whole(
        self, name: str, default: int | None, least: int, most: int | None = None
    ) -> int | None:
        """A whole number in its range."""
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "a whole number")
        if value < least or (most is not None and value > most):
            upper = "" if most is None else f" and {most} or less"
            raise self._wrong(name, value, f"{least} or more{upper}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number in its range, or None."""
        value = self._body.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        if not least <= value <= most:
            raise self._wrong(name, value, f"{least:g} to {most:g}")
        return float(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """An object; empty where nothing is."""
        value = self._body.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(name, value, "an object")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A text or a list of them; empty ones are left out."""
        value = self._body.get(name)
        items = [value] if isinstance(value, str) else value or []
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise self._wrong(name, value, "a text or a list of texts")
        return tuple(item for item in items if item)

    def _wrong(self, name: str, value: object, want: str) -> BadRequest:
        shown = repr(value)
        shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
        return BadRequest(self.path(name), f"{self.path(name)} = {shown}: must be {want}")

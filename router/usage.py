"""Usage: how many prompt tokens did prefill find in its cache?

Pure: bytes of prefill's answer in, a number or None out. dispatch.py feeds it, gateway.py books
it beside what the index predicted. Open it when an engine reports its cache in another place.

    {"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}      OpenAI routes
    {"meta_info": {"cached_tokens": 48}}  or a list of these          /generate
    data: {...}  the last event that has one of them counts           streams
"""

from __future__ import annotations

from typing import Any

import msgspec

from .errors import STAGES

MOST_BYTES = 256 * 1024  # of a whole answer; of a longer one the end is kept


class Usage:
    """Collects the (end of the) answer of one prefill leg; bounded."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._cut = False

    def feed(self, data: bytes) -> None:
        """More of the answer."""
        self._data += data
        if len(self._data) > MOST_BYTES:
            del self._data[: len(self._data) - MOST_BYTES // 2]
            self._cut = True

    def cached_tokens(self) -> int | None:
        """Summed over the prompts of a list; None where the engine did not say."""
        found = [count for event in self._events() if (count := _cached(event)) is not None]
        return found[-1] if found else None

    def error(self) -> tuple[str, str | None] | None:
        """Message and stage of an error event inside a 200 answer."""
        for event in self._events():
            error = event.get("error") if isinstance(event, dict) else None
            if isinstance(error, dict):
                stage = error.get("stage")
                told = stage if isinstance(stage, str) and stage in STAGES else None
                return str(error.get("message", ""))[:300], told
            if error:
                return str(error)[:300], None
        return None

    def _events(self) -> list[Any]:
        data = bytes(self._data)
        if not self._cut and data[:1] in (b"{", b"["):
            return _decoded([data])
        return _decoded([line[5:] for line in data.split(b"\n") if line.startswith(b"data:")])


def _decoded(texts: list[bytes]) -> list[Any]:
    found = []
    for text in texts:
        try:
            found.append(msgspec.json.decode(text))
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            continue
    return found


def _cached(event: Any) -> int | None:
    if isinstance(event, list):
        each = [count for item in event if (count := _cached(item)) is not None]
        return sum(each) if each else None
    if not isinstance(event, dict):
        return None
    usage = event.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    for place in (details, event.get("meta_info")):
        count = place.get("cached_tokens") if isinstance(place, dict) else None
        if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < 2**32:
            return count  # anything else is no count: a counter would not take it
    return None

"""Usage: how many prompt tokens did prefill find in its cache?

Pure: bytes of prefill's answer (or a unified worker's) in, a number or None out. dispatch.py feeds
it, gateway.py books it beside what the index predicted. Open it when an engine reports its cache in
another place.

    {"usage": {"prompt_tokens_details": {"cached_tokens": 48}}}      OpenAI routes
    {"meta_info": {"cached_tokens": 48}}  or a list of these          /generate
    data: {...}  the last event that has one of them counts           streams
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from .errors import STAGES

NAME = b'"cached_tokens"'
MOST_LOOKED = 8  # events that speak of cached tokens; the last one that says a number counts
MOST_BYTES = 256 * 1024  # of a whole answer; of a longer one the end is kept


MOST_TOKENS = 2**32  # beyond it is no count: a counter would not take it


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=MOST_TOKENS)] | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct, gc=False):
    """What is read of an answer that is as engines make it."""

    usage: _Usage | None = None
    meta_info: _Details | None = None
    error: msgspec.Raw | None = None


_read = msgspec.json.Decoder(_Answer).decode


class Usage(msgspec.Struct):
    """Collects the (end of the) answer of one leg; bounded."""

    _data: bytes | bytearray = b""
    _cut: bool = False

    def feed(self, data: bytes) -> None:
        """More of the answer."""
        if not self._data:
            self._data = data  # most come whole
        else:
            if isinstance(self._data, bytes):
                self._data = bytearray(self._data)
            self._data += data
        if len(self._data) > MOST_BYTES:
            self._data, self._cut = bytearray(self._data[-MOST_BYTES // 2 :]), True

    def cached_tokens(self) -> int | None:
        """Summed over the prompts of a list; None where the engine did not say."""
        if (told := self._plain()) is not None:
            place = None if told.usage is None else told.usage.prompt_tokens_details
            if place is None or place.cached_tokens is None:
                place = told.meta_info
            return None if place is None else place.cached_tokens
        if NAME not in self._data:
            return None
        texts = [text for text in self._texts() if NAME in text]
        for event in _decoded(reversed(texts[-MOST_LOOKED:])):
            if (count := _cached(event)) is not None:
                return count
        return None

    def error(self) -> tuple[str, str | None] | None:
        """Message and stage of an error event inside a 200 answer."""
        if b'"error"' not in self._data:  # as in most: nothing is read while somebody waits
            return None
        if (plain := self._plain()) is not None and plain.error is None:
            return None
        for event in _decoded(self._texts()):
            error = event.get("error") if isinstance(event, dict) else None
            if isinstance(error, dict):
                stage = error.get("stage")
                told = stage if isinstance(stage, str) and stage in STAGES else None
                return str(error.get("message", ""))[:300], told
            if error:
                return str(error)[:300], None
        return None

    def _plain(self) -> _Answer | None:
        """All of it, where it is one object as engines make it: most are. Else the looks below tell
        what is in it."""
        data = self._data
        if self._cut or not data.startswith(b"{"):
            return None
        try:
            return _read(data)
        except (msgspec.DecodeError, RecursionError):
            return None

    def _texts(self) -> list[bytes]:
        """Each event, not decoded yet."""
        data = bytes(self._data)
        if not self._cut and data[:1] in (b"{", b"["):
            return [data]
        return [line[5:] for line in data.split(b"\n") if line.startswith(b"data:")]


def _decoded(texts: Iterable[bytes]) -> Iterator[Any]:
    for text in texts:
        try:
            yield msgspec.json.decode(text)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
            continue


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
        if isinstance(count, int) and not isinstance(count, bool) and 0 <= count < MOST_TOKENS:
            return count
    return None

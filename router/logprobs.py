"""Log-probabilities: the prompt's are prefill's, the answer's are decode's; made one answer.

Pure: bytes in, bytes out. dispatch.py feeds it both answers where a hand-off says so; numbers keep
their bytes. Open it when an engine tells them in another place. Source: sgl-router.md section 5.

    /generate    meta_info.input_token_logprobs, _top_, _token_ids_   prefill's + decode's
    completions  with echo: logprobs.tokens, token_logprobs, ...      prefill's, but its own token's
    streams      the same, once: in the first event of each index
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from .request import Ask

NATIVE = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
ECHOED = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
MOST_BYTES = 64 * 1024 * 1024  # of one answer: 100 000 prompt tokens with 5 others each are some 30
END = re.compile(rb"\r\n\r\n|\n\n|\r\r")  # of an event

Raw = msgspec.Raw
Lists = dict[str, list[Raw]]  # what prefill told, by member
_AS_LIST = msgspec.json.Decoder(list[Raw])
_AS_TABLE = msgspec.json.Decoder(dict[str, Raw])
_BROKEN = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError)


def needed(ask: Ask) -> bool:
    """Does this request ask for what only prefill can tell?"""
    if ask.path == "/generate":
        asked = ask.body.get("return_logprob")
        return any(asked) if isinstance(asked, list) else bool(asked)
    return bool(ask.path == "/v1/completions" and ask.body.get("echo") and ask.body.get("logprobs"))


class Merge:
    """One answer under way."""

    def __init__(self) -> None:
        self._told: dict[int, Lists] = {}  # by index, as long as they were not written
        self._held = bytearray()

    def prefill(self, answer: bytes) -> None:
        """Prefill's whole answer, plain or a stream; as far as it can be read."""
        with contextlib.suppress(*_BROKEN):
            for index, member in _members(answer):
                lists = _native(member) or _echoed(member)
                if _size(lists) > _size(self._told.get(index, {})):  # events of a stream may grow
                    self._told[index] = lists

    def stream(self, data: bytes, last: bool) -> bytes:
        """More of decode's stream in, whole events out; untouched once everything is written."""
        if not self._told and not self._held:
            return data
        self._held += data
        ready = bytearray()
        while self._told and (end := END.search(self._held)):
            event, gap = bytes(self._held[: end.start()]), end[0]
            del self._held[: end.end()]
            ready += self._event(event) + gap
        if last or not self._told or len(self._held) > MOST_BYTES:
            ready += self._held
            self._held.clear()
        return bytes(ready)

    def whole(self, answer: bytes) -> bytes:
        """Decode's plain answer with prefill's part; as it came where there is nothing to add."""
        try:
            if answer.lstrip()[:1] == b"[":
                each = _AS_LIST.decode(answer)
                return _json([Raw(self._merged(bytes(raw), at)) for at, raw in enumerate(each)])
            return self._merged(answer, 0)
        except _BROKEN:
            return answer

    def _event(self, event: bytes) -> bytes:
        head, mark, data = event.partition(b"data:")
        if head.strip() or not mark or data.strip() == b"[DONE]":
            return event
        try:
            index = msgspec.json.decode(data, type=_Indexed).index
            merged = self._merged(data, index)
        except _BROKEN:
            return event
        return event if merged is data else head + b"data: " + merged

    def _merged(self, raw: bytes, index: int) -> bytes:
        table = _AS_TABLE.decode(raw)
        if "choices" in table:
            choices = [self._choice(_AS_TABLE.decode(c)) for c in _AS_LIST.decode(table["choices"])]
            table["choices"] = Raw(_json(choices))
        elif "meta_info" in table and (told := self._told.pop(index, None)):
            meta = _AS_TABLE.decode(table["meta_info"])
            table["meta_info"] = Raw(_json(meta | _joined(told, meta)))
        else:
            return raw
        return _json(table)

    def _choice(self, choice: dict[str, Raw]) -> dict[str, Raw]:
        index = msgspec.json.decode(choice.get("index", Raw(b"0")), type=int)
        told = self._told.pop(index, None)
        if told is None:
            return choice
        own = choice.get("logprobs", Raw(b"null"))
        logprobs = {} if bytes(own) == b"null" else _AS_TABLE.decode(own)
        return choice | {"logprobs": Raw(_json(logprobs | _joined(told, logprobs)))}


class _Indexed(msgspec.Struct):
    index: int = 0


def _members(answer: bytes) -> Iterator[tuple[int, dict[str, Raw]]]:
    """(index, meta_info's or a choice's members) of everything in prefill's answer."""
    start = answer.lstrip()[:1]
    if start == b"[":
        tables = [_AS_TABLE.decode(raw) for raw in _AS_LIST.decode(answer)]
    elif start == b"{":
        tables = [_AS_TABLE.decode(answer)]
    else:
        tables = list(_events(answer))
    for at, table in enumerate(tables):
        if "choices" in table:
            for choice in map(_AS_TABLE.decode, _AS_LIST.decode(table["choices"])):
                yield msgspec.json.decode(choice.get("index", Raw(b"0")), type=int), choice
        elif "meta_info" in table:
            told = table.get("index")
            index = at if start == b"[" else 0
            index = index if told is None else msgspec.json.decode(told, type=int)
            yield index, _AS_TABLE.decode(table["meta_info"])


def _events(stream: bytes) -> Iterator[dict[str, Raw]]:
    for line in stream.splitlines():
        if line.startswith(b"data:") and (data := line[5:].strip())[:1] == b"{":
            yield _AS_TABLE.decode(data)


def _native(meta: Mapping[str, Raw]) -> Lists:
    return {name: found for name in NATIVE if (found := _listed(meta.get(name)))}


def _echoed(choice: Mapping[str, Raw]) -> Lists:
    """All but the last: prefill's own first token comes from decode too."""
    raw = choice.get("logprobs")
    if raw is None or not bytes(raw).startswith(b"{"):
        return {}
    logprobs = _AS_TABLE.decode(raw)
    return {name: found[:-1] for name in ECHOED if len(found := _listed(logprobs.get(name))) > 1}


def _joined(told: Lists, own: Mapping[str, Raw]) -> dict[str, Any]:
    """Prefill's entries in front of decode's, unless decode told them itself."""
    found: dict[str, Any] = {}
    for name, entries in told.items():
        mine = _listed(own.get(name))
        whole = [bytes(one) for one in mine[: len(entries)]] == [bytes(one) for one in entries]
        found[name] = mine if whole else [*entries, *mine]
    return found


def _size(lists: Lists) -> int:
    return max(map(len, lists.values()), default=0)


def _listed(raw: Raw | None) -> list[Raw]:
    return _AS_LIST.decode(raw) if raw is not None and bytes(raw)[:1] == b"[" else []


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value)

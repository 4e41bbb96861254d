"""Loose: text that an odd producer sent as bytes is made text again.

Pure. msgpack has both; libraries with old defaults send keys, kinds and names as bytes. Only looked
at after an event did not fit, so a good one never pays for it. Used by reading.py. Open it when a
producer sends another member in a form of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

_TEXT = frozenset(  # members that are text in every layout; hashes and salts' digests are not
    {"type", "event_type", "medium", "lora_name", "kv_cache_spec_kind", "locality", "cache_salt"}
)
_TEXT_AT = frozenset({0, 6, 7, 10, 12})  # the same in arrays
_MOST = 4 * 1024 * 1024  # bytes of an event that is worth a second try
_ANY = msgspec.msgpack.Decoder()


def loosened(raw: msgspec.Raw) -> bytes | None:
    """The event with its texts as text; None where that changes nothing or makes no sense."""
    if len(raw) > _MOST:
        return None
    try:
        event = _ANY.decode(raw)
        again: Any = None
        if isinstance(event, dict):
            again = {_text(name): _value(_text(name), value) for name, value in event.items()}
        elif isinstance(event, list):
            again = [_text(one) if at in _TEXT_AT else one for at, one in enumerate(event)]
        if again is None or again == event:
            return None
        return msgspec.msgpack.encode(again)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError):
        return None


def _value(name: Any, value: Any) -> Any:
    return _text(value) if name in _TEXT else value


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value

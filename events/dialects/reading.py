"""Reading: msgpack payload -> events, whatever its layout; one bad event never drops its batch.

Pure. Shared by the dialects of this folder, which bring only their own fields. Layout (positional
arrays or maps) is judged per event, so a fleet may mix engine versions. Open it to change how
foreign bytes are distrusted.

    [ts, [event, ...], dp_rank?]   or   {"ts": .., "events": [..], "data_parallel_rank": ..}
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from .base import AllCleared, BadBatch, Decoded, Dropped, EngineEvent

Bad = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
NO_TOKENS = msgspec.Raw(b"\x90")
_TOO_MANY = 1 << 22  # tokens of one event; longer than any context


class _Batch(msgspec.Struct, array_like=True, frozen=True):
    ts: float | None
    events: list[msgspec.Raw]
    dp_rank: int | None = None


class _BatchMap(msgspec.Struct, frozen=True):
    events: list[msgspec.Raw]
    ts: float | None = None
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


class ClearedMap(msgspec.Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """Map form of a cleared cache; the same in all engines."""


class ClearedArray(msgspec.Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    """Array form of the same."""


_BATCH = msgspec.msgpack.Decoder(_Batch)
_BATCH_MAP = msgspec.msgpack.Decoder(_BatchMap)
_INTS = msgspec.msgpack.Decoder(list[int])
_PAIRS = msgspec.msgpack.Decoder(list[tuple[int, int]])
_ANY = msgspec.msgpack.Decoder()


class Reader:
    """Decodes the batches of one dialect: two typed decoders and a way to turn frames to nouns."""

    def __init__(self, maps: Any, arrays: Any, convert: Callable[[Any], EngineEvent]) -> None:
        self._maps = msgspec.msgpack.Decoder(maps)
        self._arrays = msgspec.msgpack.Decoder(arrays)
        self._convert = convert

    def decode(self, payload: bytes) -> Decoded:
        """The events of a batch in order; raises BadBatch where there is no batch."""
        ts, raws, rank = _open(payload)
        events: list[EngineEvent] = []
        dropped: list[Dropped] = []
        for raw in raws:
            try:
                events.append(self._event(raw))
            except Bad as error:
                dropped.append(_why(raw, error))
        return Decoded(ts or 0.0, tuple(events), rank, tuple(dropped))

    def _event(self, raw: msgspec.Raw) -> EngineEvent:
        frame = (self._maps if _is_map(raw) else self._arrays).decode(raw)
        if isinstance(frame, (ClearedMap, ClearedArray)):
            return AllCleared()
        return self._convert(frame)


def _open(payload: bytes) -> tuple[float | None, list[msgspec.Raw], int | None]:
    try:
        if _is_map(payload):
            told = _BATCH_MAP.decode(payload)
            rank = told.data_parallel_rank
            return told.ts, told.events, told.attn_dp_rank if rank is None else rank
        batch = _BATCH.decode(payload)
    except Bad as error:
        raise BadBatch(f"payload of {len(payload)} bytes: {error}") from None
    return batch.ts, batch.events, batch.dp_rank


def _is_map(data: bytes | msgspec.Raw) -> bool:
    first = memoryview(data)[:1].tobytes()
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def _why(raw: msgspec.Raw, error: BaseException) -> Dropped:
    """Tell a malformed event of a known kind from a kind that we do not know."""
    try:
        event = _ANY.decode(raw)
        tag = event.get("type") if isinstance(event, dict) else event[0]
    except (*Bad, LookupError, AttributeError):
        tag = None
    if tag in KINDS:
        return Dropped(str(tag), f"malformed: {error}"[:200])
    return Dropped("unknown", f"kind {str(tag)[:60]!r}")


def read_tokens(raw: msgspec.Raw) -> tuple[array[int], bool]:
    """Token ids as 32-bit numbers, and whether they came as pairs (the first of each is kept).

    Raises one of `Bad` where an id is no unsigned 32-bit number.
    """
    if len(raw) > 5 * _TOO_MANY:
        raise ValueError(f"token_ids of {len(raw)} bytes: too many")
    try:
        return array("I", _INTS.decode(raw)), False
    except msgspec.ValidationError:
        return array("I", [first for first, _ in _PAIRS.decode(raw)]), True

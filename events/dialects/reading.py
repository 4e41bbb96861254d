"""Reading: msgpack payload -> events, whatever its layout; one bad event never drops its batch.

Pure. Shared by the dialects of this folder, which bring only their own members. Layout (positional
arrays or maps) is judged per event, so a fleet may mix engine versions, and one stream may too.
Open it to change how foreign bytes are distrusted.

    [ts, [event, ...], dp_rank?]   or   {"ts": .., "events": [..], "data_parallel_rank": ..}
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import msgspec

from .base import BadBatch, Decoded, Dropped, EngineEvent
from .loose import loosened
from .strangers import NAMES, Strangers
from .swift import Swift

Bad = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_NIL = b"\xc0"
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
    dp_rank: int | None = None


_BATCH = msgspec.msgpack.Decoder(_Batch)
_BATCH_MAP = msgspec.msgpack.Decoder(_BatchMap)
_INTS = msgspec.msgpack.Decoder(list[int])
_PAIRS = msgspec.msgpack.Decoder(list[tuple[int, int]])
_ANY = msgspec.msgpack.Decoder()


class Reader:
    """Decodes the batches of one dialect: typed decoders and a way to turn frames to nouns.

    `maps` are tried in order; the first that fits is taken, and the last one's error is told.
    """

    def __init__(
        self, maps: Sequence[Any], arrays: Any, convert: Callable[[Any], EngineEvent]
    ) -> None:
        self._maps = tuple(msgspec.msgpack.Decoder(kinds) for kinds in maps)
        self._arrays = (msgspec.msgpack.Decoder(arrays),)
        self._convert = convert
        self._strangers = Strangers()
        self._swift = Swift((*maps, arrays))

    def decode(self, payload: bytes) -> Decoded:
        """The events of a batch in order; raises BadBatch where there is no batch."""
        batch = self._swift.read(payload)
        if batch is not None:
            frames = self._swift.joined(batch.events)
            events = self._plain(frames)
            if events is not None:
                joined = len(batch.events) - len(frames)
                return Decoded(_clock(batch.ts), events, batch.dp_rank, joined=joined)
        return self._one_by_one(payload)

    def _plain(self, frames: Sequence[Any]) -> tuple[EngineEvent, ...] | None:
        """The events where each is good, and every medium was met before; else None."""
        media, convert = self._strangers.media, self._convert
        try:
            for frame in frames:
                if getattr(frame, "medium", None) not in media:
                    return None
            return tuple(map(convert, frames))
        except Bad:
            return None

    def _one_by_one(self, payload: bytes) -> Decoded:
        ts, raws, rank = _open(payload)
        events: list[EngineEvent] = []
        dropped: list[Dropped] = []
        unknown: tuple[str, ...] = ()
        void = 0
        for raw in raws:
            try:
                frame = self._frame(raw)
                events.append(self._convert(frame))
            except Bad as error:
                dropped.append(_why(raw, error))
                void = len(events) if dropped[-1].took_away else void
            else:
                unknown += self._strangers.look(frame, raw)
        return Decoded(_clock(ts), tuple(events), rank, tuple(dropped), unknown, void=void)

    def _frame(self, raw: msgspec.Raw) -> Any:
        decoders = self._maps if _is_map(raw) else self._arrays
        for decoder in decoders[:-1]:
            try:
                return decoder.decode(raw)
            except msgspec.ValidationError:
                continue
        last = decoders[-1]
        try:
            return last.decode(raw)
        except msgspec.ValidationError:
            again = loosened(raw)
            if again is None:
                raise
            return last.decode(again)


def _clock(ts: float | None) -> float:
    return ts if ts is not None and isfinite(ts) else 0.0


def _open(payload: bytes) -> tuple[float | None, list[msgspec.Raw], int | None]:
    try:
        if _is_map(payload):
            told = _BATCH_MAP.decode(payload)
            ranks = told.data_parallel_rank, told.attn_dp_rank, told.dp_rank
            return told.ts, told.events, next((rank for rank in ranks if rank is not None), None)
        batch = _BATCH.decode(payload)
    except Bad as error:
        raise BadBatch(f"payload of {len(payload)} bytes: {error}") from None
    return batch.ts, batch.events, batch.dp_rank


def _is_map(data: bytes | msgspec.Raw) -> bool:
    first = memoryview(data)[0] if len(data) else 0
    return 0x80 <= first <= 0x8F or first == 0xDE or first == 0xDF


def _why(raw: msgspec.Raw, error: BaseException) -> Dropped:
    """Tell a malformed event of a known kind from a kind that we do not know."""
    try:
        event = _ANY.decode(loosened(raw) or raw)
    except Bad:
        return Dropped("unknown", f"unreadable: {error}"[:200], unread=True)
    try:
        tag = event.get("type", event.get("event_type")) if isinstance(event, dict) else event[0]
    except (TypeError, LookupError):
        tag = None
    name = NAMES.get(tag, tag) if isinstance(tag, str) else tag
    if name in KINDS:
        return Dropped(str(name), f"malformed: {error}"[:200])
    return Dropped("unknown", f"kind {str(tag)[:60]!r}")


def read_tokens(raw: msgspec.Raw | list[int] | None) -> tuple[array[int], bool]:
    """Token ids as 32-bit numbers, and whether they came as pairs (the first of each is kept).

    Nil is no tokens. Raises one of `Bad` where an id is no unsigned 32-bit number.
    """
    if raw is None or isinstance(raw, list):  # read already
        return array("I", raw or ()), False
    if len(raw) > 5 * _TOO_MANY:
        raise ValueError(f"token_ids of {len(raw)} bytes: too many")
    if len(raw) == 1 and bytes(raw) == _NIL:
        return array("I"), False
    try:
        return array("I", _INTS.decode(raw)), False
    except msgspec.ValidationError:
        return array("I", [first for first, _ in _PAIRS.decode(raw)]), True

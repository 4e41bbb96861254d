"""Swift: a whole batch in one typed call, where nothing in it is strange.

Pure. Nearly all batches are of one layout and hold only what we know; msgspec reads such a one six
times as fast as event by event. Whatever does not fit exactly, a member that nobody knows included,
is None here, and reading.py looks at it event by event. Open it to change what counts as plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec

_MOST = 1 << 20  # bytes; a longer batch that does not fit would be read several times
REMOVED = "BlockRemoved"  # the tag of what wire.py has; engines tell one hash in each
TOKENS = "token_ids"  # left as they are by wire.py, since some engines tell pairs
_Kinds = TypeVar("_Kinds")


class Batch(msgspec.Struct, Generic[_Kinds], array_like=True, frozen=True):
    """The envelope; the events have the members of wire.py, of subclasses that refuse others."""

    ts: float | None
    events: list[_Kinds]
    dp_rank: int | None = None


class Swift:
    """Of one reader: the layouts of its dialect, the one that fitted last is tried first."""

    def __init__(self, layouts: Sequence[Any]) -> None:
        kinds = [strict(one) for one in layouts]
        told = [kind for one in kinds for kind in get_args(one)]
        self._removals = frozenset(kind for kind in told if kind.__struct_config__.tag == REMOVED)
        self._decoders = [msgspec.msgpack.Decoder(Batch[kind]) for kind in kinds]  # type: ignore[valid-type]

    def read(self, payload: bytes) -> Batch[Any] | None:
        """The batch, every member of every event known; else None."""
        if len(payload) > _MOST:
            return None
        for at, decoder in enumerate(self._decoders):
            try:
                batch = decoder.decode(payload)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
            if at:
                self._decoders.insert(0, self._decoders.pop(at))
            return batch
        return None

    def joined(self, frames: Sequence[Any]) -> list[Any]:
        """Removals told one after the other, of one tier and group, as one of all their hashes.

        Spends the frames: the first of each run takes the hashes of the others.
        """
        kept, removals, last = [], self._removals, None
        for frame in frames:
            if type(frame) not in removals:
                last = None
            elif last is not None and _alike(frame, last):
                last.block_hashes.extend(frame.block_hashes)
                continue
            else:
                last = frame
            kept.append(frame)
        return kept


def _alike(one: Any, other: Any) -> bool:
    if one.group_idx != other.group_idx or one.locality != other.locality:
        return False
    return bool(one.medium == other.medium)


def strict(kinds: Any) -> Any:
    """The same structs, which now refuse members that they lack; still instances of the old."""
    return _union(tuple(_strict(kind) for kind in get_args(kinds)))


def _union(kinds: tuple[type, ...]) -> Any:
    found: Any = kinds[0]
    for kind in kinds[1:]:
        found = found | kind
    return found


def _strict(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    config = kind.__struct_config__
    told: list[Any] = []
    if TOKENS in kind.__struct_fields__:  # where they are what nearly all are, read at once
        told = [(TOKENS, list[int] | None, msgspec.field(default_factory=list))]
    return msgspec.defstruct(
        kind.__name__,
        told,
        bases=(kind,),
        tag=config.tag,
        tag_field=config.tag_field,
        array_like=config.array_like,
        forbid_unknown_fields=True,
        frozen=True,
    )

"""Form: one message as a table of its frames, in order.

Pure. mooncake.py, nixl.py, mori.py and notices.py hold the tables; messages.py chooses among them.
Frames are read by position: missing tails are defaults, frames beyond the last known are ignored,
and how many came is kept, for their number is the only version that is ever said.
Open it to change what a shorter or longer message means.

    frames   "NixlMsgGuard" "None" | "10.0.0.9" "45678" ... | (tail may be cut)
              front: literals         required up to `least`     defaults of the dataclass
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .fields import MOST_FRAMES, BadFrame, Kind, shown

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class Form(Generic[M]):
    """How `make` travels. Its attribute `frames`, where it has one, is the number of frames."""

    make: type[M]
    front: tuple[bytes, ...]  # guards and the message's own name
    fields: tuple[tuple[str, Kind[Any]], ...]  # attribute and kind, in wire order
    least: int  # frames without which nothing can be meant, front included

    @property
    def full(self) -> int:
        """Frames of the newest form known."""
        return len(self.front) + len(self.fields)

    def read(self, frames: Sequence[bytes]) -> M:
        """One message; raises BadFrame, never anything else."""
        bounded(frames)
        for at, literal in enumerate(self.front):
            if at >= len(frames) or frames[at] != literal:
                came = frames[at] if at < len(frames) else None
                raise BadFrame(at, "guard", shown(came), repr(literal))
        values: dict[str, Any] = {}
        for at, (name, kind) in enumerate(self.fields, len(self.front)):
            if at < len(frames):
                values[name] = _field(at, name, kind, frames[at])
            elif at < self.least:
                raise BadFrame(at, name, shown(None), kind.right)
        if "frames" in self.make.__annotations__:
            values["frames"] = min(len(frames), self.full)
        return self.make(**values)

    def write(self, message: M) -> list[bytes]:
        """As many frames as the message says it has, or all."""
        count = max(self.least, getattr(message, "frames", self.full)) - len(self.front)
        said = [kind.write(getattr(message, name)) for name, kind in self.fields[:count]]
        return [*self.front, *said]


def bounded(frames: Sequence[bytes]) -> None:
    """Raises BadFrame for no frame at all, and for more than anybody sends."""
    if not frames:
        raise BadFrame(0, "message", "no frame", "at least 1 frame")
    if len(frames) > MOST_FRAMES:
        came = f"a message of {len(frames)} frames"
        raise BadFrame(MOST_FRAMES, "message", came, f"at most {MOST_FRAMES} frames")


def _field(at: int, name: str, kind: Kind[Any], frame: bytes) -> Any:
    try:
        return kind.read(frame)
    except ValueError as error:
        raise BadFrame(at, name, shown(frame), kind.right) from error

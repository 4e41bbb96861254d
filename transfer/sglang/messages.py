"""Messages: bytes between SGLang's ranks, read and written for whichever backend they use.

Pure. Both ends of both directions: what reaches a prefill's PULL, what reaches a decode's PULL.
A message of staging buffers is known by name and refused by name. Open it to add a backend or a
message; the tables of frames are in the files beside it.

    read_at_prefill("nixl", frames) -> NixlRegister | NixlMetadata | Abort | Bootstrap
    read_at_decode("nixl", frames)  -> Status | AbortAck | AuxData
    write("nixl", message)          -> frames
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import mooncake, mori, nixl, notices
from .fields import StagingFrame
from .form import Form, bounded
from .mooncake import MooncakeMetadata, MooncakeRegister
from .mori import MoriMetadata, MoriRegister
from .nixl import NixlMetadata, NixlRegister
from .notices import Abort, AbortAck, AuxData, Bootstrap, Status

Register = MooncakeRegister | NixlRegister | MoriRegister
RoomMetadata = MooncakeMetadata | NixlMetadata | MoriMetadata
ToPrefill = Register | RoomMetadata | Abort | Bootstrap
ToDecode = Status | AbortAck | AuxData


@dataclass(frozen=True, slots=True)
class Backend:
    """The forms of one of SGLang's transfer backends."""

    register: Form[Any]
    metadata: Form[Any]
    status: Form[Status]
    read_metadata: Callable[[Sequence[bytes]], RoomMetadata]
    guards: tuple[bytes, ...] = ()  # that every register and metadata begins with


_MOONCAKE = Backend(mooncake.REGISTER, mooncake.METADATA, notices.BARE_STATUS, mooncake.metadata)
FORMS: dict[str, Backend] = {
    "mooncake": _MOONCAKE,
    "ascend": _MOONCAKE,
    "nixl": Backend(
        nixl.REGISTER, nixl.METADATA, notices.NIXL_STATUS, nixl.metadata, (nixl.GUARD,)
    ),
    "mori": Backend(
        mori.REGISTER, mori.METADATA, notices.MORI_STATUS, mori.metadata, (mori.GUARD,)
    ),
}


def forms(backend: str) -> Backend:
    """By name; raises ValueError that says which there are."""
    if backend not in FORMS:
        raise ValueError(f"backend {backend!r}: must be one of {', '.join(FORMS)}")
    return FORMS[backend]


def read_at_prefill(backend: str, frames: Sequence[bytes]) -> ToPrefill:
    """A message of a decode; raises BadFrame, StagingFrame where it is about staging buffers."""
    known = forms(backend)
    name = _name(frames)
    if name == b"ABORT":
        return notices.abort(frames)
    if name == b"BOOTSTRAP":
        return notices.BOOTSTRAP.read(frames)
    guards = len(known.guards)
    kind = frames[guards] if len(frames) > guards else None
    if tuple(frames[:guards]) == known.guards and kind == b"None":
        found: Register = known.register.read(frames)
        return found
    return known.read_metadata(frames)


def read_at_decode(backend: str, frames: Sequence[bytes]) -> ToDecode:
    """A message of a prefill; raises BadFrame, StagingFrame where it is about staging buffers."""
    known = forms(backend)
    name = _name(frames)
    if name == b"ABORT_ACK":
        return notices.ABORT_ACK.read(frames)
    if name == b"AUX_DATA":
        return notices.aux_data(frames)
    return known.status.read(frames)


def write(backend: str, message: ToPrefill | ToDecode) -> list[bytes]:
    """Its frames; a register or metadata of another backend raises TypeError."""
    known = forms(backend)
    common = (notices.ABORT, notices.ABORT_ACK, notices.BOOTSTRAP, notices.AUX_DATA)
    tables: tuple[Form[Any], ...] = (known.register, known.metadata, known.status, *common)
    for form in tables:
        if type(message) is form.make:
            return form.write(message)
    raise TypeError(f"{type(message).__name__} is no message of backend {backend}")


def _name(frames: Sequence[bytes]) -> bytes:
    """The first frame; raises for staging buffers and for what is no message at all."""
    bounded(frames)
    if frames[0] in notices.STAGING:
        right = "another message: staging buffers are not spoken here"
        raise StagingFrame(0, "name", frames[0].decode("ascii"), right)
    return frames[0]

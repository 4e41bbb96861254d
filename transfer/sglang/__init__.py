"""SGLang's own messages between prefill and decode ranks: ZMQ multipart, parsed and built.

Pure, all of it. `Register` and `RoomMetadata` are the two that open a transfer; no edge of ours
sends them yet, tests hold them to what SGLang's own builders and parsers were seen to do.
"""

from __future__ import annotations

from .fields import BadFrame, StagingFrame
from .messages import (
    FORMS,
    Register,
    RoomMetadata,
    ToDecode,
    ToPrefill,
    read_at_decode,
    read_at_prefill,
    write,
)
from .mooncake import MooncakeMetadata, MooncakeRegister
from .mori import MoriMetadata, MoriRegister
from .nixl import NixlMetadata, NixlRegister
from .notices import Abort, AbortAck, AuxData, Bootstrap, Status
from .states import Poll, Row, judge_row, later, of_room, rank_number

__all__ = [
    "FORMS",
    "Abort",
    "AbortAck",
    "AuxData",
    "BadFrame",
    "Bootstrap",
    "MooncakeMetadata",
    "MooncakeRegister",
    "MoriMetadata",
    "MoriRegister",
    "NixlMetadata",
    "NixlRegister",
    "Poll",
    "Register",
    "RoomMetadata",
    "Row",
    "StagingFrame",
    "Status",
    "ToDecode",
    "ToPrefill",
    "judge_row",
    "later",
    "of_room",
    "rank_number",
    "read_at_decode",
    "read_at_prefill",
    "write",
]

"""Transfer: moving the blocks of one room, and knowing that they are the right ones.

    prefill                                   decode
    backend.start(advertise, regions)         backend.start(advertise, regions)
    Offers(backend, layout, ...)              Puller(backend, layout, resolver, ...)
    offers.start(host) -> rank port
    offers.deliver(room, pages, ...)          puller.pull(triple, pages, ...) -> Metadata

Others use these names only.
"""

from .backends import BACKENDS, Backend, must_exit_hard, why_unavailable
from .errors import (
    BadMetadata,
    ChecksumMismatch,
    DeadlineExceeded,
    GenerationMismatch,
    LayoutMismatch,
    LeaseExpired,
    NotAvailable,
    NotRegistered,
    OtherPrompt,
    PeerGone,
    PrefillFailed,
    Refused,
    RoomMismatch,
    ShortData,
    Stalled,
    TransferError,
    Unresolved,
)
from .memory import region_of
from .metadata import Layout, Metadata, prompt_sum
from .metrics import TransferMetrics
from .offer import Offers
from .pull import Puller
from .regions import PageOut, Region
from .settings import TransferSettings
from .shards import Grid, owned
from .tamper import (
    UNTOUCHED,
    Tamper,
    Untouched,
    drop_last,
    flip_byte,
    foreign_room,
    stale_generation,
    swap_pages,
)

__all__ = [
    "BACKENDS",
    "UNTOUCHED",
    "Backend",
    "BadMetadata",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "GenerationMismatch",
    "Grid",
    "Layout",
    "LayoutMismatch",
    "LeaseExpired",
    "Metadata",
    "NotAvailable",
    "NotRegistered",
    "Offers",
    "OtherPrompt",
    "PageOut",
    "PeerGone",
    "PrefillFailed",
    "Puller",
    "Refused",
    "Region",
    "RoomMismatch",
    "ShortData",
    "Stalled",
    "Tamper",
    "TransferError",
    "TransferMetrics",
    "TransferSettings",
    "Unresolved",
    "Untouched",
    "drop_last",
    "flip_byte",
    "foreign_room",
    "must_exit_hard",
    "owned",
    "prompt_sum",
    "region_of",
    "stale_generation",
    "swap_pages",
    "why_unavailable",
]

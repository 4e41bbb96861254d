"""Events: what did the engines say?

Door of the package: the names others may use; everything else is private. Sits on kvplane.index,
knows nobody else. Open it to see what events offers.

    engine --ZMQ--> subscriber -> dialects -> translation -> index store
"""

from __future__ import annotations

from .dialects import DIALECTS, dialect_of
from .dialects.base import (
    AllCleared,
    BadBatch,
    BlocksRemoved,
    BlocksStored,
    Decoded,
    Dialect,
    Dropped,
    EngineEvent,
    engine_hash,
    engine_key,
)

__all__ = [
    "DIALECTS",
    "AllCleared",
    "BadBatch",
    "BlocksRemoved",
    "BlocksStored",
    "Decoded",
    "Dialect",
    "Dropped",
    "EngineEvent",
    "dialect_of",
    "engine_hash",
    "engine_key",
]

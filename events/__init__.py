"""Events: what did the engines say?

Door of the package: the names others may use; everything else is private. Sits on kvplane.index,
knows nobody else. Open it to see what events offers.

    engine --ZMQ--> subscriber -> dialects -> translation -> index store
"""

from __future__ import annotations

from .api import routes
from .broadcast import Broadcast, TooMany
from .dialects import DIALECTS, dialect_of
from .dialects.base import (
    AllCleared,
    BadBatch,
    BlocksRemoved,
    BlocksStored,
    Decoded,
    Dialect,
    EngineEvent,
    engine_hash,
    engine_key,
)
from .errors import BadEndpoint, EventsError
from .metrics import EventsMetrics
from .places import Place
from .sequence import Gap, Life, Seen, judge, same_life
from .settings import EventsSettings
from .states import State
from .subscriber import Subscriber
from .subscriptions import Following, Subscriptions
from .translation import Translation, Translator

__all__ = [
    "DIALECTS",
    "AllCleared",
    "BadBatch",
    "BadEndpoint",
    "BlocksRemoved",
    "BlocksStored",
    "Broadcast",
    "Decoded",
    "Dialect",
    "EngineEvent",
    "EventsError",
    "EventsMetrics",
    "EventsSettings",
    "Following",
    "Gap",
    "Life",
    "Place",
    "Seen",
    "State",
    "Subscriber",
    "Subscriptions",
    "TooMany",
    "Translation",
    "Translator",
    "dialect_of",
    "engine_hash",
    "engine_key",
    "judge",
    "routes",
    "same_life",
]

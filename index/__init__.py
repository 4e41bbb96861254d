"""Index: REMEMBER who holds which block.

Door to the package: the few names others may use. hashing, view and ranking decide; stores and
follower move bytes; api and client speak HTTP. Knows neither engines nor requests.
"""

from typing import TYPE_CHECKING, Any

from .errors import BadValue, CursorGone, IndexFault, IndexRefused, ShardsFixed, StoreDown
from .follower import Follower
from .hashing import Tokens, chain, extend, from_hex, pack, seed, to_hex
from .metrics import IndexMetrics, ViewCollector
from .ranking import Held, rank
from .settings import IndexSettings
from .stores import STORES, MemoryStore, RedisStore
from .stores.base import (
    TIERS,
    Applied,
    Batch,
    Entry,
    GapRefused,
    Outcome,
    Position,
    Repeat,
    Row,
    Snapshot,
    StaleEpoch,
    Store,
    WorkerState,
)
from .view import Facts, Size, View

if TYPE_CHECKING:
    from .api import index_app
    from .client import IndexClient

__all__ = [
    "STORES",
    "TIERS",
    "Applied",
    "BadValue",
    "Batch",
    "CursorGone",
    "Entry",
    "Facts",
    "Follower",
    "GapRefused",
    "Held",
    "IndexClient",
    "IndexFault",
    "IndexMetrics",
    "IndexRefused",
    "IndexSettings",
    "MemoryStore",
    "Outcome",
    "Position",
    "RedisStore",
    "Repeat",
    "Row",
    "ShardsFixed",
    "Size",
    "Snapshot",
    "StaleEpoch",
    "Store",
    "StoreDown",
    "Tokens",
    "View",
    "ViewCollector",
    "WorkerState",
    "chain",
    "extend",
    "from_hex",
    "index_app",
    "pack",
    "rank",
    "seed",
    "to_hex",
]


def __getattr__(name: str) -> Any:
    """The HTTP door and its client when first asked for: an engine needs neither, and the web
    framework behind them is a second of its start."""
    if name == "index_app":
        from .api import index_app

        return index_app
    if name == "IndexClient":
        from .client import IndexClient

        return IndexClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

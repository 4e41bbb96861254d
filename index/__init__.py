"""Index: REMEMBER who holds which block.

Door to the package: the few names others may use. hashing, view and ranking decide; stores and
follower move bytes; api and client speak HTTP. Knows neither engines nor requests.
"""

from .api import index_app
from .client import IndexClient
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

"""Index: REMEMBER who holds which block.

Door to the package: the few names others may use. hashing, view and ranking decide; stores and
follower move bytes; api and client speak HTTP. Knows neither engines nor requests.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .chains import Chains
from .errors import (
    BadValue,
    CursorGone,
    IndexFault,
    IndexRefused,
    ShardsFixed,
    StoreDown,
    StoreUnfit,
    StoreUnused,
)
from .facts import Facts, Size
from .follower import Follower
from .hashing import Tokens, chain, extend, from_hex, pack, seed, to_hex
from .metrics import IndexMetrics
from .ranking import Held, rank
from .settings import IndexSettings
from .stores import STORES, MemoryStore
from .stores.address import parse as redis_address
from .stores.base import (
    TIERS,
    Applied,
    Batch,
    Entry,
    GapRefused,
    Outcome,
    Position,
    Repeat,
    Snapshot,
    StaleEpoch,
    Store,
    WorkerState,
)
from .stores.rows import Note, Row, Value, group_key, group_of, rule_key
from .view import View

if TYPE_CHECKING:
    from .api import index_app
    from .client import IndexClient
    from .stores.lasting import Lasting
    from .stores.redis import RedisStore

__all__ = [
    "STORES",
    "TIERS",
    "Applied",
    "BadValue",
    "Batch",
    "Chains",
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
    "Lasting",
    "MemoryStore",
    "Note",
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
    "StoreUnfit",
    "StoreUnused",
    "Tokens",
    "Value",
    "View",
    "WorkerState",
    "chain",
    "extend",
    "from_hex",
    "group_key",
    "group_of",
    "index_app",
    "pack",
    "rank",
    "redis_address",
    "rule_key",
    "seed",
    "to_hex",
]


_LATE = {
    "index_app": ".api",
    "IndexClient": ".client",
    "Lasting": ".stores.lasting",
    "RedisStore": ".stores.redis",
}


def __getattr__(name: str) -> Any:
    """What brings a library of its own, when first asked for: an engine needs neither web
    framework nor Redis, and they are half of its start."""
    if name in _LATE:
        return getattr(import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

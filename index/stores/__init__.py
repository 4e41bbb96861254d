"""Stores: the indexes that survive a restart, by name.

Seam: base.py says what each must do. Add one here and tests/contracts/test_stores.py runs it.
"""

from collections.abc import Mapping

from .memory import MemoryStore
from .redis import RedisStore

STORES: Mapping[str, type] = {"memory": MemoryStore, "redis": RedisStore}

__all__ = ["STORES", "MemoryStore", "RedisStore"]

"""Stores: the indexes that survive a restart, by name.

Seam: base.py says what each must do. Add one here and tests/contracts/test_stores.py runs it. A
member is imported by who plugs it in: each brings its own library.
"""

from collections.abc import Mapping

from .memory import MemoryStore

STORES: Mapping[str, str] = {"memory": "MemoryStore", "redis": "RedisStore"}  # of kvplane.index

__all__ = ["STORES", "MemoryStore"]

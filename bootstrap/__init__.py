"""Bootstrap: where a prefill's ranks are, and which room goes to which of them.

Edge of the package: the table of names others may use. Pure parts (directory, topology, rooms)
decide; client, resolver and api move bytes.
"""

from __future__ import annotations

from .rooms import RoomTable, mint
from .settings import BootstrapSettings, ClientSettings, DirectorySettings, ResolverSettings
from .topology import Targets, Topology, Unreachable, compatible, targets

__all__ = [
    "BootstrapSettings",
    "ClientSettings",
    "DirectorySettings",
    "ResolverSettings",
    "RoomTable",
    "Targets",
    "Topology",
    "Unreachable",
    "compatible",
    "mint",
    "targets",
]

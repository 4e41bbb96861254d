"""Bootstrap: where a prefill's ranks are, and which room goes to which of them.

Edge of the package: the table of names others may use. Pure parts (directory, topology, rooms)
decide; client, resolver and api move bytes.
"""

from __future__ import annotations

from .addresses import Address, is_loopback, is_wildcard, local
from .advertising import advertise
from .api import app as bootstrap_app
from .calls import fresh_session
from .client import BootstrapClient, Endpoint, RoomRanks
from .directory import Directory
from .errors import (
    BadAddress,
    BadAnswer,
    BadInput,
    BadRegistration,
    BootstrapError,
    Inconsistent,
    LateLife,
    NewLife,
    NodeFailed,
    NodeLost,
    NodeSilent,
    NodesMissing,
    NoDirectory,
    NotRegistered,
    NotRoutable,
    NotWelcome,
    RankUnknown,
    Refused,
    Silent,
)
from .follower import Node
from .heartbeat import Heartbeat
from .instances import Listener, Resolved
from .metrics import BootstrapMetrics
from .registration import Facts, Place, Registration
from .rendezvous import Leader
from .resolver import Resolver
from .rooms import RoomTable, mint
from .roster import Announced, Member, NodeState
from .settings import ClientSettings, DirectorySettings, RendezvousSettings, ResolverSettings
from .standing import AddressState
from .sweeper import RoomSweeper
from .topology import Targets, Topology, Unreachable, compatible, targets

__all__ = [
    "Address",
    "AddressState",
    "Announced",
    "BadAddress",
    "BadAnswer",
    "BadInput",
    "BadRegistration",
    "BootstrapClient",
    "BootstrapError",
    "BootstrapMetrics",
    "ClientSettings",
    "Directory",
    "DirectorySettings",
    "Endpoint",
    "Facts",
    "Heartbeat",
    "Inconsistent",
    "LateLife",
    "Leader",
    "Listener",
    "Member",
    "NewLife",
    "NoDirectory",
    "Node",
    "NodeFailed",
    "NodeLost",
    "NodeSilent",
    "NodeState",
    "NodesMissing",
    "NotRegistered",
    "NotRoutable",
    "NotWelcome",
    "Place",
    "RankUnknown",
    "Refused",
    "Registration",
    "RendezvousSettings",
    "Resolved",
    "Resolver",
    "ResolverSettings",
    "RoomRanks",
    "RoomSweeper",
    "RoomTable",
    "Silent",
    "Targets",
    "Topology",
    "Unreachable",
    "advertise",
    "bootstrap_app",
    "compatible",
    "fresh_session",
    "is_loopback",
    "is_wildcard",
    "local",
    "mint",
    "targets",
]

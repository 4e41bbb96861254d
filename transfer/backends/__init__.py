"""Backends: the ways pages can travel. Seam; a newcomer adds its file and one line here.

tcp    plain sockets in worker threads; the default, and the only one that refuses bytes early
fake   in this process, by memory copy; for tests of everything around it
mooncake  the Mooncake transfer engine, one-sided; extra `mooncake`
nixl   NIXL over UCX, one-sided; extra `nixl`; see nixl.must_exit_hard
mori   AMD GPUs; known by name, not available here
ascend Huawei NPUs; known by name, not available here
"""

from .base import Backend, Landing, MakeBackend, Offer, Peer, Ticket
from .fake import FakeBackend
from .mooncake import MooncakeBackend
from .nixl import MODULES, NixlBackend, must_exit_hard
from .tcp import TcpBackend
from .unavailable import Missing, UnavailableBackend, where_installed, why_unavailable

BACKENDS: dict[str, MakeBackend] = {
    "tcp": TcpBackend,
    "fake": FakeBackend,
    "mooncake": where_installed(
        "mooncake", ["mooncake"], "mooncake-transfer-engine-non-cuda", MooncakeBackend
    ),
    "nixl": where_installed("nixl", MODULES, "nixl-cu12", NixlBackend),
    "mori": Missing("mori", "it needs AMD GPUs and their library mori"),
    "ascend": Missing("ascend", "it needs Ascend NPUs and their library memfabric_hybrid"),
}

__all__ = [
    "BACKENDS",
    "Backend",
    "FakeBackend",
    "Landing",
    "MakeBackend",
    "Missing",
    "MooncakeBackend",
    "NixlBackend",
    "Offer",
    "Peer",
    "TcpBackend",
    "Ticket",
    "UnavailableBackend",
    "must_exit_hard",
    "where_installed",
    "why_unavailable",
]

"""Backends: the ways pages can travel. Seam; a newcomer adds its file and one line here.

tcp    plain sockets in worker threads; the default, and the only one that refuses bytes early
fake   in this process, by memory copy; for tests of everything around it
mori   AMD GPUs; known by name, not available here
ascend Huawei NPUs; known by name, not available here
"""

from .base import Backend, Landing, MakeBackend, Offer, Peer, Ticket
from .fake import FakeBackend
from .tcp import TcpBackend
from .unavailable import Missing, UnavailableBackend, where_installed, why_unavailable

BACKENDS: dict[str, MakeBackend] = {
    "tcp": TcpBackend,
    "fake": FakeBackend,
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
    "Offer",
    "Peer",
    "TcpBackend",
    "Ticket",
    "UnavailableBackend",
    "where_installed",
    "why_unavailable",
]

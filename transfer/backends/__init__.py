"""Backends: the ways pages can travel. Seam; a newcomer adds its file and one line here.

tcp    plain sockets in worker threads; the default, and the only one that refuses bytes early
fake   in this process, by memory copy; for tests of everything around it
"""

from .base import Backend, Landing, MakeBackend, Offer, Peer, Ticket
from .fake import FakeBackend
from .tcp import TcpBackend

BACKENDS: dict[str, MakeBackend] = {"tcp": TcpBackend, "fake": FakeBackend}

__all__ = [
    "BACKENDS",
    "Backend",
    "FakeBackend",
    "Landing",
    "MakeBackend",
    "Offer",
    "Peer",
    "TcpBackend",
    "Ticket",
]

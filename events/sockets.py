"""Sockets: room for a whole fleet's streams in one process.

Edge: one ZMQ context, and as many files as the system allows. Used by subscriptions.py. Open it
when a fleet has more streams than one process may hold sockets: each needs about four files.
"""

from __future__ import annotations

import contextlib
import logging
import resource

import zmq
import zmq.asyncio

log = logging.getLogger(__name__)


def roomy(sockets: int) -> zmq.asyncio.Context:
    """A context for so many sockets; said where the system allows fewer files."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, min(sockets, context.get(zmq.SOCKET_LIMIT)))
    files = raise_files()
    if files < sockets:
        log.info("open files limit=%d enough for about %d streams", files, files // 4)
    return context


def raise_files() -> int:
    """Let this process open as many files as it may; how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

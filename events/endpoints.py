"""Endpoints: where does each data-parallel rank of a pod publish?

Pure. Used by subscriptions.py. Open it when engines number their ports in another way. Source:
vLLM and SGLang both count ports up by the rank; port 0 is never shifted.

    tcp://*:5557 rank 2 -> tcp://<pod>:5559     inproc://kv rank 2 -> inproc://kv_dp2
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from kvplane.vocabulary import WorkerUp

from .errors import BadEndpoint

_ANY_HOST = ("*", "0.0.0.0", "[::]", "::")


def ranks(up: WorkerUp) -> tuple[tuple[str, str | None], ...]:
    """(events, replay or None) of each dp rank; a single endpoint is counted up from.

    Raises BadEndpoint for what cannot be connected to.
    """
    if not up.events:
        return ()
    host = urlsplit(up.url).hostname or ""
    count = max(up.dp_size, len(up.events))
    return tuple((_of(up.events, r, host) or "", _of(up.replay, r, host)) for r in range(count))


def _of(given: Sequence[str], rank: int, host: str) -> str | None:
    if not given:
        return None
    if len(given) == 1:
        return reachable(of_rank(given[0], rank), host)
    if rank >= len(given):
        raise BadEndpoint(", ".join(given), f"one base, or one endpoint per dp rank (rank {rank})")
    return reachable(given[rank], host)


def of_rank(base: str, rank: int) -> str:
    """The endpoint of a rank where the engine was given `base`."""
    if rank == 0:
        return base
    if base.startswith("inproc://"):
        return f"{base}_dp{rank}"
    head, colon, port = base.rpartition(":")
    if not base.startswith("tcp://") or not colon or not port.isdecimal():
        raise BadEndpoint(base, "tcp://host:port to count ranks from, or one endpoint per rank")
    return base if port == "0" else f"{head}:{int(port) + rank}"


def reachable(endpoint: str, host: str) -> str:
    """An endpoint as we connect to it: an any-address becomes the pod's own host."""
    scheme, found, rest = endpoint.partition("://")
    if not found or scheme not in ("tcp", "ipc", "inproc") or not rest:
        raise BadEndpoint(endpoint, "tcp://host:port, ipc://path or inproc://name")
    if scheme != "tcp":
        return endpoint
    name, _, port = rest.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadEndpoint(endpoint, "tcp://host:port with a port from 1 to 65535")
    if name not in _ANY_HOST:
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"

"""nixl: pages over NIXL with UCX; extra `nixl`.

Edge, a one-sided member of this seam. The agent's metadata travels in the offer; a transfer is
posted and asked for at growing pauses, for a spinning poll starves the very threads it waits for.
Open it to change how NIXL is asked.

Measured with 1.5.1 and host memory: where UCX may copy between processes by itself (cma), a sender
that was stopped goes on writing into our memory after our agent is destroyed: nothing fences that.
So such transports are excluded here; without them a destroyed agent applies nothing any more.
And once an agent existed, the interpreter crashes while it exits: `must_exit_hard()`.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ..errors import NotAvailable, PeerGone, Refused, Stalled, TransferError
from ..metrics import TransferMetrics
from ..settings import TransferSettings
from .nixl_transports import SAFE, by_itself
from .onesided import OneSidedBackend
from .onesided_plan import Move, Reach, Span
from .onesided_work import Stop

MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
MOST_BATCH = 16_384  # entries of one transfer; it has no limit of its own, our memory has
MOST_IDLE = 64  # agents kept known though no room uses them: to connect again costs 15-50 ms
FIRST_S, MOST_S = 0.0002, 0.004  # pauses between two questions
_made = threading.Event()


def must_exit_hard() -> bool:
    """Did this process make an agent? Then it ends with os._exit after its clean-up, or crashes."""
    return _made.is_set()


def load() -> Any:
    """The API module of whichever package is there; raises NotAvailable."""
    tls = os.environ.setdefault("UCX_TLS", SAFE)  # read when an agent is made
    wrong = by_itself(tls)
    if wrong:
        text = f"UCX_TLS={tls} lets a peer write by {', '.join(wrong)}, which nothing fences"
        raise NotAvailable("nixl", f"{text}; {SAFE} would be right")
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # what failed is raised
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # and never a line on our stdout
    for name in MODULES:
        try:
            return importlib.import_module(f"{name}._api")
        except ModuleNotFoundError as error:
            if error.name not in (name, f"{name}._api"):
                raise NotAvailable("nixl", f"{name}: {error}") from error
        except ImportError as error:
            raise NotAvailable("nixl", f"{name}: {error}") from error
    raise NotAvailable("nixl", "package nixl-cu12 is not installed (extra `nixl`)")


class NixlEngine:
    """See onesided_session.Engine."""

    port = 0  # the metadata tells it
    worn = False  # it forgets agents one by one

    def __init__(self, module: Any) -> None:
        self._module = module
        self.session = f"kvplane-{secrets.token_hex(8)}"
        self._agent: Any = None
        self._lock = threading.Lock()
        self._known: OrderedDict[str, int] = OrderedDict()  # agents -> rooms that use them

    def open(self, advertise: str, spans: Sequence[Span]) -> None:
        """Make the agent and register; its metadata is complete only then."""
        api = self._module
        config = api.nixl_agent_config(
            backends=["UCX"], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        _made.set()
        try:
            self._agent = api.nixl_agent(self.session, config)
            for kind in ("DRAM", "VRAM"):
                memory = [
                    (span.address, span.size, number, "")
                    for span in spans
                    for is_kind, number in [_segment(span.device)]
                    if is_kind == kind
                ]
                if memory:
                    self._agent.register_memory(memory, kind)
            self.library = bytes(self._agent.get_agent_metadata())
        except Exception as error:
            raise NotAvailable("nixl", f"no agent with UCX: {error!r}") from error

    def reach(self, reach: Reach, peer: str) -> str:
        """Connects; the name of the agent behind the metadata must be the one it says."""
        with self._lock:
            name = reach.session
            if name not in self._known:
                added = _added(self._agent, reach.library, peer)
                if added != name:
                    with suppress(Exception):
                        self._agent.remove_remote_agent(added)
                    raise Refused(peer, f"its metadata is of agent {added!r}, not {name!r}")
                self._known[name] = 0
            self._known[name] += 1
            self._known.move_to_end(name)
            return name

    def leave(self, where: str, gone: bool) -> None:
        """The dead are forgotten at once, the idle when there are too many."""
        with self._lock:
            if where not in self._known:
                return
            self._known[where] = max(0, self._known[where] - 1)
            idle = [name for name, rooms in self._known.items() if rooms == 0]
            for name in [where] if gone else idle[: max(0, len(self._known) - MOST_IDLE)]:
                del self._known[name]
                with suppress(Exception):  # it is gone either way
                    self._agent.remove_remote_agent(name)

    def write(self, where: str, moves: Sequence[Move], peer: str, stop: Stop) -> None:
        """One transfer; returns when it is DONE."""
        agent = self._agent
        try:
            local = _descriptors(agent, [(m.local, m.size, m.local_device) for m in moves])
            remote = _descriptors(agent, [(m.remote, m.size, m.remote_device) for m in moves])
            handle = agent.initialize_xfer("WRITE", local, remote, where, b"")
        except Exception as error:
            raise _unposted(error, peer) from error
        try:
            self._until_done(handle, peer, stop)
        finally:
            with suppress(Exception):  # where it is still moving, the agent frees it at its end
                agent.release_xfer_handle(handle)

    def _until_done(self, handle: Any, peer: str, stop: Stop) -> None:
        pause_s = FIRST_S
        try:
            state = self._agent.transfer(handle)
            while state == "PROC" and not stop.wait(pause_s):
                pause_s = min(pause_s * 1.5, MOST_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:
            raise PeerGone(peer, f"the transfer broke off: {error}") from error
        if state == "PROC":
            raise Stalled(peer, "the transfer was not done when its time was over")
        if state != "DONE":
            raise PeerGone(peer, f"the transfer ended as {state}")

    def close(self) -> None:
        """The agent and its threads end; what is under way is not applied any more."""
        with self._lock:
            self._known.clear()
            self._agent = None


def _segment(device: str) -> tuple[str, int]:
    """cpu -> DRAM 0, cuda:3 -> VRAM 3."""
    kind, _, number = device.partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


def _descriptors(agent: Any, pieces: Sequence[tuple[int, int, str]]) -> Any:
    kind, number = _segment(pieces[0][2])  # one batch is of one kind on each side
    table = np.array([(address, size, number) for address, size, _ in pieces], np.uint64)
    return agent.get_xfer_descs(table, kind)


def _added(agent: Any, metadata: bytes, peer: str) -> str:
    try:
        name = agent.add_remote_agent(metadata)
    except Exception as error:
        if type(error).__name__ in ("nixlMismatchError", "nixlInvalidParamError"):
            raise Refused(peer, f"its metadata is not understood: {error}") from error
        raise PeerGone(peer, f"its agent cannot be reached: {error}") from error
    return name.decode() if isinstance(name, bytes) else str(name)


def _unposted(error: Exception, peer: str) -> TransferError:
    """Nothing has left yet: the library compares with the metadata it knows."""
    if type(error).__name__ == "nixlRemoteDisconnectError":
        return PeerGone(peer, f"is disconnected: {error}")
    return Refused(peer, f"the transfer cannot be posted: {error}")


class NixlBackend(OneSidedBackend):
    """See base.Backend; start() raises NotAvailable where the library cannot be loaded."""

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        super().__init__("nixl", MOST_BATCH, lambda _: NixlEngine(load()), settings, metrics)

"""mooncake: pages over the Mooncake transfer engine; extra `mooncake`.

Edge, a one-sided member of this seam. Peers meet without a metadata service (P2PHANDSHAKE), bytes
travel over its TCP transport. Its calls block, say -1 without a reason and wait 30 s for a
stopped peer unless told otherwise before it starts. It listens on every address and lets anybody
write registered memory: the port belongs behind a network policy. Open it to change how Mooncake
is asked.

Measured with 0.3.13: two engines register the same memory; a destroyed one applies nothing any
more, also where a stopped sender wakes later; after -1 the source is not read again.
"""

from __future__ import annotations

import importlib
import os
import resource
import time
from collections.abc import Sequence
from typing import Any

from ..errors import NotAvailable, PeerGone, Stalled
from ..metrics import TransferMetrics
from ..settings import TransferSettings
from .onesided import OneSidedBackend
from .onesided_plan import Move, Reach, Span
from .onesided_work import Stop

MOST_BATCH = 1024  # entries of one call; from about 2100 on it refuses the whole
MOST_REACHED = 4096  # peers of one engine; each is a file
SYSTEM = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
TIMEOUTS = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_TCP_STATUS_TIMEOUT_SEC")


def load() -> Any:
    """mooncake.engine; raises NotAvailable with what is missing."""
    try:
        return importlib.import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        text = "package mooncake-transfer-engine-non-cuda is not installed (extra `mooncake`)"
        raise NotAvailable("mooncake", text) from error
    except ImportError as error:
        needed = next((each for each in SYSTEM if each in str(error)), None)
        hint = f" (apt install {SYSTEM[needed]})" if needed else ""
        raise NotAvailable("mooncake", f"{error}{hint}") from error


class MooncakeEngine:
    """See onesided_session.Engine."""

    library = b""

    def __init__(self, module: Any, timeout_s: float) -> None:
        self._module, self._timeout_s = module, timeout_s
        self._engine: Any = None
        self._reached: set[str] = set()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most_reached = min(files // 4, MOST_REACHED)

    def open(self, advertise: str, spans: Sequence[Span]) -> None:
        """Listen and register."""
        device = next((span.device for span in spans if span.device != "cpu"), None)
        if device is not None and not self._module.SUPPORT_CUDA:
            text = f"memory on {device}, but this build moves host memory only"
            raise NotAvailable("mooncake", text)
        self._engine = self._module.TransferEngine()
        code = self._engine.initialize(advertise, "P2PHANDSHAKE", "tcp", "")
        if code != 0:
            raise NotAvailable("mooncake", f"the engine does not start on {advertise}: {code}")
        addresses, sizes = [span.address for span in spans], [span.size for span in spans]
        code = self._engine.batch_register_memory(addresses, sizes)
        if code != 0:
            raise NotAvailable("mooncake", f"{len(spans)} regions cannot be registered: {code}")
        self.port = int(self._engine.get_rpc_port())
        self.session = f"{advertise}:{self.port}"

    def reach(self, reach: Reach, peer: str) -> str:
        """Nothing to do: the first write dials. (Its probe waits 60 s for a stopped process.)"""
        self._reached.add(reach.session)
        return reach.session

    @property
    def worn(self) -> bool:
        """It keeps a connection to every peer it ever reached, also where that peer is gone."""
        return len(self._reached) >= self._most_reached

    def write(self, where: str, moves: Sequence[Move], peer: str, stop: Stop) -> None:
        """One batch; -1 says only that not all of it is applied."""
        started = time.monotonic()
        code = self._engine.batch_transfer_sync_write(
            where,
            [move.local for move in moves],
            [move.remote for move in moves],
            [move.size for move in moves],
        )
        if code == 0:
            return
        took_s = time.monotonic() - started
        if took_s >= 0.8 * self._timeout_s:
            raise Stalled(peer, f"nothing was confirmed for {took_s:.1f} s")
        raise PeerGone(peer, f"the engine gave a batch of {len(moves)} up after {took_s:.2f} s")

    def leave(self, where: str, gone: bool) -> None:
        """Nothing to do: a peer that comes back is dialled anew."""

    def close(self) -> None:
        """Takes a second; nobody holds the engine besides us, so it ends here."""
        self._engine = None


class MooncakeBackend(OneSidedBackend):
    """See base.Backend; start() raises NotAvailable where the library cannot be loaded."""

    def __init__(self, settings: TransferSettings, metrics: TransferMetrics) -> None:
        def make(advertise: str) -> MooncakeEngine:
            timeout_s = _tell(settings.stall_s, advertise)
            return MooncakeEngine(load(), timeout_s)

        super().__init__("mooncake", MOST_BATCH, make, settings, metrics)


def _tell(stall_s: float, advertise: str) -> float:
    """Its environment, which it reads once: so before it is loaded. How long its calls may wait."""
    if ":" in advertise:
        os.environ.setdefault("MC_USE_IPV6", "1")
    wanted = str(min(5, max(2, round(stall_s))))  # whole seconds; under 2 a slow peer is given up
    told = [os.environ.setdefault(name, wanted) for name in TIMEOUTS]
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its info lines are not ours
    return min(float(seconds) for seconds in told)

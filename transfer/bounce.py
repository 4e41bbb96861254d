"""Bounce: bytes of a GPU on their way through host memory, for backends that only know the host.

Edge: calls torch, which is imported only where device memory is registered. Pinned host memory, a
stream of our own, and an event that is waited for: before bytes leave, and after they arrived.
Open it to change how device memory reaches a socket.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any


class TorchCopier:
    """See regions.Copier. One per region; two threads at once take turns."""

    def __init__(self, thing: Any, device: str) -> None:
        torch = importlib.import_module("torch")
        tensor = thing if isinstance(thing, torch.Tensor) else torch.as_tensor(thing, device=device)
        self._torch = torch
        self._bytes = tensor.view(-1).view(torch.uint8)
        self._stream = torch.cuda.Stream(device=device)
        self._pinned: Any = None
        self._lock = threading.Lock()

    def out(self, start: int, size: int) -> memoryview:
        """Device -> pinned -> the caller's own copy."""
        with self._lock:
            pinned = self._room(size)
            self._copy(pinned, self._bytes[start : start + size])
            return memoryview(bytearray(pinned.numpy().data))

    def back(self, start: int, data: memoryview) -> None:
        """Host -> pinned -> device."""
        with self._lock:
            pinned = self._room(len(data))
            pinned.numpy()[:] = data
            self._copy(self._bytes[start : start + len(data)], pinned)

    def _room(self, size: int) -> Any:
        """Pinned memory, kept for the next time: to pin is slow."""
        if self._pinned is None or self._pinned.numel() < size:
            self._pinned = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=True)
        return self._pinned[:size]

    def _copy(self, to: Any, source: Any) -> None:
        """Behind whatever the engine's stream still computes; returns when it is done."""
        self._stream.wait_stream(self._torch.cuda.default_stream(self._stream.device))
        with self._torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            done = self._stream.record_event()
        done.synchronize()

"""Memory: anything that holds bytes becomes a Region, or is refused with the reason.

Edge: it asks foreign objects. numpy, torch on CPU and CUDA, CuPy, bytearray, mmap, shared memory:
only regions travel further. Open it to accept another kind of memory.

    asked in this order          who answers
    data_ptr()                   torch, CPU and CUDA alike
    __cuda_array_interface__     CuPy, numba
    __array_interface__          numpy, also with dtypes that the buffer protocol does not know
    buffer protocol              bytearray, mmap, shared memory
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from .bounce import TorchCopier
from .regions import Copier, Region


@dataclass(frozen=True, slots=True)
class _Found:
    """What an object says of its memory."""

    address: int
    size: int  # bytes
    shape: tuple[int, ...]
    device: str = "cpu"


def region_of(thing: Any, items: int | None = None, name: str = "") -> Region:
    """`items` equal pieces, one after the other; None = as many as the first dimension says.

    Raises ValueError for memory that is not contiguous, not writable, empty, or does not divide.
    """
    found = _found(thing)
    if found.size == 0 or found.address == 0:
        raise ValueError("region: must not be empty")
    if items is None:
        if len(found.shape) < 2:
            raise ValueError(f"items: must be told for memory of shape {found.shape}")
        items = found.shape[0]
    if items < 1 or found.size % items:
        raise ValueError(f"items {items}: must divide the {found.size} bytes of the region")
    each = found.size // items
    if found.device == "cpu":
        return Region(_host(found), each, thing, name)
    copier: Copier = TorchCopier(thing, found.device)
    return Region(None, each, thing, name, found.device, found.address, found.size, copier)


def _found(thing: Any) -> _Found:
    if callable(getattr(thing, "data_ptr", None)):
        return _tensor(thing)
    for member in ("__cuda_array_interface__", "__array_interface__"):
        told = getattr(thing, member, None)
        if told is not None:
            return _interface(thing, told, member)
    return _buffer(thing)


def _tensor(thing: Any) -> _Found:
    """torch.Tensor, or what looks like one."""
    if not thing.is_contiguous():
        raise ValueError(f"region strides {tuple(thing.stride())}: must be contiguous")
    device = str(thing.device)
    if device.split(":")[0] not in ("cpu", "cuda"):
        raise ValueError(f"region device {device}: must be cpu or cuda")
    if device == "cuda":
        device = "cuda:0"
    size = int(thing.numel()) * int(thing.element_size())
    return _Found(int(thing.data_ptr()), size, tuple(thing.shape), device)


def _interface(thing: Any, told: dict[str, Any], member: str) -> _Found:
    shape, (address, readonly) = tuple(told["shape"]), told["data"]
    each = np.dtype(told["typestr"]).itemsize
    if readonly:
        raise ValueError("region: must be writable")
    strides = told.get("strides")
    if strides is not None and not _contiguous(shape, tuple(strides), each):
        raise ValueError(f"region strides {tuple(strides)}: must be contiguous")
    device = "cpu"
    if member.startswith("__cuda"):
        number = getattr(getattr(thing, "device", None), "id", 0)
        device = f"cuda:{int(number)}"
    return _Found(int(address), each * prod(shape), shape, device)


def _contiguous(shape: Sequence[int], strides: Sequence[int], each: int) -> bool:
    """C order; the stride of a dimension of one does not matter."""
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != each:
            return False
        each *= size
    return True


def _buffer(thing: Any) -> _Found:
    try:
        view = memoryview(thing)
    except TypeError as error:
        text = f"region {type(thing).__name__}: must be a tensor, an array or a buffer"
        raise ValueError(text) from error
    if view.readonly:
        raise ValueError("region: must be writable")
    if not view.c_contiguous:
        raise ValueError(f"region strides {view.strides}: must be contiguous")
    if view.nbytes == 0:
        raise ValueError("region: must not be empty")
    flat = np.frombuffer(view, np.uint8)
    return _Found(flat.ctypes.data, view.nbytes, tuple(view.shape or ()))


def _host(found: _Found) -> memoryview:
    """Its bytes; whoever owns them stays in the region."""
    memory = (ctypes.c_ubyte * found.size).from_address(found.address)
    return memoryview(memory).cast("B")

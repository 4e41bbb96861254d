"""Any memory becomes a region or is refused with the field that is wrong; devices use a copier."""

from __future__ import annotations

import mmap
import threading
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import pytest

from kvplane.transfer import BACKENDS, Region, TransferMetrics, TransferSettings, region_of
from kvplane.transfer import regions as regions_module
from kvplane.transfer.backends import Ticket
from kvplane.transfer.regions import Regions
from kvplane.vocabulary import Generation, Room


class Tensor:
    """What torch shows of a tensor, over numpy; not torch."""

    def __init__(self, array: np.ndarray, device: str = "cpu") -> None:
        self.array, self.device, self.shape = array, device, array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous

    def stride(self) -> tuple[int, ...]:
        return tuple(each // self.array.itemsize for each in self.array.strides)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize


class Interface:
    """Only an array interface, as CuPy or a dtype without a buffer shows it."""

    def __init__(self, array: np.ndarray, **changed: Any) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, **changed}


def numbers() -> np.ndarray:
    return np.arange(40, dtype=np.float16).reshape(5, 8)


@pytest.mark.parametrize("kind", [lambda a: a, Tensor, Interface], ids=["numpy", "torch", "other"])
def test_arrays_of_every_kind_are_one_kind_of_region(kind: Any) -> None:
    array = numbers()
    region = region_of(kind(array), name="l0.k0")
    assert (region.items, region.item_bytes, region.size) == (5, 16, 80)
    assert (region.address, region.device, region.name) == (array.ctypes.data, "cpu", "l0.k0")
    assert bytes(region.run(2, 2)) == array[2:4].tobytes()
    region.run(1)[:] = array[4].tobytes()
    assert (array[1] == array[4]).all(), "no copy"


def test_buffers_of_bytes_are_told_how_many_items_they_are() -> None:
    shared = SharedMemory(create=True, size=4096)
    try:
        for thing in (bytearray(4096), mmap.mmap(-1, 4096), shared.buf):
            region = region_of(thing, 8)
            region.run(3)[:] = b"x" * 512
            assert bytes(memoryview(thing)[3 * 512 : 4 * 512]) == b"x" * 512
            del region, thing
    finally:
        shared.close()
        shared.unlink()


def test_the_owner_lives_as_long_as_the_region() -> None:
    region = region_of(Tensor(numbers()))
    assert bytes(region.run(4)) == numbers()[4].tobytes()
    assert isinstance(region.owner, Tensor)


def frozen() -> np.ndarray:
    array = numbers()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("thing", "items", "why"),
    [
        (numbers().T, None, r"region strides \(2, 16\): must be contiguous"),
        (Tensor(numbers()[:, ::2]), None, r"region strides \(8, 2\): must be contiguous"),
        (frozen(), None, "region: must be writable"),
        (b"12345678", 2, "region: must be writable"),
        (memoryview(bytearray(80))[::2], 4, r"region strides \(2,\): must be contiguous"),
        (np.zeros((0, 4)), None, "region: must not be empty"),
        (bytearray(), 1, "region: must not be empty"),
        (bytearray(80), None, r"items: must be told for memory of shape \(80,\)"),
        (bytearray(80), 3, "items 3: must divide the 80 bytes"),
        (bytearray(80), 0, "items 0: must divide"),
        ("text", None, "region str: must be a tensor, an array or a buffer"),
        (Tensor(numbers(), "xpu:0"), None, "region device xpu:0: must be cpu or cuda"),
        (Interface(numbers(), strides=(8, 1)), None, r"region strides \(8, 1\)"),
    ],
)
def test_what_cannot_be_moved_is_refused_by_name(thing: Any, items: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        region_of(thing, items)


def test_a_dimension_of_one_may_have_any_stride() -> None:
    thing = Interface(numbers(), shape=(5, 1, 8), strides=(16, 999, 2))
    assert region_of(thing).item_bytes == 16


class StandInCopier:
    """Device memory that is host memory; a stand-in, counts what passes through the bounce."""

    def __init__(self, array: np.ndarray) -> None:
        self.bytes = array.reshape(-1).view(np.uint8)
        self.sizes: list[int] = []
        self._lock = threading.Lock()

    def out(self, start: int, size: int) -> memoryview:
        with self._lock:
            self.sizes.append(size)
        return memoryview(bytearray(self.bytes[start : start + size].data))

    def back(self, start: int, data: memoryview) -> None:
        with self._lock:
            self.sizes.append(len(data))
        self.bytes[start : start + len(data)] = data


def on_device(array: np.ndarray, name: str = "") -> Region:
    copier = StandInCopier(array)
    each = array.nbytes // array.shape[0]
    return Region(None, each, array, name, "cuda:0", 0xD000, array.nbytes, copier)


def test_pages_of_a_device_are_copied_only_when_looked_at() -> None:
    array = numbers()
    region = on_device(array)
    both = Regions([region, Region.of(numbers(), "host")])
    out = both.out([1, 2, 4], [7, 8, 9])
    assert region.copier.sizes == []  # type: ignore[union-attr]
    assert [bytes(part) for part in out[0].parts] == [array[1].tobytes()] * 2
    assert len(out[0].parts) == 2 and len(out[0].parts[1:]) == 1
    assert both.sums([3]) == Regions([Region.of(array, "a"), Region.of(numbers())]).sums([3])


def test_much_of_a_device_passes_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "BOUNCE_BYTES", 24)
    array = numbers()
    region = on_device(array)
    pieces = [bytes(piece) for piece in region.pieces(1, 4)]
    assert [len(piece) for piece in pieces] == [24, 24, 16]
    assert b"".join(pieces) == array[1:5].tobytes()
    for view in region.into(0, 2):
        view[:] = b"\x01" * len(view)
    assert array[:2].tobytes() == b"\x01" * 32 and array[2:].tobytes() == numbers()[2:].tobytes()


async def test_tcp_moves_device_memory_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions_module, "BOUNCE_BYTES", 1000)
    random = np.random.default_rng(3)
    here, there = random.random((16, 300)), np.zeros((16, 300))
    settings = TransferSettings()
    prefill, decode = (BACKENDS["tcp"](settings, TransferMetrics()) for _ in range(2))
    await prefill.start("127.0.0.1", [on_device(here)])
    await decode.start("127.0.0.1", [on_device(there)])
    try:
        ticket = Ticket(1, Room(71), Generation("d1"), (3, 4, 5, 9), 64)
        landing = decode.landing(ticket, 5.0)
        peer = await prefill.connect(landing.offer, ticket, Generation("d1"), 2.0)
        await prefill.write(peer, prefill.regions.out([1, 2, 3, 8], ticket.pages), 5.0)
        assert (there[[3, 4, 5, 9]] == here[[1, 2, 3, 8]]).all()
        assert not there[[0, 1, 2, 6, 7, 8]].any()
        await prefill.close_peer(peer)
        await decode.fence(landing)
    finally:
        await prefill.stop()
        await decode.stop()


def _torch_with_cuda() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed: no CUDA memory to move")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    return torch


def test_memory_of_a_gpu_comes_and_goes_through_the_pinned_bounce() -> None:
    torch = _torch_with_cuda()
    tensor = torch.arange(4000, dtype=torch.float16, device="cuda").reshape(10, 400)
    region = region_of(tensor)
    assert (region.memory, region.device, region.items) == (None, "cuda:0", 10)
    assert bytes(region.run(3)) == tensor[3].cpu().numpy().tobytes()
    for view in region.into(5, 2):
        view[:] = b"\0" * len(view)
    assert not tensor[5:7].any() and tensor[7:].all()


def test_a_torch_tensor_on_the_cpu_is_moved_as_it_is() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    tensor = torch.arange(40, dtype=torch.bfloat16).reshape(5, 8)
    region = region_of(tensor)
    assert region.address == tensor.data_ptr() and region.item_bytes == 16
    region.run(0)[:] = region.run(4)
    assert torch.equal(tensor[0], tensor[4])

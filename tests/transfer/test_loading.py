"""Loading the libraries of one-sided backends: what is missing is said at start, by name."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvplane.transfer import NotAvailable, Region, TransferMetrics, TransferSettings
from kvplane.transfer.backends import MakeBackend, MooncakeBackend, NixlBackend
from kvplane.transfer.backends.mooncake import TIMEOUTS, MooncakeEngine
from kvplane.transfer.backends.nixl_transports import SAFE
from kvplane.transfer.backends.onesided_plan import Span

SHARED = "libibverbs.so.1: cannot open shared object file: No such file or directory"


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception | None], None]:
    """Every import of a library ends so; None = as if it were not installed."""
    for name in (
        "UCX_TLS",
        "NIXL_LOG_LEVEL",
        "UCX_LOG_LEVEL",
        "MC_USE_IPV6",
        "MC_LOG_LEVEL",
        *TIMEOUTS,
    ):
        monkeypatch.setenv(name, "")  # so that whatever is set below goes away again
        monkeypatch.delenv(name)

    def make(error: Exception | None) -> None:
        def missing(name: str, package: str | None = None) -> Any:
            raise error or ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(importlib, "import_module", missing)

    return make


async def start(make: MakeBackend, settings: TransferSettings | None = None) -> None:
    backend = make(settings or TransferSettings(), TransferMetrics())
    try:
        await backend.start("127.0.0.1", [Region.of(np.zeros((2, 8), np.uint8))])
    finally:
        await backend.stop()


@pytest.mark.parametrize(
    ("make", "error", "why"),
    [
        (MooncakeBackend, None, r"mooncake-transfer-engine-non-cuda is not installed \(extra"),
        (MooncakeBackend, ImportError(SHARED), r"libibverbs.so.1: .* \(apt install libibverbs1\)"),
        (MooncakeBackend, ImportError("bad magic"), "not available here: bad magic$"),
        (NixlBackend, None, r"package nixl-cu12 is not installed \(extra `nixl`\)"),
        (NixlBackend, ImportError("libcuda.so.1"), "nixl_cu12: libcuda.so.1"),
        (
            NixlBackend,
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            "nixl_cu12: No module named 'torch'",
        ),
    ],
)
async def test_what_is_missing_is_named(
    absent: Callable[[Exception | None], None], make: MakeBackend, error: Exception, why: str
) -> None:
    absent(error)
    with pytest.raises(NotAvailable, match=why) as caught:
        await start(make)
    assert caught.value.kind == "not-available"


@pytest.mark.parametrize(("stall_s", "told"), [(0.5, "2"), (3.4, "3"), (60.0, "5")])
async def test_mooncake_is_told_to_give_up_in_seconds_before_it_is_loaded(
    absent: Callable[[Exception | None], None], stall_s: float, told: str
) -> None:
    absent(None)
    with pytest.raises(NotAvailable):
        await start(MooncakeBackend, TransferSettings(stall_s=stall_s))
    assert [os.environ[name] for name in TIMEOUTS] == [told, told]


async def test_what_an_operator_set_stays(
    absent: Callable[[Exception | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(None)
    monkeypatch.setenv(TIMEOUTS[0], "9")
    monkeypatch.setenv("UCX_TLS", "tcp")
    for make in (MooncakeBackend, NixlBackend):
        with pytest.raises(NotAvailable):
            await start(make)
    assert os.environ[TIMEOUTS[0]] == "9" and os.environ["UCX_TLS"] == "tcp"


async def test_nixl_is_kept_from_transports_that_write_by_themselves(
    absent: Callable[[Exception | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent(None)
    with pytest.raises(NotAvailable, match="not installed"):
        await start(NixlBackend)
    assert os.environ["UCX_TLS"] == SAFE
    monkeypatch.setenv("UCX_TLS", "all")
    with pytest.raises(
        NotAvailable, match=r"UCX_TLS=all lets a peer write by cma, .*nothing fences"
    ):
        await start(NixlBackend)


def test_device_memory_needs_a_build_that_knows_devices() -> None:
    class HostOnly:
        SUPPORT_CUDA = False

    engine = MooncakeEngine(HostOnly(), 2.0)
    with pytest.raises(NotAvailable, match="memory on cuda:0, but this build moves host memory"):
        engine.open("127.0.0.1", [Span(1, 2), Span(3, 4, "cuda:0")])

"""Backends that cannot run here: known by name, refused in a sentence, on either side of a pair."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from kvplane.transfer import (
    BACKENDS,
    LayoutMismatch,
    NotAvailable,
    TransferError,
    TransferMetrics,
    TransferSettings,
)
from kvplane.transfer.backends import (
    Backend,
    FakeBackend,
    Offer,
    Ticket,
    where_installed,
    why_unavailable,
)
from kvplane.transfer.errors import KINDS
from kvplane.vocabulary import Generation, Room

TICKET = Ticket(5, Room(71), Generation("d1"), (1,), 64)
ABSENT = [name for name, make in BACKENDS.items() if why_unavailable(make) is not None]
each = pytest.mark.parametrize("name", ABSENT)


def build(name: str) -> Backend:
    return BACKENDS[name](TransferSettings(), TransferMetrics())


def test_those_for_other_hardware_are_known_by_name() -> None:
    assert {"mori", "ascend"} <= set(ABSENT)
    assert why_unavailable(BACKENDS["tcp"]) is None


@each
async def test_it_says_at_start_what_it_needs(name: str) -> None:
    with pytest.raises(NotAvailable) as caught:
        await build(name).start("127.0.0.1", [])
    assert (
        str(caught.value)
        == f"backend {name}: not available here: {why_unavailable(BACKENDS[name])}"
    )
    assert isinstance(caught.value, TransferError) and caught.value.kind == "not-available"
    assert "not-available" in KINDS


@each
async def test_it_says_so_wherever_it_is_used_first(name: str) -> None:
    backend, peer = build(name), object()
    offer = Offer(name, 1, "10.0.0.9", 1, (64,), ("l0",))
    uses: list[Callable[[Any], Awaitable[object]]] = [
        lambda b: b.connect(offer, TICKET, Generation("d1"), 1.0),
        lambda b: b.write(peer, [], 1.0),
        lambda b: b.write_record(peer, b"", 1.0),
    ]
    for use in uses:
        with pytest.raises(NotAvailable, match=f"backend {name}: not available here"):
            await use(backend)
    for look in (lambda: backend.offer(), lambda: backend.regions):
        with pytest.raises(NotAvailable):
            look()
    with pytest.raises(NotAvailable):
        backend.landing(TICKET, 1.0)


@each
async def test_it_holds_nothing_and_can_be_taken_down(name: str) -> None:
    backend = build(name)
    await backend.close_peer(object())  # type: ignore[arg-type]
    await backend.stop()
    assert not any(backend.counts().values())


@pytest.mark.parametrize("name", ["mori", "ascend", "nixl"])
def test_an_offer_of_another_backend_is_refused_with_both_names(name: str) -> None:
    here = Offer("tcp", 1, "10.0.0.1", 1, (64,), ("l0",))
    assert here.differences(replace(here, backend=name)) == (f"backend tcp here, {name} there",)


@pytest.mark.parametrize("name", ["mori", "ascend"])
async def test_a_decode_with_such_a_backend_is_told_both_names(make_rig: Any, name: str) -> None:
    rig = await make_rig()
    decode = rig.backends[1]
    decode._offer = replace(decode.offer(), backend=name)
    with pytest.raises(LayoutMismatch) as caught:
        await rig.pull(71, [1, 2, 3])
    assert caught.value.fields == (f"backend tcp here, {name} there",)
    assert f"backend tcp here, {name} there" in str(caught.value)
    await rig.idle()


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"nixl_cu13": importlib.machinery.ModuleSpec("nixl_cu13", None)}
    monkeypatch.setattr(importlib.util, "find_spec", found.get)
    made = where_installed("nixl", ("nixl_cu12", "nixl_cu13"), "nixl-cu12", FakeBackend)
    assert made is FakeBackend
    absent = where_installed("mooncake", ("mooncake",), "mooncake-transfer-engine", FakeBackend)
    assert why_unavailable(absent) == (
        "it needs the package mooncake-transfer-engine, which is not installed"
    )

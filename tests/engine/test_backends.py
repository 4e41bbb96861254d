"""Backends with a package of their own carry real KV between ranks: the tokens are those of one.

`make test-transfer` runs these; without the package they are skipped, and say so.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from kit.pair import Pair, Start, alone, ask, asked, prompt

from kvplane.transfer import BACKENDS, why_unavailable
from kvplane.vocabulary import Role

SHAPES: list[tuple[dict[str, Any], dict[str, Any]]] = [  # prefill, decode
    *(({"tp": here}, {"tp": there}) for here in (1, 2, 4) for there in (1, 2)),
    ({"pp": 2}, {}),
    ({"dp": 2}, {}),
    ({"tp": 2, "pp": 2}, {"tp": 4, "pp": 2}),
]


def backends() -> list[Any]:
    """Those that can run here; the others skipped with why."""
    found = []
    for name in ("mooncake", "nixl"):
        why = why_unavailable(BACKENDS[name])
        if why is None and name == "nixl" and "KVPLANE_TEST_EXITS_HARD" not in os.environ:
            why = "it crashes a process that exits: make test-transfer runs it in its own"
        found.append(pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why))))
    return found


def named(shape: dict[str, Any]) -> str:
    return "-".join(f"{axis}{size}" for axis, size in shape.items()) or "one"


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    ("prefill", "decode"), SHAPES, ids=[f"{named(one)}-to-{named(two)}" for one, two in SHAPES]
)
async def test_every_shape_says_what_one_engine_says(
    start: Start, backend: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    two = Pair(
        *await asyncio.gather(
            start(Role.PREFILL, backend=backend, **prefill),
            start(Role.DECODE, backend=backend, **decode),
        )
    )
    prompts = [prompt(tokens, tokens) for tokens in (1, 16, 333, 1000)]
    for ids in (*prompts, prompts[2] + prompt(40, 1)):  # the last one: both hold its beginning
        assert await two.tokens(**asked(ids, 12)) == alone(ids, 12), len(ids)
    await two.idle()


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("kind", ["flip-byte", "swap-pages", "foreign-room", "short"])
async def test_wrong_data_of_one_rank_is_no_answer(start: Start, backend: str, kind: str) -> None:
    two = Pair(
        *await asyncio.gather(
            start(Role.PREFILL, backend=backend, tp=2, room_s=10.0),
            start(Role.DECODE, backend=backend, room_s=5.0),
        )
    )
    await two.prefill.post("/fault", stage="verify", kind=kind, rank="tp=1")
    legs = await two.post("/generate", **ask(100))
    assert [status for status, _ in legs] == [502, 502], legs
    assert "prefill tp=1: " in legs[1][1]["error"]["message"], legs[1]
    await two.idle()
    assert await two.tokens(**ask(100)) == alone(ask(100)["input_ids"], 24)

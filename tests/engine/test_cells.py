"""Cells: names people read, and who is missing."""

from __future__ import annotations

import pytest

from kvplane.engine import BadSetting, EngineSettings
from kvplane.engine.cells import Cell, Sizes, missing


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        (Sizes(), [""]),
        (Sizes(tp=2), ["tp=0", "tp=1"]),
        (Sizes(pp=2), ["pp=0", "pp=1"]),
        (Sizes(tp=2, pp=2), ["tp=0 pp=0", "tp=1 pp=0", "tp=0 pp=1", "tp=1 pp=1"]),
        (Sizes(tp=2, dp=2), ["dp=0 tp=0", "dp=0 tp=1"]),
    ],
)
def test_only_axes_with_several_ranks_are_named(sizes: Sizes, names: list[str]) -> None:
    assert [sizes.name(cell) for cell in sizes.cells(0)] == names


def test_world_ranks_go_stage_by_stage() -> None:
    assert Sizes(tp=2, pp=2).cells(1) == (
        Cell(1, 0, 0), Cell(1, 0, 1), Cell(1, 1, 0), Cell(1, 1, 1),
    )  # fmt: skip


def test_who_is_missing_is_said_by_name_and_bounded() -> None:
    names = [f"tp={rank}" for rank in range(4)]
    assert missing(names, names[:3]) == "3 of 4, missing tp=3"
    assert missing(names, []) == "0 of 4, missing tp=0, tp=1, tp=2, tp=3"
    many = [f"tp={rank}" for rank in range(64)]
    assert missing(many, many[:1]).endswith("tp=7, tp=8 and 55 more")


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"tp": 3}, "tp = 3: must divide the 4 KV heads of this model: 1, 2, 4"),
        ({"tp": 0}, "tp = 0: must divide the 4 KV heads of this model: 1, 2, 4"),
        ({"tp": 8}, "tp = 8: must divide the 4 KV heads of this model: 1, 2, 4"),
        ({"pp": 3}, "pp = 3: must divide the 2 layers of this model: 1, 2"),
        ({"dp": 0}, "dp = 0: must be 1 or more"),
        ({"backend": "pigeon"}, "backend = 'pigeon': must be one of tcp, fake"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_by_name(
    told: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BadSetting) as refused:
        EngineSettings(**told)  # type: ignore[arg-type]
    assert str(refused.value).startswith(sentence)

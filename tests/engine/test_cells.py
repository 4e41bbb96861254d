"""Cells: names people read, and who is missing."""

from __future__ import annotations

from typing import Any

import pytest

from kvplane.engine import BadSetting, EngineSettings
from kvplane.engine.cells import Cell, Sizes, missing
from kvplane.engine.nodes import Nodes
from kvplane.vocabulary import Role


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


def test_nodes_share_out_world_ranks_evenly_and_in_order() -> None:
    nodes = Nodes(Sizes(tp=4), 2, 1)
    assert [cell.tp for cell in nodes.cells(0)] == [2, 3]
    assert [nodes.node_of(cell) for cell in Sizes(tp=4).cells(0)] == [0, 0, 1, 1]
    assert (nodes.leads, list(nodes.others)) == (False, [1])
    assert nodes.name(1) == "node 1 of 2 (tp=2, tp=3)"
    stages = Nodes(Sizes(tp=2, pp=2, dp=2), 2, 0)
    assert stages.name(1) == "node 1 of 2 (tp=0 pp=1, tp=1 pp=1)"
    assert stages.cells(1, 1) == (Cell(1, 1, 0), Cell(1, 1, 1))
    assert Nodes(Sizes(tp=2)).cells(0) == Sizes(tp=2).cells(0)


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            {"role": Role.DECODE},
            "nnodes = 2: only a prefill runs in several processes, and role = ",
        ),
        ({"role": Role.BOTH}, "nnodes = 2: only a prefill"),
        ({"tp": 1}, "nnodes = 2: must divide the 1 ranks of tp x pp"),
        ({"node_rank": 2}, "node_rank = 2: must be 0 to 1 where nnodes = 2"),
        ({"dist_init_addr": None}, "dist_init_addr = None: where node 0 gathers the others"),
        ({"dist_init_addr": "h:x"}, "dist_init_addr = 'h:x': where node 0 gathers the others"),
        ({"nnodes": 1, "node_rank": 1}, "node_rank = 1: must be 0 where nnodes = 1"),
        ({"role": Role.BOTH, "nnodes": 1, "node_rank": 1}, "node_rank = 1: must be 0 where"),
    ],
)
def test_nodes_that_cannot_be_are_refused_by_name(told: dict[str, Any], sentence: str) -> None:
    right = {"role": Role.PREFILL, "tp": 2, "nnodes": 2, "dist_init_addr": "127.0.0.1:7000"}
    assert EngineSettings(**right).rank_names == ["tp=0"]
    with pytest.raises(BadSetting) as refused:
        EngineSettings(**(right | told))
    assert str(refused.value).startswith(sentence)


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
        ({"backend": "mori"}, "backend = 'mori': not available here: it needs AMD GPUs"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_by_name(told: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadSetting) as refused:
        EngineSettings(**told)
    assert str(refused.value).startswith(sentence)

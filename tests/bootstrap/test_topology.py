"""Topology: all rank computations recorded from SGLang, and which shapes may meet."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.bootstrap import BadInput, Topology, Unreachable, compatible, targets
from kvplane.vocabulary import Shape

RECORDED = Path(__file__).parents[1] / "vectors" / "sglang-target-ranks.jsonl"
ONE = Topology(attn_tp_size=1, attn_cp_size=1, dp_size=1, pp_size=1)


def computed(case: dict[str, Any]) -> list[Any] | str:
    flags = case.get("flags", [])
    tp, cp, dp, pp = case["p"]
    prefill = Topology(
        tp, cp, dp, pp,
        enable_dsa_cache_layer_split="layersplit" in flags,
        enable_kv_cache_sharding="shard" in flags,
    )  # fmt: skip
    decode = Shape(tp=case["d"][0], pp=case["d"][1])
    try:
        found = targets(
            prefill, decode, case["e"], case["r"],
            mla=case["mla"], hybrid="hybrid" in flags, all_cp="allcp" in flags,
        )  # fmt: skip
    except Unreachable:
        return "AssertionError"
    lists = [list(ranks) for ranks in (found.tp_ranks, found.cp_ranks, found.pp_ranks)]
    return [found.tp_rank, *lists, found.dst_info_num, found.responses]


def test_all_1214_recorded_computations_are_ours() -> None:
    cases = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    cases = [case for case in cases if "p" in case]
    wrong = [c for c in cases if computed(c) != c.get("out", c.get("error"))]
    assert (len(cases), wrong) == (1214, [])


def test_dummies_are_the_listed_ranks_that_do_not_send() -> None:
    prefill, decode = replace(ONE, attn_tp_size=4), Shape(tp=2)
    assert targets(prefill, decode, 1, mla=True).dummies == {3}
    assert targets(prefill, decode, 1, mla=False).dummies == frozenset()
    assert targets(prefill, decode, 1, mla=True, hybrid=True).dummies == frozenset()
    sharded = replace(prefill, enable_kv_cache_sharding=True)
    assert targets(sharded, Shape(tp=4), 3, mla=True).dummies == frozenset()


def test_a_decode_split_over_contexts_cannot_receive() -> None:
    with pytest.raises(Unreachable, match="cp: decode 2"):
        targets(ONE, Shape(cp=2), 0)


@given(st.integers(0, 4), st.integers(0, 4), st.booleans())
def test_all_decode_ranks_together_reach_every_prefill_rank(p: int, d: int, mla: bool) -> None:
    prefill, decode = replace(ONE, attn_tp_size=2**p), Shape(tp=2**d)
    found = [targets(prefill, decode, rank, mla=mla) for rank in range(decode.tp)]
    assert {rank for one in found for rank in one.tp_ranks} == set(range(2**p))
    for one in found:  # what a rank waits for is what really sends
        assert one.responses == len(one.tp_ranks) - len(one.dummies)


@pytest.mark.parametrize(("prefill", "decode", "said"), [
    (Shape(page_size=64), Shape(page_size=32), ("page_size: prefill 64, decode 32",)),
    (Shape(kv_dtype="fp8"), Shape(kv_dtype="bf16"), ("kv_dtype: prefill fp8, decode bf16",)),
    (Shape(page_size=64), Shape(), ()),
    (Shape(kv_layout="nhd"), Shape(kv_layout=None), ()),
    (Shape(tp=4), Shape(tp=2), ()),
    (Shape(tp=2), Shape(tp=3), ("tp: prefill 2, decode 3, one must divide the other",)),
    (Shape(pp=2), Shape(pp=1), ()),
    (Shape(pp=1), Shape(pp=2), ("pp: prefill 1, decode 2, must be equal or 1",)),
    (Shape(cp=4), Shape(), ()),
    (Shape(), Shape(cp=2), ("cp: prefill 1, decode 2, only 1 can receive",)),
    (Shape(dp=4), Shape(dp=3), ()),
])  # fmt: skip
def test_each_difference_is_named_with_both_values(
    prefill: Shape, decode: Shape, said: tuple[str, ...]
) -> None:
    assert compatible(prefill, decode) == said


def test_all_differences_are_named_at_once() -> None:
    prefill = Shape(page_size=64, kv_dtype="auto", tp=2)
    assert len(compatible(prefill, Shape(page_size=32, kv_dtype="fp8", tp=3))) == 3


def test_an_answer_survives_the_way_there_and_back() -> None:
    full = replace(ONE, kv_layout="nhd", dsv41_spec_layout={"block": 4}, prefill_http_port=30000)
    assert Topology.parse(json.loads(json.dumps(full.answer()))) == full


def test_the_shorter_answer_of_an_older_server_is_understood() -> None:
    older = {k: v for k, v in ONE.answer().items() if "size" in k or k == "follow_bootstrap_room"}
    assert Topology.parse(older) == ONE


@pytest.mark.parametrize(("change", "field"), [
    ({"attn_tp_size": None}, "attn_tp_size"), ({"dp_size": 0}, "dp_size"),
    ({"pp_size": "2"}, "pp_size"), ({"kv_layout": 7}, "kv_layout"),
])  # fmt: skip
def test_an_answer_that_cannot_be_meant_names_its_member(
    change: dict[str, Any], field: str
) -> None:
    with pytest.raises(BadInput, match=field):
        Topology.parse(ONE.answer() | change)

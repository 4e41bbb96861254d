"""Registration: what a rank may say, and that everything else is named and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.directory import rank

from kvplane.bootstrap import BadRegistration, Registration

MEMBERS = sorted(rank(kv_layout=None, dsv41_spec_layout=None, load_balance_method="x",
    enable_dsa_cache_layer_split=False, enable_kv_cache_sharding=False, prefill_http_port=1,
    decode_allocation_policy="early", generation="g"))  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(("change", "field"), [
    ({"rank_port": "70000"}, "rank_port"), ({"rank_port": 0}, "rank_port"),
    ({"rank_port": "x"}, "rank_port"), ({"rank_port": True}, "rank_port"),
    ({"rank_ip": "0.0.0.0"}, "rank_ip"), ({"rank_ip": "::"}, "rank_ip"),
    ({"rank_ip": "[::]"}, "rank_ip"), ({"rank_ip": ""}, "rank_ip"), ({"rank_ip": 7}, "rank_ip"),
    ({"rank_ip": "a b"}, "rank_ip"), ({"rank_ip": "h\nx=1"}, "rank_ip"),
    ({"rank_ip": ...}, "rank_ip"),
    ({"attn_tp_rank": 1}, "attn_tp_rank"), ({"attn_tp_rank": -1}, "attn_tp_rank"),
    ({"attn_tp_rank": 0.0}, "attn_tp_rank"), ({"attn_tp_rank": None}, "attn_tp_rank"),
    ({"attn_tp_rank": "1"}, "attn_tp_rank"), ({"attn_tp_rank": "-0"}, "attn_tp_rank"),
    ({"attn_tp_size": 0}, "attn_tp_size"), ({"attn_tp_size": 10**9}, "attn_tp_size"),
    ({"attn_tp_size": "2"}, "attn_tp_size"), ({"pp_size": True}, "pp_size"),
    ({"attn_tp_size": 60_000, "pp_size": 60_000}, "dp x cp x tp x pp"),
    ({"page_size": None}, "page_size"), ({"page_size": 0}, "page_size"),
    ({"kv_cache_dtype": ...}, "kv_cache_dtype"), ({"kv_cache_dtype": 16}, "kv_cache_dtype"),
    ({"dsv41_spec_layout": [1]}, "dsv41_spec_layout"),
    ({"enable_kv_cache_sharding": "no"}, "enable_kv"),
    ({"prefill_http_port": -1}, "prefill_http_port"), ({"generation": "a b"}, "generation"),
    ({"generation": "x" * 129}, "generation"), ({"generation": 7}, "generation"),
    ({"system_dp_size": 2, "attn_dp_size": 2, "attn_dp_rank": 1}, "attn_dp_rank"),
])  # fmt: skip
def test_a_wrong_member_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(BadRegistration, match=field) as caught:
        Registration.parse(rank(**change))
    assert ": must be " in str(caught.value) or "(absent)" in str(caught.value)


@pytest.mark.parametrize("body", [None, [], "x", 7, [rank()]])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(BadRegistration, match="body"):
        Registration.parse(body)


def test_plain_replicas_and_attention_groups_take_different_rows() -> None:  # FR-BS-06
    attention = Registration.parse(rank(attn_dp_size=2, attn_dp_rank=1))
    plain = Registration.parse(rank(system_dp_size=2, system_dp_rank=1))
    assert attention.place.dp == plain.place.dp == 1
    assert attention.facts.dp == plain.facts.dp == 2


@pytest.mark.parametrize("ip", ["::1", "[::1]", "fe80::1%eth0", "prefill-0"])
def test_a_literal_in_brackets_is_kept_bare_and_repeated_as_sent(ip: str) -> None:  # FR-BS-04
    found = Registration.parse(rank(rank_ip=ip))
    assert found.address.host == ip.strip("[]")
    assert found.raw_ip == ip


@pytest.mark.parametrize("change", [
    {}, {"attn_dp_size": 4, "attn_dp_rank": 3}, {"system_dp_size": 3, "system_dp_rank": 2},
    {"attn_tp_size": 4, "attn_tp_rank": 2, "attn_cp_size": 2, "attn_cp_rank": 1,
     "pp_size": 2, "pp_rank": 1},
    {"kv_layout": "nhd", "dsv41_spec_layout": {"a": [1]}, "load_balance_method": "round_robin",
     "enable_kv_cache_sharding": True, "prefill_http_port": 30000, "generation": "life-1"},
])  # fmt: skip
def test_a_registration_survives_the_way_there_and_back(change: dict[str, Any]) -> None:
    found = Registration.parse(rank(**change))
    assert Registration.parse(json.loads(json.dumps(found.body()))) == found


@given(st.sampled_from(MEMBERS), json_values)
def test_any_value_in_any_member_is_taken_or_refused_by_name(member: str, value: Any) -> None:
    try:
        found = Registration.parse(rank() | {member: value})
    except BadRegistration as error:
        assert error.field == member or member.endswith(("_size", "_rank")), (error, member)
    else:
        assert found.facts.ranks >= 1
        assert len(str(found.address)) > 2


@given(json_values)
def test_any_body_is_taken_or_refused(body: Any) -> None:
    with pytest.raises(BadRegistration):
        Registration.parse(body)

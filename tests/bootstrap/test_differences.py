"""Differences: a rank that is not like its instance is named, listed or refused; never silent."""

from __future__ import annotations

from typing import Any

import pytest
from kit.directory import Seat, rank

from kvplane.bootstrap import Directory, Inconsistent, Registration
from kvplane.bootstrap.differences import differences
from kvplane.vocabulary import Generation

OTHER: dict[str, Any] = {
    "attn_tp_size": 4,
    "attn_cp_size": 2,
    "attn_dp_size": 2,
    "pp_size": 2,
    "page_size": 32,
    "kv_cache_dtype": "fp8",
    "kv_layout": "hnd",
    "dsv41_spec_layout": {"block": 4},
    "load_balance_method": "round_robin",
    "enable_dsa_cache_layer_split": True,
    "enable_kv_cache_sharding": True,
    "prefill_http_port": 31000,
    "decode_allocation_policy": "prefill_complete",
}  # every member that all ranks of an instance share, and another value of it
FULL = {"attn_tp_size": 2, "kv_layout": "nhd", "prefill_http_port": 30000}


def parsed(**members: Any) -> Registration:
    return Registration.parse(rank(**members))


@pytest.fixture
def table() -> Directory:
    found = Directory(Generation("s"))
    for tp in (0, 1):
        found.register(parsed(**FULL, attn_tp_rank=tp, rank_port=1 + tp))
    return found


def state(table: Directory) -> tuple[Any, ...]:
    return (table.table(), table.facts, table.generation, table.version, list(table.takeovers),
            list(table.differing))  # fmt: skip


@pytest.mark.parametrize("member", OTHER)
def test_a_rank_that_has_not_moved_cannot_have_changed(table: Directory, member: str) -> None:
    """Refused with both values, nothing stored."""
    new = parsed(**(FULL | {"attn_tp_rank": 1, "rank_port": 2, member: OTHER[member]}))
    before = state(table)
    with pytest.raises(Inconsistent) as caught:
        table.register(new)
    old = (rank() | {"load_balance_method": "follow_bootstrap_room"} | FULL).get(member)
    defaults = {"enable_dsa_cache_layer_split": False, "enable_kv_cache_sharding": False,
                "decode_allocation_policy": "early"}  # fmt: skip
    old = defaults.get(member, old)
    assert f"{member}: instance has {old!r}, rank says {OTHER[member]!r}" in str(caught.value)
    assert state(table) == before


def test_a_rank_that_differs_and_tries_again_is_taken_again() -> None:
    """An answer may be lost: the same registration twice is the same."""
    table = Directory(Generation("s"))
    table.register(parsed(attn_tp_size=2))
    odd = parsed(attn_tp_size=2, attn_tp_rank=1, page_size=32)
    assert table.register(odd).differing == table.register(odd).differing != ()
    with pytest.raises(Inconsistent, match="page_size: instance has 64, rank says 16"):
        table.register(parsed(attn_tp_size=2, attn_tp_rank=1, page_size=16))
    assert table.register(parsed(attn_tp_size=2, attn_tp_rank=1)).differing == ()


def test_every_difference_is_named_at_once(table: Directory) -> None:
    with pytest.raises(Inconsistent) as caught:
        table.register(parsed(**(FULL | {"rank_port": 1} | OTHER)))
    assert [what.split(":")[0] for what in caught.value.differing] == list(OTHER)


def test_a_rank_of_the_same_generation_cannot_differ_either() -> None:
    table = Directory(Generation("s"))
    table.register(parsed(attn_tp_size=2, generation="a"))
    before = state(table)
    with pytest.raises(Inconsistent, match="page_size: instance has 64, rank says 32"):
        table.register(parsed(attn_tp_size=2, attn_tp_rank=1, page_size=32, generation="a"))
    with pytest.raises(Inconsistent, match="page_size"):  # nor one that moved
        table.register(parsed(attn_tp_size=2, rank_port=9, page_size=32, generation="a"))
    assert state(table) == before
    assert table.register(parsed(attn_tp_size=2, page_size=32, generation="b")).new_life


def test_a_place_outside_the_grid_is_refused_with_both_sizes(table: Directory) -> None:
    before = state(table)
    with pytest.raises(Inconsistent, match="attn_tp_size: instance has 2, rank says 4"):
        table.register(parsed(**(FULL | {"attn_tp_size": 4, "attn_tp_rank": 3})))
    assert state(table) == before


def test_a_bigger_instance_comes_back_whatever_the_order() -> None:
    """A rank outside the old grid tries again, as engines do, and is in after any inside it."""
    for order in ((0, 3, 1, 2), (3, 2, 1, 0), (1, 0, 3, 2)):
        table = Directory(Generation("s"))
        for tp in (0, 1):
            table.register(parsed(attn_tp_size=2, attn_tp_rank=tp, rank_port=1 + tp))
        waiting = list(order)
        for _ in range(2):
            for tp in tuple(waiting):
                try:
                    table.register(parsed(attn_tp_size=4, attn_tp_rank=tp, rank_port=11 + tp))
                except Inconsistent:
                    continue
                waiting.remove(tp)
        assert table.complete()
        assert {c[2]: e.address.port for c, e in table.trusted().items()} == {
            tp: 11 + tp for tp in range(4)
        }


def test_a_rank_that_came_before_the_rest_of_its_life_is_not_lost() -> None:
    """Half an instance was in; another of another shape comes, a free place of it first."""
    table = Directory(Generation("s"), doubt_s=60)
    table.register(parsed(attn_tp_size=2, rank_port=1))
    assert table.register(
        parsed(attn_tp_size=2, attn_tp_rank=1, rank_port=12, page_size=32)
    ).differing
    assert table.register(parsed(attn_tp_size=2, rank_port=11, page_size=32), now=1).new_life
    assert table.facts is not None
    assert (table.facts.page_size, list(table.differing)) == (32, [])
    assert not table.complete(now=2), "it may be of a life between the two"
    assert table.complete(now=61)


def test_a_second_restart_in_another_shape_begins_a_life_of_its_own(table: Directory) -> None:
    table.register(parsed(**FULL, rank_port=11), now=1)  # rank 1 is in doubt now
    new = parsed(**(FULL | {"page_size": 32}), attn_tp_rank=1, rank_port=22)
    assert table.register(new, now=2).new_life
    assert {c[2]: e.address.port for c, e in table.trusted(2).items()} == {1: 22}
    table.register(parsed(**(FULL | {"page_size": 32}), rank_port=21), now=3)
    assert table.complete(3)


def test_replicas_and_attention_groups_are_not_mixed_in_silence() -> None:
    """FR-BS-06: rows of the two kinds would overwrite each other."""
    table = Directory(Generation("s"))
    table.register(parsed(attn_dp_size=2))
    done = table.register(parsed(system_dp_size=2, system_dp_rank=1))
    assert done.differing == (
        "attn_dp_size: instance has 2, rank says 1", "system_dp_size: instance has 1, rank says 2",
    )  # fmt: skip


def test_a_null_is_no_difference() -> None:
    first = parsed(kv_cache_dtype=None, prefill_http_port=1)
    second = parsed(kv_cache_dtype="bf16", kv_layout="nhd")
    assert differences(first.facts, False, second) == ()


def test_what_differs_fits_into_a_header() -> None:
    first, second = parsed(), parsed(kv_cache_dtype="größe " + "x" * 900)
    (what,) = differences(first.facts, False, second)
    assert what.isascii()
    assert len(what) < 250


async def test_a_differing_rank_is_told_so_in_every_place(seat: Seat) -> None:
    """First wins, as recorded; but the header, GET /ranks and the log say it."""
    await seat.put(attn_tp_size=2)
    reply = await seat.put(attn_tp_size=2, attn_tp_rank=1, page_size=32, kv_cache_dtype="fp8")
    assert (reply.status, reply.text) == (200, "OK")
    page = "page_size: instance has 64, rank says 32"
    dtype = "kv_cache_dtype: instance has 'bfloat16', rank says 'fp8'"
    assert reply.headers["x-kvplane-differing"] == f"{page}; {dtype}"
    assert (await seat.ranks())["differing"] == [
        f"dp=0 cp=0 tp=1 pp=0: {page}", f"dp=0 cp=0 tp=1 pp=0: {dtype}",
    ]  # fmt: skip
    assert "x-kvplane-differing" not in (await seat.put(attn_tp_size=2)).headers


async def test_a_refused_rank_is_told_both_values(seat: Seat) -> None:
    await seat.put()
    reply = await seat.put(page_size=32)
    assert reply.status == 400
    assert reply.text == "page_size: instance has 64, rank says 32"
    assert reply.headers["x-kvplane-differing"] == reply.text
    reply = await seat.put(
        attn_tp_size=2, attn_tp_rank=1, decode_allocation_policy="prefill_complete"
    )
    assert (reply.status, reply.text) == (400, "Inconsistent prefill allocation policies")
    assert "decode_allocation_policy: instance has 'early'" in reply.headers["x-kvplane-differing"]

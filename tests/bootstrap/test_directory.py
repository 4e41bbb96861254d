"""Directory: complete by ranks, one life at a time, nothing silently mixed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.directory import rank

from kvplane.bootstrap import (
    BadRegistration,
    BootstrapError,
    Directory,
    Inconsistent,
    LateLife,
    Registration,
)
from kvplane.bootstrap.directory import Accepted
from kvplane.vocabulary import Generation


def directory() -> Directory:
    return Directory(Generation("s"), doubt_s=60)


def put(table: Directory, now: float = 0.0, **members: Any) -> Accepted:
    return table.register(Registration.parse(rank(**members)), now)


def ports(table: Directory, now: float = 0.0) -> dict[int, int]:
    """tp rank -> port of all ranks whose address may be handed out."""
    return {cell[2]: entry.address.port for cell, entry in table.trusted(now).items()}


def two(table: Directory, first: int, second: int, now: float = 0.0, **members: Any) -> None:
    put(table, now, attn_tp_size=2, attn_tp_rank=0, rank_port=first, **members)
    put(table, now, attn_tp_size=2, attn_tp_rank=1, rank_port=second, **members)


def test_the_gate_counts_ranks_and_not_calls() -> None:
    table = directory()
    for _ in range(5):
        put(table, attn_tp_size=2)
    assert not table.complete()
    assert (table.registered(), table.missing()) == (1, [(0, 0, 1, 0)])
    put(table, attn_tp_size=2, attn_tp_rank=1)
    assert table.complete()
    assert table.missing() == []


def test_an_empty_directory_misses_nothing_and_is_not_complete() -> None:
    table = directory()
    assert (table.missing(), table.complete(), table.topology()) == ([], False, None)


def test_a_directory_that_came_back_empty_with_its_owner_is_no_older_lifes() -> None:
    table = Directory(Generation("s"), owner=Generation("b"))
    for _ in range(2):
        with pytest.raises(LateLife, match="generation a was replaced by b"):
            put(
                table, attn_tp_size=2, attn_tp_rank=1, generation="a"
            )  # before its owner, and after
        put(table, attn_tp_size=2, attn_tp_rank=0, generation="b")
    put(table, attn_tp_size=2, attn_tp_rank=1, generation="b")
    assert table.complete()
    assert table.generation == "b"


@given(st.permutations(range(16)))
def test_ranks_may_come_in_any_order_and_the_last_one_opens_the_gate(order: list[int]) -> None:
    table = directory()
    for i, cell in enumerate(order):
        assert not table.complete()
        assert len(table.missing()) == (16 - i if i else 0)
        put(table, attn_dp_size=2, attn_cp_size=2, attn_tp_size=2, pp_size=2, rank_port=1 + cell,
            attn_dp_rank=cell >> 3, attn_cp_rank=cell >> 2 & 1, attn_tp_rank=cell >> 1 & 1,
            pp_rank=cell & 1)  # fmt: skip
    assert table.complete()
    for cell in range(16):
        found = table.rank(cell >> 3, cell >> 2 & 1, cell >> 1 & 1, cell & 1)
        assert found is not None
        assert found.address.port == 1 + cell


def test_an_instance_that_comes_back_is_never_mixed_with_its_old_addresses() -> None:  # FR-BS-03
    table = directory()
    two(table, 1, 2)
    before = table.generation
    done = put(table, attn_tp_size=2, attn_tp_rank=0, rank_port=3)
    assert done.new_life
    assert str(done.replaced) == "10.0.0.1:1"
    assert not table.complete()
    assert ports(table) == {0: 3}
    assert table.rank(0, 0, 1, 0) is None
    after = table.generation
    put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=4)
    assert table.complete()
    assert ports(table) == {0: 3, 1: 4}
    assert before != after == table.generation  # changed exactly once


def test_a_rank_that_moved_alone_locks_nobody_out_for_ever() -> None:
    table = directory()
    two(table, 1, 2)
    put(table, now=10, attn_tp_size=2, attn_tp_rank=0, rank_port=3)
    assert not table.complete(now=69.9)
    assert table.complete(now=70)
    assert ports(table, now=70) == {0: 3, 1: 2}


def test_a_rank_in_doubt_that_says_the_same_again_is_believed() -> None:
    table = directory()
    two(table, 1, 2)
    put(table, attn_tp_size=2, attn_tp_rank=0, rank_port=3)
    life = table.generation
    put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=2)
    assert table.complete()
    assert (ports(table), table.generation) == ({0: 3, 1: 2}, life)


def test_a_rank_that_says_the_same_again_changes_nothing() -> None:
    table = directory()
    two(table, 1, 2)
    life = table.generation
    two(table, 1, 2)
    assert table.complete()
    assert table.generation == life


def test_another_generation_starts_a_new_table_and_the_old_one_cannot_come_back() -> None:
    table = directory()
    two(table, 1, 2, generation="a")
    assert table.generation == "a"
    assert put(table, attn_tp_size=2, attn_tp_rank=0, rank_port=3, generation="b").new_life
    assert (ports(table), table.generation) == ({0: 3}, "b")
    with pytest.raises(LateLife, match="a was replaced by b"):
        put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=2, generation="a")
    assert not table.complete(now=1e9), "no doubt ends here: nothing of life a is left"
    put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=4, generation="b")
    assert (ports(table), table.complete()) == ({0: 3, 1: 4}, True)


def test_a_crash_while_registering_is_seen_by_its_generation() -> None:
    table = directory()
    put(table, attn_tp_size=2, attn_tp_rank=0, rank_port=1, generation="a")
    put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=4, generation="b")
    assert not table.complete(), "rank 0 of life a is not taken for one of life b"
    put(table, attn_tp_size=2, attn_tp_rank=0, rank_port=3, generation="b")
    assert ports(table) == {0: 3, 1: 4}


def test_generations_made_here_differ_between_two_starts_of_the_server() -> None:
    one, other = Directory(Generation("s1")), Directory(Generation("s2"))
    two(one, 1, 2)
    two(other, 1, 2)
    assert one.generation != other.generation


def test_a_rank_that_differs_is_listed_and_the_first_facts_stay() -> None:
    table = directory()
    put(table, attn_tp_size=2)
    done = put(table, attn_tp_size=2, attn_tp_rank=1, page_size=32, kv_cache_dtype="fp8")
    assert done.differing == (
        "page_size: instance has 64, rank says 32",
        "kv_cache_dtype: instance has 'bfloat16', rank says 'fp8'",
    )
    topology = table.topology()
    assert topology is not None
    assert (topology.page_size, topology.kv_cache_dtype) == (64, "bfloat16")
    assert len(table.differing) == 2


def test_what_the_first_rank_did_not_know_the_next_one_tells() -> None:
    table = directory()
    put(table, attn_tp_size=2, kv_cache_dtype=None)
    put(table, attn_tp_size=2, attn_tp_rank=1, prefill_http_port=30000)
    topology = table.topology()
    assert topology is not None
    assert (topology.kv_cache_dtype, topology.prefill_http_port) == ("bfloat16", 30000)
    assert not table.differing


def test_an_instance_that_comes_back_with_other_sizes_is_taken_as_it_is_now() -> None:
    table = directory()
    two(table, 1, 2)
    done = put(table, attn_tp_size=4, attn_tp_rank=0, rank_port=3, page_size=32)
    assert done.new_life
    assert (len(table.missing()), ports(table)) == (3, {0: 3})
    assert not table.differing


def test_a_refused_rank_leaves_the_table_as_it_was() -> None:
    table = directory()
    put(table, attn_tp_size=2)
    version = table.version
    for change in (
        {"decode_allocation_policy": "prefill_complete"},
        {"dsv41_spec_layout": {"a": 1}},
    ):
        with pytest.raises(Inconsistent):
            put(table, attn_tp_size=2, attn_tp_rank=1, **change)
    assert (table.version, ports(table)) == (version, {0: 40000})


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
bodies = st.dictionaries(st.sampled_from(sorted(rank(generation="a"))), anything, max_size=3)


@given(st.lists(bodies, max_size=8))
def test_whatever_is_sent_is_taken_or_refused_and_a_refusal_changes_nothing(
    sent: list[dict[str, Any]],
) -> None:
    table = directory()
    for changes in sent:
        before = (table.table(), table.facts, table.generation, table.version, table.missing())
        try:
            new = Registration.parse(rank(attn_tp_size=2) | changes)
            table.register(new)
        except BootstrapError as error:
            assert isinstance(error, BadRegistration | Inconsistent | LateLife)
            after = (table.table(), table.facts, table.generation, table.version, table.missing())
            assert before == after
        else:
            entry = table.table()[new.place.cell]
            assert entry.address == new.address
            assert entry.trusted(0.0)


moves = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(1, 3), st.sampled_from([None, "a", "b"]), st.integers(0, 40)
    ),
    max_size=30,
)


@given(moves)
def test_whatever_registers_a_complete_table_has_every_rank_and_told_lives_never_mix(
    moves: list[tuple[int, int, str | None, int]],
) -> None:
    table, now = directory(), 0.0
    lives: dict[int, str | None] = {}  # tp rank -> life of its latest accepted registration
    for tp, port, life, wait in moves:
        now += wait
        try:
            put(table, now, attn_tp_size=4, attn_tp_rank=tp, rank_port=port, generation=life)
        except LateLife:
            continue
        lives[tp] = life
        found = table.rank(0, 0, tp, 0, now)
        assert found is not None
        assert found.address.port == port, "the latest address wins"
        if table.complete(now):
            assert set(ports(table, now)) == {0, 1, 2, 3}
            assert len({life for life in lives.values() if life is not None}) <= 1

"""Lookups: the right answer from memory, for who may read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kit.directory import Seat, rank

from kvplane.bootstrap import BadInput, Directory, Registration, Topology
from kvplane.bootstrap.lookups import MOST_QUERY, Lookups, lookup
from kvplane.bootstrap.registration import NEWER
from kvplane.vocabulary import Generation

SEVEN = ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype",
         "follow_bootstrap_room"]  # fmt: skip
SIX_NULLS = ["target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks",
             "required_dst_info_num", "required_prefill_response_num"]  # fmt: skip


def query(dp: object = -1, cp: object = -1, tp: object = -1, pp: object = -1) -> bytes:
    return (
        f"prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}"
    ).encode()


def put(table: Directory, now: float = 0.0, **members: Any) -> None:
    table.register(Registration.parse(rank(**members)), now)


@pytest.fixture
def table() -> Directory:
    return Directory(Generation("s"), doubt_s=60)


def test_an_answer_is_worded_once_and_again_when_the_table_moves(table: Directory) -> None:
    lookups = Lookups(table)
    put(table, attn_tp_size=2)
    closed = lookups.answer(query(), 0)
    assert lookups.answer(query(), 0) is closed
    put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=1)
    found = lookups.answer(query(0, 0, 1, 0), 0)
    assert (closed.status, found.status) == (503, 200)
    assert lookups.answer(query(0, 0, 1, 0), 0) is found
    assert lookups.answer(query(), 0).status == 200
    put(table, attn_tp_size=2, attn_tp_rank=1, rank_port=2)
    assert lookups.answer(query(0, 0, 1, 0), 0).status == 503, "rank 0 is in doubt"
    assert lookups.answer(query(0, 0, 1, 0), 59.9).status == 503
    assert json.loads(lookups.answer(query(0, 0, 1, 0), 60).body)["rank_port"] == 2


def test_what_is_kept_is_bounded(table: Directory) -> None:
    lookups = Lookups(table, most=4)
    put(table, attn_tp_size=8)
    for tp in range(100):
        lookups.answer(query(0, 0, tp, 0), 0)
        lookups.answer(query() + b"&extra=" + b"x" * 300, 0)
        assert len(lookups._kept) <= 4


@pytest.mark.parametrize(("bad", "field"), [
    (query("x"), "prefill_dp_rank"), (query(-1, "\x00"), "prefill_cp_rank"),
    (query(-1, -1, "1.5"), "target_tp_rank"), (query(-1, -1, -1, "9" * 5000), "target_pp_rank"),
    (query("%00"), "prefill_dp_rank"), (query("NaN"), "prefill_dp_rank"),
    (query("%ff%fe"), "prefill_dp_rank"), (b"a=1&" * 100 + query(), "query"),
    (query() + b"&x=" + b"y" * MOST_QUERY, "query"),
])  # fmt: skip
def test_what_can_be_no_question_is_named(table: Directory, bad: bytes, field: str) -> None:
    put(table)
    with pytest.raises(BadInput) as caught:
        Lookups(table).answer(bad, 0)
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


def test_a_huge_number_is_a_rank_that_is_not_there(table: Directory) -> None:
    put(table)
    found = Lookups(table).answer(query(0, 0, "9" * 3000, 0), 0)
    assert (found.status, len(found.body) < 5000) == (404, True)


def test_ranks_of_an_old_release_get_the_answer_its_decodes_can_read(table: Directory) -> None:
    """0.5.10 knows seven members and six nulls; one more would be an error there."""
    put(table, load_balance_method="follow_bootstrap_room")
    found = json.loads(lookup(table, query(), 0).body)
    assert list(found) == SEVEN + SIX_NULLS
    assert Topology.parse(found) == table.topology()


def test_ranks_of_a_release_between_get_what_they_sent(table: Directory) -> None:
    put(table, load_balance_method="round_robin", kv_layout="nhd", enable_kv_cache_sharding=True)
    assert list(json.loads(lookup(table, query(), 0).body)) == [
        *SEVEN, "kv_layout", "enable_kv_cache_sharding", *SIX_NULLS,
    ]  # fmt: skip


def test_an_instance_that_comes_back_newer_gets_the_longer_answer(table: Directory) -> None:
    put(table, load_balance_method="round_robin", page_size=32)
    assert "prefill_http_port" not in json.loads(lookup(table, query(), 0).body)
    put(table, load_balance_method="round_robin", rank_port=2, **dict.fromkeys(NEWER))
    assert "prefill_http_port" in json.loads(lookup(table, query(), 0).body)


@pytest.mark.parametrize(("taken", "expected"), [
    ((), None), ((0, 1, 3), "tp=2"), ((3,), "tp=0, tp=1, tp=2"), ((0, 1, 2, 3), None),
])  # fmt: skip
async def test_missing_ranks_are_named_in_a_header(
    seat: Seat, taken: tuple[int, ...], expected: str | None
) -> None:
    """FR-BS-01: on every 503, for both kinds of question, and on nothing else."""
    for tp in taken:
        await seat.put(attn_tp_size=4, attn_tp_rank=tp)
    for reply in (await seat.get(), await seat.get(0, 0, 0, 0)):
        assert reply.status == (200 if len(taken) == 4 else 503)
        assert reply.headers.get("x-kvplane-missing") == expected
        assert "x-kvplane-generation" in reply.headers


async def test_the_header_is_bounded(seat: Seat) -> None:
    await seat.put(attn_tp_size=1024, attn_dp_size=8, pp_size=4)
    missing = (await seat.get()).headers["x-kvplane-missing"]
    assert missing.startswith("dp=0 tp=0 pp=1, dp=0 tp=0 pp=2")
    assert missing.endswith(" and 32762 more")

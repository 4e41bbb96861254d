"""What engine events mean, case by case, on a table and a view."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from kvplane.events import (
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    Translation,
    Translator,
    engine_key,
)
from kvplane.index import Row, Value, chain
from kvplane.vocabulary import (
    Cleared,
    ClearReason,
    Epoch,
    Namespace,
    Pod,
    Removed,
    Stored,
    Tier,
    Worker,
)

P = Worker(Pod("p"))
SPACE = Namespace("m", 4)
TOKENS = list(range(100, 116))  # four blocks
BLOCKS = chain(TOKENS, SPACE).blocks
KEYS = [engine_key(number) for number in (1, 2, 3, 4)]


def fresh(copies: bool = True, table: dict[bytes, Value] | None = None) -> Translator:
    return Translator(P, Epoch(1), "m", table or {}, copies)


def stored(first: int = 0, last: int = 4, **facts: object) -> BlocksStored:
    """Blocks first..last-1 of the chain."""
    given = {
        "hashes": tuple(KEYS[first:last]),
        "parent": KEYS[first - 1] if first else None,
        "tokens": array("I", TOKENS[first * 4 : last * 4]),
        "block_size": 4,
    }
    return BlocksStored(**{**given, **facts})  # type: ignore[arg-type]


def removed(*positions: int, tier: Tier = Tier.GPU, group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(tuple(KEYS[at] for at in positions), tier, group)


def told(*blocks: int, tier: Tier = Tier.GPU, parent: int | None = None) -> Stored:
    above = None if parent is None else BLOCKS[parent]
    return Stored(P, Epoch(1), tier, above, tuple(BLOCKS[at] for at in blocks), 4)


def gone(*blocks: int, tier: Tier = Tier.GPU) -> Removed:
    return Removed(P, Epoch(1), tier, tuple(BLOCKS[at] for at in blocks))


def run(translator: Translator, *events: EngineEvent) -> Translation:
    return translator.translate(events)


def rows(out: Translation) -> dict[bytes, Value | None]:
    """Of blocks; the translator's own notes are left out."""
    return {key: row for key, row in out.rows.items() if key[:1] not in (b"!", b"?")}


def copies_of(translator: Translator, at: int) -> tuple[int, ...]:
    row = translator.table[KEYS[at]]
    assert isinstance(row, Row)
    return row.copies


def test_a_chain_from_the_root_gets_our_hashes() -> None:
    out = run(fresh(), stored())
    assert out.changes == [told(0, 1, 2, 3)]
    assert rows(out) == {
        key: Row(block, parent, (1, 0, 0, 0), 4)
        for key, block, parent in zip(KEYS, BLOCKS, [None, *BLOCKS], strict=False)
    }


def test_a_continuation_hangs_on_its_parent() -> None:
    translator = fresh()
    assert run(translator, stored(0, 2), stored(2, 4)).changes == [
        told(0, 1),
        told(2, 3, parent=1),
    ]


def test_a_removal_is_understood_after_a_restart_of_ours() -> None:
    first = fresh()
    run(first, stored())
    again = fresh(table=first.table)
    out = run(again, removed(3), removed(2))
    assert out.changes == [gone(3, 2)]  # neighbours become one
    assert rows(out) == {KEYS[3]: None, KEYS[2]: None}


def test_a_second_copy_outlives_the_removal_of_the_first() -> None:
    translator = fresh()
    out = run(translator, stored(), stored(3, 4), removed(3))
    assert out.changes == [told(0, 1, 2, 3)]
    assert out.rows[KEYS[3]] == Row(BLOCKS[3], BLOCKS[2], (1, 0, 0, 0), 4)
    assert run(translator, removed(3)).changes == [gone(3)]


def test_a_report_from_the_root_adds_no_copy() -> None:
    translator = fresh()
    out = run(translator, stored(), stored(), removed(3))
    assert out.changes == [told(0, 1, 2, 3), gone(3)]


def test_a_report_heals_what_we_lack_and_counts_nothing_else() -> None:
    translator = fresh()
    run(translator, stored(0, 2))
    out = run(translator, stored())
    assert out.changes == [told(2, 3, parent=1)]
    assert copies_of(translator, 0) == (1, 0, 0, 0)


def test_a_store_from_the_root_adds_no_copy_even_where_the_root_was_lost() -> None:
    """It may be a report: a copy of h1 that looked like one was not counted, and is there still."""
    translator = fresh()
    run(translator, stored(), stored(0, 1), removed(0))
    out = run(translator, stored())
    assert out.changes == [told(0)]
    assert [copies_of(translator, at)[0] for at in range(4)] == [1, 1, 1, 1]


def test_an_engine_without_copies_is_there_or_not() -> None:
    translator = fresh(copies=False)
    run(translator, stored(), stored(3, 4))
    assert run(translator, removed(3)).changes == [gone(3)]


def test_a_sparse_store_is_never_counted_off() -> None:
    for sparse in (stored(hashes=tuple(KEYS[:1])), stored(hashes=()), stored(block_size=8)):
        out = run(fresh(), sparse)
        assert not out.changes and out.left_out == {"sparse": 1}


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention", ""])
def test_full_attention_is_indexed(kind: str) -> None:
    assert run(fresh(), stored(kind=kind)).changes


@pytest.mark.parametrize(
    ("kind", "group"),
    [("sliding_window", 0), ("mamba", 1), ("unknown", 0), ("chunked_local_attention", 0), ("", 1)],
)
def test_other_groups_are_not_indexed(kind: str, group: int) -> None:
    out = run(fresh(), stored(kind=kind, group=group))
    assert not out.changes and out.left_out == {"group": 1}


def test_a_removal_in_another_group_leaves_the_block_alone() -> None:
    translator = fresh()
    run(translator, stored(kind="full_attention", group=1))
    again = fresh(table=translator.table)  # knows the group from the table
    assert not run(again, removed(2, group=0)).changes
    assert run(again, removed(3, group=1)).changes == [gone(3)]


def test_removing_twice_or_the_unknown_is_harmless_and_counted() -> None:
    translator = fresh()
    run(translator, stored(0, 1))
    out = run(translator, removed(0), removed(0), removed(3), removed(1, tier=Tier.CPU))
    assert out.changes == [gone(0)] and out.left_out == {"unknown-removal": 3}


def test_one_removal_of_many_blocks_takes_them_all() -> None:
    translator = fresh()
    keys = tuple(engine_key(number) for number in range(64))
    run(translator, stored(hashes=keys, tokens=array("I", range(256))))
    out = run(translator, BlocksRemoved(keys))
    assert [len(change.blocks) for change in out.changes if isinstance(change, Removed)] == [64]
    assert set(rows(out).values()) == {None} and not out.left_out
    assert run(translator, BlocksRemoved(keys)).left_out == {"unknown-removal": 64}


def test_a_clear_empties_the_table_and_what_follows_counts() -> None:
    translator = fresh()
    run(translator, stored())
    out = run(translator, AllCleared(), stored(0, 1))
    assert out.cleared
    assert out.changes == [Cleared(P, Epoch(1), ClearReason.ENGINE), told(0)]
    assert [key for key, row in rows(out).items() if row is None] == KEYS[1:]


def test_a_name_used_for_other_content_takes_the_old_block_away() -> None:
    translator = fresh()
    run(translator, stored(0, 1))
    out = run(translator, stored(0, 1, tokens=array("I", [9, 9, 9, 9])))
    assert out.changes[0] == gone(0) and isinstance(out.changes[1], Stored)


def test_two_readers_of_one_stream_write_the_same_rows() -> None:
    events: Sequence[EngineEvent] = [stored(0, 2), stored(2, 4), removed(3), stored(3, 4)]
    whole = fresh()
    run(whole, *events)
    pieces = fresh()
    for event in events:
        pieces = fresh(table=pieces.table)  # as if restarted each time
        run(pieces, event)
    assert whole.table == pieces.table


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_held_and_waits_again_is_removed_once_for_each_copy(copies: bool) -> None:
    """Told again behind a parent that is lost: another copy, or where copies are not told the same
    one, which its parent must not bring back."""
    one = fresh(copies)
    run(one, stored(), removed(0, 1))
    run(one, stored(1, 3))  # its first block is not known any more: both wait
    assert run(one, removed(1, 2)).changes == [gone(2)]
    again = [told(2, parent=1)] if copies else []
    assert run(one, stored(0, 2)).changes == [told(0, 1), *again]
    assert run(one, removed(2)).changes == ([gone(2)] if copies else [])

"""What is told of lower tiers, too early, or without tokens: kept, explained, bounded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import msgspec
import pytest
from kit.translating import Ingest, P, blocks_of, keys_of, removed, stored, tokens_of

from kvplane.events import DIALECTS, AllCleared, EngineEvent, Translation
from kvplane.events.copies import MOST
from kvplane.events.translation import Limits
from kvplane.events.waiting import Wait
from kvplane.index import Note, Row, View, pack
from kvplane.vocabulary import ClearReason, Epoch, Pod, Stored, Tier, Worker

TOKENS = tokens_of(4)
BLOCKS = blocks_of(TOKENS)
CPU = Tier.CPU


def waiting(ingest: Ingest) -> int:
    return sum(1 for key in ingest.table if key.startswith(b"?w"))


def pieces(*positions: int) -> list[object]:
    """One event a block of the chain 1 2 3 4."""
    return [
        stored([at + 1], TOKENS[at * 4 : at * 4 + 4], parent=at if at else None) for at in positions
    ]


# -- tiers are held apart --------------------------------------------------------------------


def test_removing_the_gpu_copy_leaves_the_cpu_copy() -> None:
    ingest = Ingest()
    ingest.hear(stored([1], TOKENS[:4]), stored([1], TOKENS[:4], tier=CPU), removed(1))
    assert ingest.blocks() == set() and ingest.blocks(CPU) == {BLOCKS[0]}
    assert ingest.view.depths(BLOCKS) == {P: (1, {CPU: 1})}
    ingest.hear(removed(1, tier=CPU))
    assert ingest.depth(TOKENS) == 0


def wire(kind: str, medium: str | None) -> Sequence[EngineEvent]:
    """One event as an engine sends it."""
    told = {"type": kind, "block_hashes": [1], "medium": medium}
    told |= {"token_ids": TOKENS[:4], "block_size": 4} if kind == "BlockStored" else {}
    return DIALECTS["vllm"].decode(msgspec.msgpack.encode([1.0, [told], 0])).events


@pytest.mark.parametrize(
    ("media", "gone", "left"),
    [
        (["GPU", "CPU_TIER1"], "GPU", {CPU: 1}),
        ([None], "GPU", {}),
        (["CPU_PINNED"], "CPU", {}),
        (["gpu", "CPU_TIER2"], "CPU_TIER1", {Tier.GPU: 1}),
        (["XYZ", "GPU"], "GPU", {Tier.REMOTE: 1}),
        (["STORAGE", "GPU"], "GPU", {Tier.DISK: 1}),
        (["CPU:1", "GPU"], "GPU", {CPU: 1}),
    ],
)
def test_a_tier_of_many_names_is_removed_by_any_of_them(
    media: list[str | None], gone: str, left: dict[Tier, int]
) -> None:
    ingest = Ingest()
    for medium in media:
        ingest.hear(*wire("BlockStored", medium))
    ingest.hear(*wire("BlockRemoved", gone))
    assert ingest.view.depths(BLOCKS) == ({P: (1, left)} if left else {})


def test_a_clear_drops_every_tier_of_one_pod_only() -> None:
    view = View()
    a, b = (Ingest(Worker(Pod(name)), view=view) for name in "ab")
    names, tokens = list(range(1, 6)), tokens_of(5)
    for pod in (a, b):
        pod.hear(stored(names, tokens), stored(names, tokens, tier=CPU))
    a.hear(AllCleared())
    assert a.depth(tokens) == 0 and not a.blocks(CPU) and b.depth(tokens) == 5
    a.hear(stored([1], tokens[:4]))
    assert a.depth(tokens) == 1 and b.depth(tokens) == 5


def test_lower_tiers_count_what_two_chunks_share() -> None:
    """Chunks 1 2 3 and 1 2 9 are two copies of 1 and 2; the same chunk again is none."""
    ingest = Ingest()
    other = [*TOKENS[:8], 7, 7, 7, 7]
    ingest.hear(stored([1, 2, 3], TOKENS[:12], tier=CPU), stored([1, 2, 9], other, tier=CPU))
    ingest.hear(stored([1, 2, 3], TOKENS[:12], tier=CPU))
    assert [ingest.copies(name)[1] for name in (1, 2, 3, 9)] == [2, 2, 1, 1]
    ingest.hear(removed(1, 2, 3, tier=CPU))
    assert ingest.blocks(CPU) == {*BLOCKS[:2], blocks_of(other)[2]}


# -- names without tokens --------------------------------------------------------------------


def test_names_of_known_blocks_are_held_in_both_tiers() -> None:
    ingest = Ingest()
    out = ingest.hear(stored([1, 2, 3, 4], TOKENS), stored([1, 2, 3, 4], tier=CPU))
    assert out.changes[1:] == [Stored(P, Epoch(1), CPU, None, BLOCKS, 4)]
    assert not out.left_out
    ingest.hear(removed(1, 2, 3, 4))
    assert ingest.view.depths(BLOCKS) == {P: (4, {CPU: 4})}


def test_names_that_come_before_their_content_wait_for_it() -> None:
    ingest = Ingest()
    out = ingest.hear(stored([1, 2, 3], tier=CPU), ts=100.0)
    assert not out.changes and out.left_out == {"placeholder": 3} and out.waiting == {"kept": 3}
    out = ingest.hear(stored([1, 2, 3], TOKENS[:12]), ts=102.0)
    assert out.waiting == {"resolved": 3} and waiting(ingest) == 0
    assert ingest.blocks() == ingest.blocks(CPU) == set(BLOCKS[:3])


def test_a_name_that_is_removed_waits_no_longer() -> None:
    ingest = Ingest()
    ingest.hear(stored([1, 2], tier=CPU), stored([2], tier=CPU))
    out = ingest.hear(removed(1, 2, tier=CPU), removed(1))
    assert out.waiting == {"removed": 2} and out.left_out == {"unknown-removal": 1}
    ingest.hear(stored([1, 2], TOKENS[:8]))
    assert ingest.blocks(CPU) == {BLOCKS[1]}  # one of two copies was removed


def test_names_nobody_explains_expire_by_count_and_time() -> None:
    ingest = Ingest(limits=Limits(most_waiting=8, waiting_s=60.0, waiting_batches=100))
    for number in range(20):
        out = ingest.hear(stored([number], tier=CPU), ts=100.0)
    assert waiting(ingest) == 8 and out.waiting["expired"] == out.left_out["expired"] == 1
    assert keys_of(19)[0] in {key[2:] for key in ingest.table}  # the newest is there
    ingest.hear(ts=159.0)
    assert waiting(ingest) == 8
    assert ingest.hear(ts=161.0).waiting == {"expired": 8}
    assert waiting(ingest) == 0


def test_without_a_clock_they_expire_by_batches() -> None:
    ingest = Ingest(limits=Limits(waiting_batches=3))
    ingest.hear(stored([1], tier=CPU))
    for _ in range(3):
        assert not ingest.hear().waiting
    assert ingest.hear().waiting == {"expired": 1}


@pytest.mark.parametrize("start", [12.5, 1.8e9, 1.8e9 + 86400, 0.0, -5.0, math.nan, math.inf])
def test_only_differences_of_the_engines_clock_count(start: float) -> None:
    ingest = Ingest()
    ingest.hear(stored([2], TOKENS[4:8], parent=1), ts=start)
    ingest.hear(stored([1], TOKENS[:4]), ts=start + 5.0)
    assert ingest.depth(TOKENS) == 2


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_clock_that_is_no_number_ends_no_wait(broken: float) -> None:
    for first, then in ((broken, 5.0), (5.0, broken)):
        ingest = Ingest(forgets=True)
        ingest.hear(stored([2], TOKENS[4:8], parent=1), ts=first)
        ingest.hear(stored([1], TOKENS[:4]), ts=then)
        assert ingest.depth(TOKENS) == 2


# -- children before their parents -----------------------------------------------------------


def test_a_child_counts_when_its_parent_has_come() -> None:
    ingest = Ingest()
    out = ingest.hear(stored([2], TOKENS[4:8], parent=1))
    assert not out.changes and out.left_out == {"orphan": 1} and out.waiting == {"kept": 1}
    assert ingest.depth(TOKENS) == 0
    out = ingest.hear(stored([1], TOKENS[:4]))
    assert ingest.depth(TOKENS) == 2 and out.waiting == {"resolved": 1}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_chains_of_orphans_come_together_in_any_order(order: tuple[int, ...]) -> None:
    ingest = Ingest(forgets=True)
    for event in pieces(*order):
        ingest.hear(event)  # type: ignore[arg-type]
    assert ingest.depth(TOKENS) == 4 and waiting(ingest) == 0
    assert [ingest.copies(name)[0] for name in (1, 2, 3, 4)] == [1, 1, 1, 1]


def test_a_known_name_tells_where_it_belongs_only_if_its_tokens_are_the_same() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([1, 2], TOKENS[:8]), removed(1))
    out = ingest.hear(stored([2], TOKENS[8:12], parent=1))
    assert out.left_out == {"orphan": 1} and ingest.blocks() == {BLOCKS[1]}
    out = ingest.hear(stored([2, 3], TOKENS[4:12], parent=1))
    assert not out.left_out and ingest.blocks() == set(BLOCKS[1:3])


def test_two_branches_wait_for_one_parent_with_their_extra_keys() -> None:
    ingest = Ingest()
    branch = stored([7], TOKENS[4:8], parent=1, extra=(("img@0",),))
    ingest.hear(branch, stored([2, 3], TOKENS[4:12], parent=1), stored([1], TOKENS[:4]))
    assert ingest.depth(TOKENS) == 3 and len(ingest.blocks()) == 4


def test_copies_that_wait_are_counted_and_removed_one_by_one() -> None:
    ingest = Ingest()
    child = stored([2], TOKENS[4:8], parent=1)
    ingest.hear(child, child, child, removed(2))
    ingest.hear(stored([1], TOKENS[:4]))
    assert ingest.copies(2) == (2, 0, 0, 0)
    ingest.hear(removed(2), removed(2))
    assert ingest.depth(TOKENS) == 1


def test_what_waits_weighs_what_its_tokens_weigh_however_often_it_is_told() -> None:
    ingest = Ingest(limits=Limits(most_waiting_bytes=40))
    child = stored([2], TOKENS[4:8], parent=1)
    ingest.hear(child, child, child, removed(2))
    ingest.hear(stored([12], TOKENS[8:12], parent=11))
    assert waiting(ingest) == 2


def test_more_copies_than_a_row_can_say_are_as_many_as_it_can() -> None:
    ingest, again = Ingest(forgets=True), stored([2], TOKENS[4:8], parent=1)
    ingest.hear(stored([1, 2], TOKENS[:8]))
    (key,) = keys_of(2)
    ingest.table[key] = msgspec.structs.replace(ingest.rows()[key], copies=(MOST, 0, 0, 0))
    ingest.hear(again)
    assert ingest.copies(2) == (MOST, 0, 0, 0)
    ingest = Ingest(forgets=True)
    waits = Wait(0, 0.0, (MOST, 0, 0, 0), *keys_of(1), 4, (), bytes(pack(TOKENS[4:8])))
    ingest.table[b"?w" + key] = waits.note()
    ingest.hear(again)
    ingest.hear(stored([1], TOKENS[:4]), again)
    assert ingest.copies(2) == (MOST, 0, 0, 0)


def test_a_waiting_block_and_one_that_is_computed_behind_a_parent_are_two_copies() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([1], TOKENS[:4]), stored([3], TOKENS[8:12], parent=2))
    ingest.hear(stored([2, 3], TOKENS[4:12], parent=1))
    assert ingest.copies(3) == (2, 0, 0, 0)
    ingest.hear(removed(3))
    assert ingest.depth(TOKENS) == 3


def test_a_waiting_block_may_be_what_a_report_tells_again() -> None:
    """Copies are not added: after the removal of the one there is, nothing may be left."""
    ingest = Ingest()
    ingest.hear(stored([2], TOKENS[4:8], parent=1))
    ingest.hear(stored([1, 2], TOKENS[:8]), removed(2))
    assert ingest.depth(TOKENS) == 1


def test_orphans_are_bounded_in_blocks_and_bytes() -> None:
    ingest = Ingest(limits=Limits(most_waiting=100, most_waiting_bytes=64 * 16))
    for number in range(0, 1000, 10):
        names = list(range(number + 1, number + 9))
        ingest.hear(stored(names, tokens_of(8), parent=number + 100_000))
        assert waiting(ingest) <= 64
    notes = [v.data for k, v in ingest.table.items() if isinstance(v, Note) and k[:2] == b"?w"]
    assert sum(map(len, notes)) < 64 * 60
    assert not ingest.rows()
    huge = stored(list(range(5000, 5400)), tokens_of(400), parent=99)
    assert ingest.hear(huge).left_out["expired"] >= 300
    others = set(keys_of(*range(5000))) & {key[2:] for key in ingest.table}
    assert len(others) == 64 - 25  # one event takes a quarter of the room at most


def test_a_clear_forgets_what_waits() -> None:
    ingest = Ingest()
    ingest.hear(stored([2], TOKENS[4:8], parent=1), AllCleared(), stored([1], TOKENS[:4]))
    assert ingest.depth(TOKENS) == 1 and waiting(ingest) == 0


# -- names outlive the last copy -------------------------------------------------------------


def test_a_lower_tier_may_name_what_the_gpu_gave_up() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([1, 2, 3, 4], TOKENS), stored([1], tier=CPU))
    ingest.hear(removed(4, 3, 2))
    assert ingest.view.depths(BLOCKS) == {P: (1, {Tier.GPU: 1})}
    out = ingest.hear(stored([2, 3], tier=CPU))
    assert not out.left_out
    assert ingest.view.depths(BLOCKS)[P][0] == 3
    again = ingest.hear(stored([4], TOKENS[12:], parent=3))
    assert again.changes == [Stored(P, Epoch(1), Tier.GPU, BLOCKS[2], (BLOCKS[3],), 4)]
    assert ingest.copies(4) == (1, 0, 0, 0)


def test_a_child_of_a_parent_that_was_given_up_is_no_orphan() -> None:
    ingest = Ingest()
    ingest.hear(stored([1, 2], TOKENS[:8]), stored([1], tier=CPU), removed(2))
    ingest.hear(stored([3], TOKENS[8:12], parent=2))
    assert ingest.blocks() == {BLOCKS[0], BLOCKS[2]} and ingest.depth(TOKENS) == 1


def test_workers_without_lower_tiers_keep_no_names() -> None:
    ingest = Ingest()
    ingest.hear(stored([1], TOKENS[:4]), removed(1))
    assert not ingest.rows()


def test_after_a_loss_names_are_kept_only_once_a_lower_tier_is_heard_of_again() -> None:
    for reason, kept in ((ClearReason.ENGINE, 1), (ClearReason.GAP, 0)):
        ingest = Ingest()
        ingest.hear(stored([1], TOKENS[:4]), stored([1], tier=CPU))
        ingest.translator.clear(reason, Translation())
        ingest.hear(stored([2], TOKENS[:4]), removed(2))
        assert sum(isinstance(row, Row) for row in ingest.translator.table.values()) == kept


def test_names_without_copies_are_bounded_oldest_first() -> None:
    ingest = Ingest(limits=Limits(most_aliases=30), forgets=True)
    ingest.hear(stored([0], TOKENS[:4]), stored([0], tier=CPU))
    for number in range(1, 200):
        ingest.hear(stored([number], [number] * 4), removed(number))
        assert len(ingest.rows()) <= 31
    names = {key for key, row in ingest.rows().items() if not any(row.copies)}
    assert len(names) == 30 and set(keys_of(*range(190, 200))) <= names


def test_the_youngest_names_without_copies_stay_whatever_they_are_called() -> None:
    ingest = Ingest(limits=Limits(most_aliases=30), forgets=True)
    ingest.hear(stored([0], TOKENS[:4]), stored([0], tier=CPU))
    for number in range(300, 200, -1):
        ingest.hear(stored([number], [number] * 4), removed(number))
        assert set(keys_of(*range(number, min(number + 20, 301)))) <= ingest.rows().keys()

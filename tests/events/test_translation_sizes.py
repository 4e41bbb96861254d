"""Blocks of several sizes, chunks of other tiers, and how much of one worker is kept."""

from __future__ import annotations

import tracemalloc

import pytest
from kit.memory import bytes_in
from kit.translating import Ingest, P, blocks_of, held_by, keys_of, removed, stored, tokens_of

from kvplane.events import AllCleared
from kvplane.events.translation import Limits
from kvplane.index import Note
from kvplane.vocabulary import Tier

TOKENS = tokens_of(16)  # 64 tokens
CPU = Tier.CPU

# -- sizes are learnt ------------------------------------------------------------------------


def test_pages_of_an_engine_in_batches_of_their_own_with_a_branch() -> None:
    """Four pages of 16, a branch after the second; a missing page makes the rest unusable."""
    tokens, other = list(range(64)), [*range(32), *range(900, 932)]
    ingest = Ingest()
    for at in range(4):
        ingest.hear(stored([at + 1], tokens[at * 16 : at * 16 + 16], at or None, size=16))
    for at in (2, 3):
        parent = 2 if at == 2 else 13
        ingest.hear(stored([at + 11], other[at * 16 : at * 16 + 16], parent, size=16))
    assert ingest.depth(tokens, 16) == ingest.depth(other, 16) == 4
    assert ingest.view.block_size(P) == 16
    ingest.hear(removed(3))
    assert ingest.depth(tokens, 16) == 2 and ingest.depth(other, 16) == 4


def test_the_size_of_the_gpu_is_the_workers() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([1, 2], TOKENS[:8]))
    for size in (2, 8, 6):
        names = [100 * size + at for at in range(24 // size)]
        out = ingest.hear(stored(names, TOKENS[:24], size=size))
        assert out.left_out == {"block-size": 1} and not out.changes
    assert ingest.depth(TOKENS) == 2
    out = ingest.hear(stored([3], TOKENS[8:16], parent=2, size=8))
    assert out.left_out == {"block-size": 1}


def test_a_lower_tier_that_spoke_first_does_not_settle_the_size() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([900], TOKENS[:16], size=16, tier=CPU))
    assert ingest.depth(TOKENS, 16) == 1
    out = ingest.hear(stored([1, 2], TOKENS[:8]))
    assert out.left_out == {"block-size": 1}  # given up: nobody can say where it was cut
    assert ingest.depth(TOKENS) == 2 and ingest.depth(TOKENS, 16) == 0
    assert not ingest.blocks(CPU)


def test_of_lower_tiers_alone_the_first_one_says_the_size() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([900], TOKENS[:16], size=16, tier=CPU))
    ingest.hear(stored([901], TOKENS[16:48], 900, size=32, tier=CPU))  # a chunk of two
    assert ingest.depth(TOKENS, 16) == 3
    out = ingest.hear(stored([1], TOKENS[:4], tier=Tier.DISK))
    assert out.left_out == {"block-size": 1} and ingest.depth(TOKENS, 16) == 3


def test_what_waits_in_blocks_of_a_size_that_is_given_up_is_given_up_too() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([900], TOKENS[:16], size=16, tier=CPU))
    ingest.hear(stored([902], TOKENS[16:32], 1, size=16, tier=CPU))  # an orphan
    out = ingest.hear(stored([1], TOKENS[:4]))
    assert out.waiting == {"expired": 1} and ingest.blocks() == set(blocks_of(TOKENS)[:1])
    assert not ingest.blocks(CPU)


# -- chunks ----------------------------------------------------------------------------------


def chunk(*names: int, first: int = 0, parent: int | None = None) -> object:
    """Chunks of 16 tokens: four blocks each."""
    tokens = TOKENS[first * 16 : (first + len(names)) * 16]
    return stored(names, tokens, parent, size=16, tier=CPU)


def test_chunks_become_blocks_of_the_workers_size() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored([1, 2], TOKENS[:8]), chunk(501, 502))  # type: ignore[arg-type]
    assert ingest.blocks(CPU) == set(blocks_of(TOKENS)[:8])
    ingest.hear(chunk(503, first=2, parent=502))  # type: ignore[arg-type]
    assert ingest.view.depths(blocks_of(TOKENS)) == {P: (12, {Tier.GPU: 2, CPU: 10})}
    out = ingest.hear(chunk(504, first=3, parent=999))  # type: ignore[arg-type]
    assert out.left_out == {"orphan": 1}


def test_a_chunk_is_held_once_and_removed_whole() -> None:
    ingest = Ingest()
    told = chunk(501, 502)
    ingest.hear(stored([1], TOKENS[:4]), told, told, told)  # type: ignore[arg-type]
    ingest.hear(removed(502, tier=CPU))
    assert ingest.blocks(CPU) == set(blocks_of(TOKENS)[:4])
    ingest.hear(removed(501, tier=CPU), removed(501, tier=CPU))
    assert not ingest.blocks(CPU) and ingest.depth(TOKENS) == 1
    assert not any(key.startswith((b"?c", b"c")) for key in ingest.table)


def test_chunks_nobody_removes_are_given_up_when_they_are_old() -> None:
    ingest = Ingest(limits=Limits(chunk_s=3600.0), forgets=True)
    ingest.hear(stored([1], TOKENS[:4]), chunk(501), ts=1000.0)  # type: ignore[arg-type]
    ingest.hear(chunk(502, first=1, parent=501), ts=3000.0)  # type: ignore[arg-type]
    ingest.hear(chunk(501), ts=4000.0)  # type: ignore[arg-type]
    ingest.hear(ts=6601.0)
    assert ingest.blocks(CPU) == set(blocks_of(TOKENS)[:4])  # 502 is old, 501 was told again
    assert ingest.hear(ts=7601.0).left_out == {"expired": 4}
    assert not ingest.blocks(CPU) and ingest.depth(TOKENS) == 1
    assert held_by(ingest.table) == {(Tier.GPU, None): set(blocks_of(TOKENS)[:1])}


def test_a_chunk_of_several_tiers_is_known_until_the_last_gives_it_up() -> None:
    ingest = Ingest(limits=Limits(chunk_s=10.0), forgets=True)
    for tier in (CPU, Tier.DISK, Tier.REMOTE):
        told = stored([501], TOKENS[:16], size=16, tier=tier)
        ingest.hear(stored([1], TOKENS[:4]), told, ts=100.0)
    ingest.hear(removed(501, tier=CPU), ts=100.0)
    assert not ingest.blocks(CPU) and len(ingest.blocks(Tier.REMOTE)) == 4
    assert ingest.hear(ts=111.0).left_out == {"expired": 8}
    assert not ingest.blocks(Tier.DISK) and not ingest.blocks(Tier.REMOTE)


def test_a_clock_that_stands_still_ends_no_chunk_but_their_number_does() -> None:
    ingest = Ingest(limits=Limits(most_blocks=40))
    ingest.hear(stored([1], TOKENS[:4]))
    for number in range(100):
        tokens = [number * 10 + at for at in range(16)]
        ingest.hear(stored([1000 + number], tokens, size=16, tier=CPU))
    assert len(ingest.rows()) <= 41
    assert sum(isinstance(value, Note) for value in ingest.table.values()) <= 22


@pytest.mark.parametrize("more", range(1, 12))
@pytest.mark.parametrize("again", [False, True])
def test_a_chunk_some_of_whose_blocks_were_too_many_is_removed_whole(
    more: int, again: bool
) -> None:
    for most in range(3, 9):
        ingest = Ingest(limits=Limits(most_blocks=most), forgets=True)
        lower = [stored([501], TOKENS[:16], size=16, tier=tier) for tier in (CPU, Tier.DISK)]
        ingest.hear(stored([1], TOKENS[:4]), *lower)
        for at in range(1, more + 1):
            ingest.hear(stored([1 + at], TOKENS[4 * at : 4 * at + 4], at))
        ingest.hear(*lower if again else ())
        ingest.hear(removed(501, tier=CPU))
        assert not ingest.blocks(CPU)
        ingest.hear(removed(501, tier=Tier.DISK))
        assert not ingest.blocks(Tier.DISK)


def test_images_within_a_chunk_are_left_out() -> None:
    ingest = Ingest()
    event = stored([501], TOKENS[:16], size=16, tier=CPU, extra=(("img@0",),))
    assert ingest.hear(stored([1], TOKENS[:4]), event).left_out == {"extra-keys": 1}


# -- how much is kept ------------------------------------------------------------------------


def chain(ingest: Ingest, number: int, blocks: int) -> None:
    """A prompt of its own."""
    tokens = [number * 1000 + at for at in range(blocks * 4)]
    ingest.hear(stored([number * 100 + at for at in range(blocks)], tokens))


def test_the_oldest_go_first_and_are_said_to_be_gone() -> None:
    ingest = Ingest(limits=Limits(most_blocks=90))
    for number in range(1, 10):
        chain(ingest, number, 10)
    assert len(ingest.rows()) == 90
    for number in range(10, 13):
        chain(ingest, number, 10)
        assert len(ingest.rows()) == 90
    left = set(ingest.rows())
    assert not left & set(keys_of(*range(100, 110), *range(200, 210), *range(300, 310)))
    assert set(keys_of(*range(400, 410), *range(1200, 1210))) <= left
    assert held_by(ingest.table) == ingest.held


def test_a_chain_that_lost_blocks_only_counts_less_deep() -> None:
    ingest = Ingest(limits=Limits(most_blocks=30))
    for number in range(1, 6):
        chain(ingest, number, 10)
        for old in range(1, number + 1):
            tokens = [old * 1000 + at for at in range(40)]
            names = keys_of(*range(old * 100, old * 100 + 10))
            unbroken = next((at for at, key in enumerate(names) if key not in ingest.table), 10)
            assert ingest.depth(tokens) == unbroken


def test_what_is_stored_again_is_young_again() -> None:
    ingest = Ingest(limits=Limits(most_blocks=90))
    ingest.hear(stored([1, 2], TOKENS[:8]))
    for number in range(1, 30):
        ingest.hear(stored([2], TOKENS[4:8], parent=1), removed(2))
        ingest.hear(stored([1], TOKENS[:4], tier=CPU))
        chain(ingest, number, 10)
    assert ingest.depth(TOKENS) == 2


def test_after_the_cap_a_store_from_the_root_is_no_copy() -> None:
    """The engine has one copy of what we dropped, and may report it."""
    ingest = Ingest(limits=Limits(most_blocks=12))
    chain(ingest, 1, 10)
    chain(ingest, 2, 10)  # drops some of the first
    chain(ingest, 1, 10)
    assert {sum(row.copies) for row in ingest.rows().values()} == {1}


def test_two_ingests_let_the_same_blocks_go() -> None:
    whole, forgets = (Ingest(limits=Limits(most_blocks=50), forgets=each) for each in (False, True))
    for number in range(1, 60):
        for ingest in (whole, forgets):
            chain(ingest, number % 23, 1 + number % 7)
            if not number % 5:
                ingest.hear(removed(number % 23 * 100, number % 19 * 100 + 1))
        assert whole.table == forgets.table and whole.held == forgets.held


def test_memory_is_flat_beyond_the_cap() -> None:
    """Scaled down from 5 million blocks with a cap of 200,000 to 30,000 with 2,000."""
    most, sizes = 2_000, []
    ingest = Ingest(limits=Limits(most_blocks=most))
    dropped = 0
    tracemalloc.start()
    try:
        for number in range(30_000 // 50):
            tokens = list(range(number * 200, number * 200 + 200))
            out = ingest.hear(stored(range(number * 50, number * 50 + 50), tokens))
            dropped += out.left_out["cap"]
            if number % 100 == 99:
                assert len(ingest.rows()) <= most
                sizes.append(bytes_in("*/events/*.py"))
    finally:
        tracemalloc.stop()
    assert dropped == 30_000 - most
    # All of them would be 6 MB more.
    assert sizes[-1] < sizes[1] + (1 << 19)
    assert held_by(ingest.table) == ingest.held


def test_a_clear_makes_room_again() -> None:
    ingest = Ingest(limits=Limits(most_blocks=20))
    for number in range(1, 4):
        chain(ingest, number, 10)
    ingest.hear(AllCleared())
    chain(ingest, 4, 10)
    chain(ingest, 5, 10)
    assert len(ingest.rows()) == 20

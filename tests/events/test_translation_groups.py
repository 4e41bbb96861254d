"""Hybrid models: one group is counted, the others are named by it and never by counting."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.translating import Ingest, P, blocks_of, removed, stored, tokens_of

from kvplane.events import AllCleared, BlocksRemoved, BlocksStored, Translation
from kvplane.index import group_key, rule_key
from kvplane.vocabulary import (
    BlockHash,
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Removed,
    Stored,
    Tier,
)

TOKENS = tokens_of(8)
BLOCKS = blocks_of(TOKENS)
NAMES = list(range(1, 9))
WINDOW = Group(1, GroupKind.WINDOW, 8)
STATE = Group(2, GroupKind.STATE)


def full(first: int = 0, last: int = 8, group: int = 0, **facts: object) -> BlocksStored:
    """Blocks first..last-1 of the chain, all named."""
    parent = NAMES[first - 1] if first else None
    tokens = TOKENS[first * 4 : last * 4]
    kind = {"group": group, "kind": "full_attention", **facts}
    return stored(NAMES[first:last], tokens, parent, **kind)  # type: ignore[arg-type]


def window(
    *at: int, first: int = 0, last: int = 8, group: int = 1, **facts: object
) -> BlocksStored:
    """Tokens of blocks first..last-1, hashes of some of them."""
    parent = NAMES[first - 1] if first else None
    kind = {"group": group, "kind": "sliding_window", "window": 8, **facts}
    tokens = TOKENS[first * 4 : last * 4]
    return stored([NAMES[n] for n in at], tokens, parent, **kind)  # type: ignore[arg-type]


def mamba(*at: int) -> BlocksStored:
    return window(*at, group=2, kind="mamba", window=0)


def blocks(*at: int) -> set[BlockHash]:
    return {BLOCKS[n] for n in at}


def test_three_groups_and_a_removal_in_one() -> None:
    ingest = Ingest()
    ingest.hear(full(), window(6, 7), mamba(7))
    assert len(ingest.blocks()) == 8 and ingest.depth(TOKENS) == 8
    assert ingest.blocks(group=1) == blocks(6, 7) and ingest.blocks(group=2) == blocks(7)
    out = ingest.hear(removed(7, group=1))
    assert out.changes == [Removed(P, Epoch(1), Tier.GPU, (BLOCKS[6],), 1)]
    assert len(ingest.blocks()) == 8 and ingest.copies(7) == (1, 0, 0, 0)
    # 8 would need window blocks 6 and 7, all less the state's one block: none is left
    assert ingest.depth(TOKENS) == 0


def test_the_window_caps_what_is_usable() -> None:
    ingest = Ingest()
    ingest.hear(window(2, 3, first=0, last=4), full(0, 4), full(4, 8), window(6, 7, first=4))
    assert [ingest.depth(TOKENS[: n * 4]) for n in range(1, 9)] == [0, 0, 0, 4, 4, 4, 4, 8]
    ingest.hear(removed(7, group=1))
    assert ingest.depth(TOKENS) == 4


def test_a_group_is_told_once_before_its_blocks_and_again_after_a_clear() -> None:
    ingest = Ingest(forgets=True)
    out = ingest.hear(window(6, 7), full())
    announced = Stored(P, Epoch(1), Tier.GPU, None, (), 4, WINDOW)
    assert out.changes[1:] == [
        announced,
        Stored(P, Epoch(1), Tier.GPU, BLOCKS[5], BLOCKS[6:], 4, WINDOW),
    ]
    assert out.rows[rule_key(1)] == WINDOW
    assert not any(c == announced for c in ingest.hear(window(5, first=5, last=6)).changes)
    out = ingest.hear(AllCleared())
    assert out.changes == [Cleared(P, Epoch(1), ClearReason.ENGINE), announced]
    assert ingest.table[rule_key(1)] == WINDOW and not ingest.rows()


def test_the_counted_group_may_be_any_and_is_remembered() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(window(7, group=0), full(group=3))
    assert ingest.blocks() == set(BLOCKS) and ingest.blocks(group=0) == blocks(7)
    ingest.hear(removed(8, group=0))
    assert ingest.blocks() == set(BLOCKS) and not ingest.blocks(group=0)
    assert ingest.hear(removed(8, group=3)).changes
    assert ingest.blocks() == set(BLOCKS[:7])


def test_who_was_counted_before_kinds_were_told_is_counted_on() -> None:
    ingest = Ingest(forgets=True)
    ingest.hear(stored(NAMES, TOKENS))
    ingest.hear(full(group=3))
    assert ingest.depth(TOKENS) == 8
    ingest.hear(removed(8))
    assert ingest.depth(TOKENS) == 7 and len(ingest.blocks()) == 7


def test_a_group_that_is_all_there_is_and_no_attention_of_the_whole_is_not_counted() -> None:
    ingest = Ingest(forgets=True)
    for kind in ("unknown", "cross_attention", "mamba", "sliding_window"):
        out = ingest.hear(stored(NAMES, TOKENS, kind=kind))
        assert out.left_out == {"group": 1} and not ingest.rows()


def test_a_second_full_attention_group_caps_as_such() -> None:
    ingest = Ingest()
    ingest.hear(full(), full(0, 5, group=4))
    assert ingest.table[rule_key(4)] == Group(4, GroupKind.FULL)
    assert ingest.depth(TOKENS) == 5
    ingest.hear(removed(2, group=4))
    assert ingest.depth(TOKENS) == 1 and len(ingest.blocks()) == 8


def test_positions_of_sparse_hashes_are_never_guessed() -> None:
    ingest = Ingest()
    ingest.hear(full(0, 2))
    out = ingest.hear(window(6, first=2, last=8))  # the counted group's event was lost
    assert out.left_out == {"sparse": 1} and not ingest.blocks(group=1)
    assert ingest.hear(window(first=2, last=8)).left_out == {}  # no hashes, nothing to place


def test_dense_events_are_computed_from_their_parent() -> None:
    ingest = Ingest()
    ingest.hear(full(0, 2))
    ingest.hear(window(2, 3, first=2, last=4))
    assert ingest.blocks(group=1) == blocks(2, 3)
    ingest.hear(window(4, 5, first=4, last=6))  # its parent is known in its own group only
    assert ingest.blocks(group=1) == blocks(2, 3)


def test_a_block_of_the_same_batch_names_others_though_it_is_gone() -> None:
    ingest = Ingest()
    ingest.hear(window(7), full(), removed(8, 7), removed(7, group=1))
    assert ingest.blocks() == set(BLOCKS[:6]) and ingest.blocks(group=1) == blocks(7)


def test_copies_and_reports_are_counted_per_group() -> None:
    ingest = Ingest()
    ingest.hear(full(), window(6, 7))
    out = ingest.hear(full(7, 8), window(7, first=7))  # a second copy of the last block
    out.changes += ingest.hear(full(), window(6, 7)).changes  # a report: no copies
    assert not out.changes  # all of it is held already
    assert ingest.copies(8) == (2, 0, 0, 0) and ingest.copies(7) == (1, 0, 0, 0)
    ingest.hear(removed(8), removed(8, 7, group=1))
    assert len(ingest.blocks()) == 8 and ingest.blocks(group=1) == blocks(7)
    ingest.hear(removed(8, group=1))
    assert not ingest.blocks(group=1)


def test_a_group_of_larger_blocks_uses_every_other_hash() -> None:
    ingest = Ingest()
    state = stored([2, 4, 6, 8], TOKENS, size=8, group=2, kind="mamba")
    ingest.hear(full(), state)
    assert ingest.table[rule_key(2)] == Group(2, GroupKind.STATE, 0, 8)
    assert ingest.blocks(group=2) == blocks(1, 3, 5, 7)
    assert [ingest.depth(TOKENS[: n * 4]) for n in (8, 7, 1)] == [8, 6, 0]
    fresh = Ingest()  # dense, and the counted group knows only the first two blocks
    fresh.hear(full(0, 2), stored([4, 6], TOKENS[8:24], 2, size=8, group=2, kind="mamba"))
    assert fresh.blocks(group=2) == blocks(3, 5)
    pictures = stored([6], TOKENS[16:24], 4, size=8, group=2, kind="mamba", extra=(("img@0",),))
    fresh = Ingest()  # nobody says in which of its two blocks the picture lies
    fresh.hear(full(0, 4), stored([2, 4], TOKENS[:16], size=8, group=2, kind="mamba"))
    assert fresh.hear(pictures).left_out == {"sparse": 1} and fresh.blocks(group=2) == blocks(1, 3)


@pytest.mark.parametrize(
    "facts",
    [
        {"kind": "unknown"},
        {"kind": "cross_attention"},
        {"kind": "encoder_only_attention"},
        {"kind": ""},
        {"window": 0},  # a window nobody told the size of
        {"kind": "chunked_local_attention", "window": 0},
        {"window": 2**40},
    ],
)
def test_a_group_we_cannot_cap_by_is_said_to_be_uncertain(facts: dict[str, object]) -> None:
    ingest = Ingest(forgets=True)
    out = ingest.hear(full(), window(7, **facts))
    assert out.left_out == {"group": 1} and "hybrid" in out.caveat
    assert ingest.depth(TOKENS) == 8
    assert ingest.hear(removed(8, group=1)).left_out == {"group": 1}
    assert "hybrid" in ingest.hear().caveat  # it is remembered


def test_what_is_uncertain_of_a_model_outlives_a_clear_and_not_a_loss() -> None:
    """A clear is the engine's own; where batches are missing nothing is known of it."""
    for reason in (ClearReason.ENGINE, ClearReason.GAP):
        ingest, out = Ingest(), Translation()
        ingest.hear(full(), window(7, kind="unknown"))
        ingest.translator.clear(reason, out)
        assert bool(ingest.translator.caveat) == (reason is ClearReason.ENGINE)
        again = ingest.hear(stored([1], TOKENS[:8], size=8, kind="full_attention"))
        assert bool(again.left_out) == (reason is ClearReason.ENGINE)


def test_a_group_of_another_block_size_is_said_to_be_uncertain() -> None:
    ingest = Ingest()
    out = ingest.hear(full(), stored([2], TOKENS[:6], size=6, group=1, kind="mamba"))
    assert out.left_out == {"group": 1} and "hybrid" in out.caveat


def test_groups_in_lower_tiers_are_named_without_tokens() -> None:
    ingest = Ingest()
    ingest.hear(full(), window(6, 7))
    ingest.hear(stored([8], tier=Tier.CPU, group=1), removed(8, 7, group=1))
    assert ingest.blocks(Tier.CPU, 1) == blocks(7) and not ingest.blocks(group=1)
    assert ingest.copies(8) == (1, 0, 0, 0)  # the counted group's own
    assert ingest.table[group_key(1, b"u" + (8).to_bytes(8, "big"))].copies == (0, 1, 0, 0)  # type: ignore[union-attr]
    out = ingest.hear(stored([99], tier=Tier.CPU, group=1))
    assert out.left_out == {"placeholder": 1}


def test_a_lower_tier_that_knows_no_groups_speaks_of_the_counted_one() -> None:
    ingest = Ingest()
    ingest.hear(window(7, group=0, grouped=True), full(group=1, grouped=True))
    ingest.hear(stored([501], TOKENS[:16], size=16, tier=Tier.CPU))
    assert ingest.blocks(Tier.CPU) == set(BLOCKS[:4]) and not ingest.blocks(Tier.CPU, 0)
    ingest.hear(stored([8], tier=Tier.CPU, group=0, grouped=True))
    assert ingest.blocks(Tier.CPU, 0) == blocks(7)


def test_a_stream_without_groups_is_one_group() -> None:
    ingest = Ingest()
    out = ingest.hear(stored(NAMES, TOKENS), removed(8))
    assert ingest.depth(TOKENS) == 7 and not out.left_out and not out.caveat


# -- against a hybrid engine modelled plainly ------------------------------------------------

PROMPTS = [(1, 2), (1, 2, 3, 4), (1, 2, 3, 5), (7, 8, 9), (1, 2, 3, 4, 5, 6, 7), (1, 6)]
NEEDED = 2  # blocks of a window of 8 tokens


@dataclass
class Hybrid:
    """Copies of prefixes in a full group (1) and in a window group (0) that keeps few."""

    held: tuple[Counter[tuple[int, ...]], Counter[tuple[int, ...]]] = field(
        default_factory=lambda: (Counter(), Counter())
    )

    def usable(self, prompt: tuple[int, ...], most: int) -> int:
        window, whole = self.held
        for n in range(most, 0, -1):
            full_there = all(whole[prompt[: at + 1]] for at in range(n))
            if full_there and all(window[prompt[: at + 1]] for at in range(max(0, n - NEEDED), n)):
                return n
        return 0

    def serve(self, prompt: tuple[int, ...]) -> list[BlocksStored]:
        """What is not usable is computed; the window group keeps the last blocks of it."""
        hit, last = self.usable(prompt, len(prompt) - 1), len(prompt)
        kept = range(max(hit, last - NEEDED), last)
        for number, places in ((0, kept), (1, range(hit, last))):
            for at in places:
                self.held[number][prompt[: at + 1]] += 1
        tokens = [number for number in prompt[hit:] for _ in range(4)]
        parent = self.name(prompt[:hit]) if hit else None
        names = [[self.name(prompt[: at + 1]) for at in some] for some in (kept, range(hit, last))]
        sparse = stored(names[0], tokens, parent, group=0, kind="sliding_window", window=8)
        return [sparse, stored(names[1], tokens, parent, group=1, kind="full_attention")]

    def evict(self, group: int, number: int) -> list[BlocksRemoved]:
        held = sorted(+self.held[group])
        if not held:
            return []
        one = held[number % len(held)]
        self.held[group][one] -= 1
        return [removed(self.name(one), group=group)]

    @staticmethod
    def name(prefix: tuple[int, ...]) -> int:
        return hash(prefix) & (1 << 64) - 1


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000)), max_size=30),
    evicts=st.booleans(),
)
def test_no_more_is_usable_than_a_hybrid_engine_hits(
    steps: list[tuple[int, int]], evicts: bool
) -> None:
    engine, ingest = Hybrid(), Ingest(forgets=True)
    for kind, number in steps:
        if kind < 2 or not evicts:
            ingest.hear(*engine.serve(PROMPTS[number % len(PROMPTS)]))
        else:
            ingest.hear(*engine.evict(kind - 2, number))
        for prompt in PROMPTS:
            found = ingest.depth([number for number in prompt for _ in range(4)])
            usable = engine.usable(prompt, len(prompt))
            assert found <= usable if evicts else found == usable

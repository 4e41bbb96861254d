"""Ranking: unbroken from the first block, deepest first, each worker at its own block size."""

from __future__ import annotations

from kvplane.index import Held, View, chain, rank
from kvplane.vocabulary import Epoch, Namespace, Pod, PrefixChain, Removed, Stored, Tier, Worker

A, B, C = (Worker(Pod(name)) for name in "abc")
CHAIN = chain(range(7 * 16), Namespace("m", 16))


def view_of(held: dict[Worker, list[int]], asked: PrefixChain = CHAIN) -> View:
    view = View()
    size = asked.namespace.block_size
    for worker, numbers in held.items():
        for at in numbers:
            parent = asked.blocks[at - 1] if at else None
            blocks = (asked.blocks[at],)
            view.apply(Stored(worker, Epoch(1), Tier.GPU, parent, blocks, size))
    return view


def depths(found: list[Held]) -> list[tuple[Worker, int]]:
    return [(held.worker, held.depth_blocks) for held in found]


def test_scattered_blocks_are_no_prefix() -> None:
    view = view_of({A: [0, 1, 3, 4], B: [1, 2, 3], C: [0, 1, 2, 3, 4]})
    five = PrefixChain(CHAIN.namespace, CHAIN.blocks[:5])
    assert depths(rank(view, five)) == [(C, 5), (A, 2), (B, 0)]
    assert depths(rank(view, five, [B, A])) == [(A, 2), (B, 0)]


def test_the_longest_comes_first_and_a_whole_match_counts_every_block() -> None:
    view = view_of({A: [0], B: list(range(7)), C: list(range(7))})
    found = rank(view, CHAIN)
    assert depths(found) == [(B, 7), (C, 7), (A, 1)]
    assert found[0].depth_tokens == 112 and found[0].blocks == 7 and found[0].epoch == 1


def test_prompts_around_one_block() -> None:
    view = view_of({A: [0, 1]})
    for tokens, expected in ((0, 0), (1, 0), (15, 0), (16, 1), (17, 1)):
        asked = chain(range(tokens), Namespace("m", 16))
        assert rank(view, asked)[0].depth_blocks == expected


def test_each_worker_is_judged_on_the_chain_of_its_own_block_size() -> None:
    big = chain(range(7 * 16), Namespace("m", 32))
    view = view_of({A: [0, 1]})
    view.apply(Stored(B, Epoch(4), Tier.GPU, None, big.blocks, 32))
    found = rank(view, {16: CHAIN, 32: big})
    assert [(h.worker, h.depth_blocks, h.depth_tokens, h.blocks) for h in found] == [
        (B, 3, 96, 3),
        (A, 2, 32, 7),
    ]
    assert depths(rank(view, {16: CHAIN})) == [(A, 2), (B, 0)]


def test_a_worker_nobody_heard_of_holds_nothing() -> None:
    assert rank(View(), CHAIN, [A]) == [Held(A, None, 0, 0)]


def test_tiers_count_each_block_of_the_depth_once_where_it_lies_best() -> None:
    view = view_of({A: [0, 1, 2]})
    for at, tier in ((1, Tier.CPU), (3, Tier.CPU), (4, Tier.DISK), (6, Tier.CPU)):
        view.apply(Stored(A, Epoch(1), tier, CHAIN.blocks[at - 1], (CHAIN.blocks[at],), 16))
    held = rank(view, CHAIN)[0]
    assert held.depth_blocks == 5
    assert held.tiers == {Tier.GPU: 3, Tier.CPU: 1, Tier.DISK: 1}


def test_tiers_leave_out_what_lies_behind_a_hole() -> None:
    view = View()
    view.apply(Stored(A, Epoch(1), Tier.GPU, None, CHAIN.blocks, 16))
    view.apply(Stored(A, Epoch(1), Tier.CPU, None, CHAIN.blocks[:1], 16))
    view.apply(Removed(A, Epoch(1), Tier.GPU, CHAIN.blocks[3:4]))
    held = rank(view, CHAIN)[0]
    assert (held.depth_blocks, held.tiers) == (3, {Tier.GPU: 3})

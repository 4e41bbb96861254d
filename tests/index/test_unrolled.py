"""Unrolled: the same names as hashing gives, and no more of them than somebody looked at."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from kvplane.index import Chains, View, chain, rank
from kvplane.index.chains import PAGE_BLOCKS, STRIDE_BLOCKS
from kvplane.index.unrolled import Unrolled
from kvplane.vocabulary import BlockHash, Epoch, Namespace, Pod, Stored, Tier, Worker

SPACE = Namespace("m", 4)
TOKENS = list(range(1000, 1000 + 4 * 300 + 3))
WHOLE = chain(TOKENS, SPACE)


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
@pytest.mark.parametrize("tokens", [0, 3, 4, 5, 4 * STRIDE_BLOCKS, 4 * PAGE_BLOCKS, len(TOKENS)])
def test_however_it_is_looked_at_it_is_the_chain(most_bytes: int, tokens: int) -> None:
    chains, wanted = Chains(most_bytes), chain(TOKENS[:tokens], SPACE)
    dice = random.Random(tokens)
    for _ in range(3):  # what is remembered then is the same
        found = chains.unrolled(TOKENS[:tokens], SPACE)
        assert (found.namespace, found.tokens) == (SPACE, tokens)
        assert len(found.blocks) == len(wanted.blocks)
        for _ in range(20 if wanted.blocks else 0):
            at = dice.randrange(-len(wanted.blocks), len(wanted.blocks))
            assert found.blocks[at] == wanted.blocks[at]
        assert list(found.blocks) == list(wanted.blocks) == list(found.blocks[:])
        for beyond in (len(wanted.blocks), -len(wanted.blocks) - 1):
            with pytest.raises(IndexError):
                found.blocks[beyond]


def test_only_what_is_looked_at_is_hashed() -> None:
    chains = Chains()
    found = chains.unrolled(TOKENS, SPACE)
    assert len(found.blocks) == 300 and chains.blocks["hashed"] == 0
    assert found.blocks[0] == WHOLE.blocks[0] and chains.blocks["hashed"] == STRIDE_BLOCKS
    beyond = STRIDE_BLOCKS + 8
    assert found.blocks[beyond] == WHOLE.blocks[beyond]
    assert chains.blocks["hashed"] == 2 * STRIDE_BLOCKS
    assert found.blocks[3] and chains.blocks["hashed"] == 2 * STRIDE_BLOCKS


@pytest.mark.parametrize("held", [0, 1, 31, 32, 33, 128, 250, 300])
def test_a_prompt_is_hashed_as_far_as_it_is_held(held: int) -> None:
    view, worker, chains = View(), Worker(Pod("p")), Chains()
    if held:
        view.apply(Stored(worker, Epoch(1), Tier.GPU, None, WHOLE.blocks[:held], 4))
    (found,) = rank(view, chains.unrolled(TOKENS, SPACE), [worker])
    assert (found.depth_blocks, found.blocks) == (held, 300 if held else 0)
    assert chains.blocks["hashed"] <= held + STRIDE_BLOCKS


@pytest.mark.parametrize("parts", [0, 1, 2, 63, 64, 65, 128, 200, 299, 300])
def test_a_prompt_that_parts_from_a_longer_run_is_hashed_hardly_further(parts: int) -> None:
    view, one, two = View(), Worker(Pod("one")), Worker(Pod("two"))
    chains, other = Chains(), chain(TOKENS[: 4 * parts] + [7] * len(TOKENS), SPACE)
    for worker, blocks in ((one, other.blocks), (two, other.blocks[:40])):
        view.apply(Stored(worker, Epoch(1), Tier.GPU, None, blocks, 4))
    found = rank(view, chains.unrolled(TOKENS, SPACE), [one, two])
    assert {held.worker: held.depth_blocks for held in found} == {one: parts, two: min(parts, 40)}
    assert chains.blocks["hashed"] <= parts + STRIDE_BLOCKS


def test_pages_that_end_early_are_an_end() -> None:
    def pages() -> Iterator[list[BlockHash]]:
        yield [BlockHash(1)]

    row = Unrolled(1, pages())
    assert row[-1] == 1 and list(row) == [1]
    with pytest.raises(IndexError):
        row[1]

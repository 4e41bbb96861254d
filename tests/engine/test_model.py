"""Model: right KV gives the same answer bit by bit, wrong KV another one."""

from __future__ import annotations

import numpy as np
import pytest

from kvplane.engine.model import ANSWER_IDS, END, PAGE_TOKENS, Model, Pool, Size

MODEL = Model("tiny", positions=1024)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 256, tokens)]


def answer(pool: Pool, pages: list[int], tokens: list[int], held: int, steps: int) -> list[int]:
    """Tokens after `tokens`, of which `held` lie in the pages already."""
    context = MODEL.open(pool, pages, held)
    MODEL.feed(context, tokens[held:])
    found = []
    for _ in range(steps):
        found.append(MODEL.answer(context))
        MODEL.feed(context, found[-1:])
    return found


def copied(pool: Pool) -> Pool:
    return tuple(layer.copy() for layer in pool)


def test_a_reused_prefix_gives_the_same_bits_and_tokens_at_every_block_border() -> None:
    tokens = prompt(100)
    pages = list(range(9))
    pool = MODEL.pool(40)
    alone = answer(pool, pages, tokens, 0, 32)
    for border in range(16, 100, 16):
        other = [*range(border // 16), *range(20, 29 - border // 16)]
        assert answer(pool, other, tokens, border, 32) == alone, border
        for layer in pool:
            assert np.array_equal(layer[:, :, other], layer[:, :, pages]), border


def test_tokens_computed_one_by_one_leave_the_same_bits_as_a_whole_prompt() -> None:
    tokens = prompt(70, seed=1)
    pool = MODEL.pool(10)
    whole, single = MODEL.open(pool, range(5)), MODEL.open(pool, range(5, 10))
    MODEL.feed(whole, tokens)
    for token in tokens:
        MODEL.feed(single, [token])
    assert MODEL.answer(whole) == MODEL.answer(single)
    for layer in pool:
        assert np.array_equal(layer[:, :, :5], layer[:, :, 5:])


def test_pages_copied_to_other_numbers_and_taken_up_there_answer_alike() -> None:
    tokens = prompt(333, seed=2)
    here, there = MODEL.pool(24), MODEL.pool(64)
    for layer in there:
        layer.fill(np.float16(7.5))  # a fetched page must not depend on what lay there
    first = MODEL.open(here, range(24))
    MODEL.feed(first, tokens)
    token = MODEL.answer(first)
    pages = [int(i) for i in np.random.default_rng(3).permutation(64)[:24]]
    for source, target in zip(here, there, strict=True):
        target[:, :, pages[:21]] = source[:, :, :21]
    assert answer(there, pages, [*tokens, token], 333, 40) == answer(
        here, list(range(24)), [*tokens, token], 333, 40
    )


def test_a_partial_page_holds_nothing_of_its_earlier_owner() -> None:
    pool = MODEL.pool(1)
    pool[0].fill(1)
    MODEL.feed(MODEL.open(pool, [0]), prompt(5))
    assert not pool[0][:, :, 0, 5:].any()


def test_a_flipped_byte_a_flipped_bit_and_swapped_pages_are_all_noticed() -> None:
    rng = np.random.default_rng(5)
    unnoticed = dict.fromkeys(("byte", "lowest bit", "swap", "swap in one head"), 0)
    for number in range(12):
        length = int(rng.integers(40, 300))
        pages = list(range(-(-length // PAGE_TOKENS) + 3))
        pool, tokens = MODEL.pool(len(pages)), prompt(length, seed=100 + number)
        context = MODEL.open(pool, pages)
        MODEL.feed(context, tokens)
        tokens.append(MODEL.answer(context))
        right = answer(copied(pool), pages, tokens, length, 32)
        for kind in unnoticed:
            wrong = copied(pool)
            spoil(kind, wrong, length, rng)
            unnoticed[kind] += answer(wrong, pages, tokens, length, 32) == right
    assert unnoticed == {"byte": 0, "lowest bit": 0, "swap": 0, "swap in one head": 0}


def spoil(kind: str, pool: Pool, length: int, rng: np.random.Generator) -> None:
    layer, head = rng.integers(2), rng.integers(MODEL.size.kv_heads)
    if kind.startswith("swap"):
        first, second = rng.choice(length // PAGE_TOKENS, 2, replace=False)
        whole = [part for memory in pool for part in memory.reshape(-1, *memory.shape[2:])]
        for part in whole if kind == "swap" else [pool[layer][rng.integers(2), head]]:
            part[[first, second]] = part[[second, first]]
        return
    at = int(rng.integers(length))
    raw = pool[layer].view(np.uint8)[rng.integers(2), head, at // PAGE_TOKENS]
    low = 2 * int(rng.integers(MODEL.size.head_dim))
    if kind == "byte":
        raw[at % PAGE_TOKENS, low + rng.integers(2)] ^= np.uint8(rng.integers(1, 256))
    else:
        raw[at % PAGE_TOKENS, low] ^= 1


def test_an_answer_is_printable_and_ends_sometime() -> None:
    allowed = set(ANSWER_IDS.tolist())
    found = {token for seed in range(4) for token in
             answer(MODEL.pool(20), list(range(20)), prompt(20, seed), 0, 200)}  # fmt: skip
    assert found <= allowed
    assert END in found
    assert len(found) > 60  # it does not get stuck in a loop


def test_another_name_is_another_model() -> None:
    other = Model("other", positions=64)
    pools = MODEL.pool(2), other.pool(2)
    contexts = MODEL.open(pools[0], [0, 1]), other.open(pools[1], [0, 1])
    for model, context in zip((MODEL, other), contexts, strict=True):
        model.feed(context, prompt(20))
    assert not np.array_equal(pools[0][0], pools[1][0])


def test_a_page_of_one_layer_is_two_kilobytes_and_one_heads_pages_are_one_piece() -> None:
    memory = MODEL.pool(3)[0]
    assert Size().page_bytes == 2048 == memory[:, :, 0].nbytes
    assert all(memory[kv, head].flags.c_contiguous for kv in (0, 1) for head in range(4))


def test_more_tokens_than_pages_is_our_own_bug() -> None:
    with pytest.raises(AssertionError, match="no page"):
        MODEL.feed(MODEL.open(MODEL.pool(1), [0]), prompt(17))

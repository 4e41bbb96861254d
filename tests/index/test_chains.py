"""Chains: names that are remembered are the names that hashing gives."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from kvplane.index import BadValue, IndexMetrics, chain
from kvplane.index.chains import PAGE_BLOCKS, Chains
from kvplane.vocabulary import Namespace

MANY = 2**30
SPACE = Namespace("m", 16)
PAGE = PAGE_BLOCKS * 16  # tokens
LONG = array("I", (number * 2654435761 % 2**17 for number in range(5 * PAGE + 40)))


def test_a_next_turn_is_hashed_from_the_last_full_page_on() -> None:
    chains = Chains(MANY)
    for tokens in (LONG, LONG + LONG[:400]):
        assert chains.chain(tokens, SPACE) == chain(tokens, SPACE)
    assert chains.blocks == {"recalled": 5 * PAGE_BLOCKS, "hashed": 5 * PAGE_BLOCKS + 2 + 27}


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 3),
    st.sampled_from(["", "salt"]),
)
def test_whatever_was_asked_before_the_names_are_right(
    cuts: list[int], size: int, salt: str
) -> None:
    chains = Chains(40_000)
    for at, cut in enumerate(cuts):
        tokens = LONG[: 150 * size] + LONG[cut : cut + cut * 20]
        space = Namespace("m", size, "", salt if at % 2 else "")
        assert chains.chain(tokens, space) == chain(tokens, space)


def test_every_form_of_tokens_has_the_same_names() -> None:
    chains = Chains(MANY)
    for tokens in (LONG.tolist(), tuple(LONG), LONG.tobytes(), LONG):
        assert chains.chain(tokens, SPACE) == chain(LONG, SPACE)


def test_namespaces_and_block_sizes_do_not_mix() -> None:
    chains = Chains(MANY)
    for space in (SPACE, Namespace("n", 16), Namespace("m", 8), Namespace("m", 16, "a", "s")):
        assert chains.chain(LONG, space) == chain(LONG, space)
    assert chains.blocks["recalled"] == 0


def test_with_images_nothing_is_remembered() -> None:
    chains, extra = Chains(MANY), {3: ["image@0"]}
    chains.chain(LONG, SPACE)
    assert chains.chain(LONG, SPACE, extra) == chain(LONG, SPACE, extra)
    assert chains.chain(LONG, SPACE) == chain(LONG, SPACE)
    assert chains.blocks["recalled"] == 5 * PAGE_BLOCKS


def test_a_digest_alone_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplane.index.chains.xxh3_64_intdigest", lambda page: 7)
    chains = Chains(MANY)
    for at in (0, 1, 0):
        assert chains.chain(LONG[at:], SPACE) == chain(LONG[at:], SPACE)


def test_what_is_no_token_is_refused_as_ever() -> None:
    with pytest.raises(BadValue, match="tokens\\[1\\]"):
        Chains(MANY).chain([1, -1], SPACE)
    with pytest.raises(BadValue, match="block_size"):
        Chains(MANY).chain([1], Namespace("m", 0))


def test_bytes_are_bounded_and_none_are_none() -> None:
    few, none = Chains(30_000), Chains()
    for at in range(50):
        few.chain(LONG[at:], SPACE)
        none.chain(LONG[at:], SPACE)
    assert 0 < few.held_bytes <= 30_000
    assert (none.held_bytes, none.blocks["recalled"]) == (0, 0)


def test_a_scrape_shows_where_names_came_from() -> None:
    registry, chains = CollectorRegistry(), Chains(MANY)
    IndexMetrics(registry).watch_chains(chains)
    for _ in range(2):
        chains.chain(LONG, SPACE)
    name = "kvplane_index_chain_blocks_total"
    assert registry.get_sample_value(name, {"source": "recalled"}) == 5 * PAGE_BLOCKS
    assert registry.get_sample_value(name, {"source": "hashed"}) == 5 * PAGE_BLOCKS + 4
    assert registry.get_sample_value("kvplane_index_chain_bytes") == chains.held_bytes > 0


def test_several_threads_use_it_at_once() -> None:
    chains, gate = Chains(40_000), threading.Barrier(4)
    right = [chain(LONG[at:], SPACE) for at in range(20)]

    def work(number: int) -> bool:
        gate.wait(10)
        return all(chains.chain(LONG[at:], SPACE) == right[at] for at in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert sum(chains.blocks.values()) == 4 * sum(len(one.blocks) for one in right)

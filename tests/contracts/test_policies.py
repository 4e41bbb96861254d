"""Policies: what every policy keeps, and what each one is for. A newcomer is run unasked."""

from __future__ import annotations

import random as chance
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.policies import POLICIES, Candidate, Need, Policy
from kvplane.router.target import Pulse, Target
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def candidate(name: str, depth: int = 0, tokens: int = 0, requests: int = 0) -> Candidate:
    worker = WorkerUp(Pod(name), f"http://{name}:1", Role.PREFILL)
    target = Target(Worker(Pod(name)), worker, Pulse())
    target.inflight_tokens, target.inflight_requests = tokens, requests
    return Candidate(target, depth // 16, depth)


def names(ordered: list[Candidate]) -> list[str]:
    return [str(one.target.worker) for one in ordered]


def rolls(seed: int) -> Any:
    return chance.Random(seed).random


sizes = st.integers(0, 20_000)
candidates = st.lists(
    st.builds(candidate, st.sampled_from("abcdefgh"), sizes, sizes, st.integers(0, 50)),
    unique_by=lambda one: one.target.worker,
    max_size=8,
)
keys = st.text(max_size=8)


@every_policy
@given(given=candidates, tokens=sizes, key=keys, turn=st.integers(0, 10**9), seed=st.integers())
def test_the_order_is_a_permutation_and_the_same_each_time(
    policy: Policy, given: list[Candidate], tokens: int, key: str, turn: int, seed: int
) -> None:
    before = list(given)
    first = policy(given, Need(tokens, key, turn, rolls(seed)))
    again = policy(given, Need(tokens, key, turn, rolls(seed)))
    assert first == again
    assert Counter(names(first)) == Counter(names(given))
    assert given == before, "the caller's list is not touched"


@every_policy
@given(given=candidates, seed=st.integers(0, 999), key=keys)
def test_the_order_does_not_depend_on_the_order_given(
    policy: Policy, given: list[Candidate], seed: int, key: str
) -> None:
    shuffled = list(given)
    chance.Random(seed).shuffle(shuffled)
    one = policy(given, Need(100, key, 3, rolls(seed)))
    other = policy(shuffled, Need(100, key, 3, rolls(seed)))
    assert names(one) == names(other)


@every_policy
def test_nobody_in_is_nobody_out(policy: Policy) -> None:
    assert policy([], Need()) == []


@every_policy
@pytest.mark.parametrize("roll", [0.0, 0.5, 0.9999999999999999])
def test_extreme_chance_is_no_trouble(policy: Policy, roll: float) -> None:
    assert len(policy([candidate("a"), candidate("b")], Need(chance=lambda: roll))) == 2


@every_policy
def test_equal_workers_share_the_load(policy: Policy) -> None:
    """400 requests over 4 idle workers, load booked as the gateway does."""
    workers = [candidate(name) for name in "abcd"]
    roll = rolls(7)
    counts: Counter[str] = Counter()
    for turn in range(400):
        chosen = policy(workers, Need(100, f"user{turn}", turn, roll))[0]
        chosen.target.inflight_tokens += 100
        counts[str(chosen.target.worker)] += 1
    assert min(counts.values()) > 60, counts


# Each policy's own word -------------------------------------------------------------------------


def ask(name: str, given: list[Candidate], **need: Any) -> list[str]:
    return names(POLICIES[name](given, Need(**need)))


def test_prefix_takes_the_deepest_of_idle_workers() -> None:
    given = [candidate("a"), candidate("b", depth=64), candidate("c", depth=32)]
    assert ask("prefix", given, prompt_tokens=100) == ["b", "c", "a"]


@pytest.mark.parametrize(("waiting", "first"), [(999, "deep"), (1000, "deep"), (1001, "idle")])
def test_a_deep_prefix_loses_when_more_waits_there_than_it_saves(waiting: int, first: str) -> None:
    given = [candidate("deep", depth=1000, tokens=waiting), candidate("idle")]
    assert ask("prefix", given, prompt_tokens=1200)[0] == first


def test_prefix_sends_a_cold_prompt_to_the_idle_worker() -> None:
    given = [candidate("a", tokens=5000, requests=50), candidate("b")]
    assert ask("prefix", given, prompt_tokens=100) == ["b", "a"]


def test_prefix_does_not_herd_where_nobody_holds_anything() -> None:
    given = [candidate("a"), candidate("b"), candidate("c")]
    assert [ask("prefix", given, turn=turn)[0] for turn in range(4)] == ["a", "b", "c", "a"]


def test_a_hot_prefix_spreads_while_it_queues() -> None:
    """A shared start of 1000 tokens, own tails of 200; every worker that served one holds it."""
    workers = {name: candidate(name) for name in "abcdefgh"}
    counts: Counter[str] = Counter()
    for turn in range(400):
        one = POLICIES["prefix"](list(workers.values()), Need(1200, "", turn))[0]
        name = str(one.target.worker)
        one.target.inflight_tokens += 1200 - one.depth_tokens
        workers[name] = Candidate(one.target, 62, 1000)
        counts[name] += 1
    assert max(counts.values()) / (400 / 8) < 1.5, counts


def test_turns_of_one_chat_stay_together() -> None:
    workers = {name: candidate(name) for name in "abcd"}
    held: dict[tuple[str, int], int] = {}
    stayed = moved = 0
    for turn in range(10):
        for chat in range(20):
            given = [
                Candidate(one.target, 0, held.get((name, chat), 0)) for name, one in workers.items()
            ]
            best = max((held.get((name, chat), 0), name) for name in workers)[1]
            chosen = str(
                POLICIES["prefix"](given, Need(500 * (turn + 1), "", chat))[0].target.worker
            )
            held[chosen, chat] = 500 * (turn + 1)
            stayed, moved = (
                stayed + (turn > 0 and chosen == best),
                moved + (turn > 0 and chosen != best),
            )
    assert stayed / (stayed + moved) > 0.9


def test_cache_aware_and_prefix_hash_are_names_of_prefix() -> None:
    assert POLICIES["cache_aware"] is POLICIES["prefix_hash"] is POLICIES["prefix"]


def test_least_loaded_counts_tokens_before_requests() -> None:
    given = [candidate("a", tokens=9, requests=1), candidate("b", tokens=8, requests=5)]
    assert ask("least_loaded", given) == ["b", "a"]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    given = [candidate("b", tokens=999), candidate("a", depth=999), candidate("c")]
    assert [ask("round_robin", given, turn=turn)[0] for turn in range(3)] == ["a", "b", "c"]


def test_power_of_two_never_takes_the_busier_of_its_two() -> None:
    given = [candidate(name, tokens=10 * at) for at, name in enumerate("abcd")]
    firsts = {ask("power_of_two", given, chance=rolls(seed))[0] for seed in range(200)}
    assert firsts == {"a", "b", "c"}


def test_consistent_hash_keeps_a_key_and_moves_only_keys_of_the_one_that_left() -> None:
    given = [candidate(name) for name in "abcde"]
    for number in range(300):
        key = f"user{number}"
        first, second, *_ = ask("consistent_hash", given, key=key)
        left = [one for one in given if str(one.target.worker) != "c"]
        assert ask("consistent_hash", left, key=key)[0] == (second if first == "c" else first)


def test_consistent_hash_without_a_key_takes_the_least_loaded() -> None:
    assert ask("consistent_hash", [candidate("a", tokens=1), candidate("b")]) == ["b", "a"]

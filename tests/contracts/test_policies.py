"""Policies: what every policy keeps, and what each one is for. A newcomer is run unasked."""

from __future__ import annotations

import random as chance
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplane.router.policies import POLICIES, Candidate, Need, Policy
from kvplane.router.target import Pulse, Target
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def candidate(
    name: str,
    depth: int = 0,
    tokens: int = 0,
    requests: int = 0,
    turn: int = 0,
    share: float = 1.0,
) -> Candidate:
    worker = WorkerUp(Pod(name), f"http://{name}:1", Role.PREFILL)
    target = Target(Worker(Pod(name)), worker, Pulse())
    target.inflight_tokens, target.inflight_requests, target.turn = tokens, requests, turn
    return Candidate(target, depth // 16, depth, share)


class Fleet:
    """Books as the gateway's fleet does: load, and whose turn it was."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.turn = 0

    def take(self, policy: Policy, given: list[Candidate], need: Need, tokens: int = 100) -> str:
        chosen = policy(given, need)[0].target
        self.turn += 1
        chosen.turn = self.turn
        chosen.inflight_tokens += tokens
        chosen.inflight_requests += 1
        self.taken[chosen.name] += 1
        return chosen.name


def names(ordered: list[Candidate]) -> list[str]:
    return [str(one.target.worker) for one in ordered]


def rolls(seed: int) -> Any:
    return chance.Random(seed).random


sizes = st.integers(0, 20_000)
candidates = st.lists(
    st.builds(
        candidate,
        st.sampled_from("abcdefgh"),
        sizes,
        sizes,
        st.integers(0, 50),
        st.integers(0, 5),
        st.sampled_from([0.1, 0.5, 1.0, 1.0]),
    ),
    unique_by=lambda one: one.target.worker,
    max_size=8,
)
keys = st.text(max_size=8)


@every_policy
@settings(max_examples=40)
@given(given=candidates, tokens=sizes, key=keys, seed=st.integers())
def test_the_order_is_a_permutation_and_the_same_each_time(
    policy: Policy, given: list[Candidate], tokens: int, key: str, seed: int
) -> None:
    before = list(given)
    first = policy(given, Need(tokens, key, rolls(seed)))
    again = policy(given, Need(tokens, key, rolls(seed)))
    assert first == again
    assert Counter(names(first)) == Counter(names(given))
    assert given == before, "the caller's list is not touched"


@every_policy
@settings(max_examples=40)
@given(given=candidates, seed=st.integers(0, 999), key=keys)
def test_the_order_does_not_depend_on_the_order_given(
    policy: Policy, given: list[Candidate], seed: int, key: str
) -> None:
    shuffled = list(given)
    chance.Random(seed).shuffle(shuffled)
    one = policy(given, Need(100, key, rolls(seed)))
    other = policy(shuffled, Need(100, key, rolls(seed)))
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
    fleet, roll = Fleet(), rolls(7)
    for number in range(400):
        fleet.take(policy, workers, Need(100, f"user{number}", roll))
    assert min(fleet.taken.values()) > 60, fleet.taken


@every_policy
@pytest.mark.parametrize("between", [1, 2, 3, 5])
def test_what_others_ask_in_between_does_not_fall_into_step_with_the_turns(
    policy: Policy, between: int
) -> None:
    """Another model's requests, or attempts that are repeated elsewhere: idle equals still share
    alike. A count of requests modulo workers would give all of ours to one of them."""
    ours, others = [candidate("a"), candidate("b")], [candidate("c"), candidate("d")]
    fleet, roll = Fleet(), rolls(11)
    for number in range(100):
        fleet.take(policy, ours, Need(10, f"user{number}", roll), tokens=0)
        for _ in range(between):
            fleet.take(policy, others, Need(10, f"user{number}", roll), tokens=0)
        for one in (*ours, *others):
            one.target.inflight_tokens = one.target.inflight_requests = 0
    assert min(fleet.taken["a"], fleet.taken["b"]) > 30, fleet.taken


@every_policy
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_one_that_is_new_takes_only_its_share(policy: Policy, share: float) -> None:
    """Under load that goes on: what began is done 40 requests later."""
    workers = [candidate(name) for name in "abc"] + [candidate("new", share=share)]
    by_name, fleet, roll = {one.target.name: one.target for one in workers}, Fleet(), rolls(5)
    running: list[str] = []
    for number in range(2000):
        running.append(fleet.take(policy, workers, Need(100, f"user{number}", roll)))
        if len(running) > 40:
            done = by_name[running.pop(0)]
            done.inflight_tokens -= 100
            done.inflight_requests -= 1
    fair = 2000 / (3 + share) * share
    assert 0.4 * fair <= fleet.taken["new"] <= 1.6 * fair, (fair, fleet.taken)


@every_policy
def test_one_that_is_new_still_serves_where_it_is_alone(policy: Policy) -> None:
    assert len(policy([candidate("new", share=0.1)], Need(100, "user"))) == 1


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


@pytest.mark.parametrize("name", ["prefix", "least_loaded", "round_robin"])
def test_idle_workers_that_hold_nothing_take_turns(name: str) -> None:
    given, fleet = [candidate("a"), candidate("b"), candidate("c")], Fleet()
    taken = [fleet.take(POLICIES[name], given, Need(), tokens=0) for _ in range(1)]
    for _ in range(4):
        for one in given:
            one.target.inflight_requests = 0
        taken.append(fleet.take(POLICIES[name], given, Need(), tokens=0))
    assert taken == ["a", "b", "c", "a", "b"]


def test_a_hot_prefix_spreads_while_it_queues() -> None:
    """A shared start of 1000 tokens, own tails of 200; every worker that served one holds it."""
    workers = {name: candidate(name) for name in "abcdefgh"}
    fleet = Fleet()
    for _ in range(400):
        depths = {name: one.depth_tokens for name, one in workers.items()}
        name = fleet.take(POLICIES["prefix"], list(workers.values()), Need(1200), tokens=0)
        target = workers[name].target
        target.inflight_tokens += 1200 - depths[name]
        workers[name] = Candidate(target, 62, 1000)
    assert max(fleet.taken.values()) / (400 / 8) < 1.5, fleet.taken
    assert len(fleet.taken) == 8, "every one is warm now"


def test_turns_of_one_chat_stay_together_and_the_load_is_even() -> None:
    """40 chats over 8 workers, long from the start, ten turns; 20 requests run at once."""
    targets = {name: candidate(name).target for name in "abcdefgh"}
    held: dict[tuple[str, int], int] = {}
    work, fleet, stayed, turns = Counter[str](), Fleet(), 0, 0
    running: list[tuple[str, int]] = []
    for turn in range(10):
        for chat in chance.Random(turn).sample(range(40), 40):
            given = [Candidate(t, 0, held.get((name, chat), 0)) for name, t in targets.items()]
            best = max((held.get((name, chat), 0), name) for name in targets)
            total = 2000 + 300 * turn
            name = fleet.take(POLICIES["prefix"], given, Need(total), tokens=0)
            cost = total - held.get((name, chat), 0)
            targets[name].inflight_tokens += cost
            work[name] += cost
            running.append((name, cost))
            if len(running) > 20:
                done, cost = running.pop(0)
                targets[done].inflight_tokens -= cost
            if turn:
                turns += 1
                stayed += held.get((name, chat), 0) == best[0]
            held[name, chat] = total
    assert stayed / turns > 0.9, (stayed, turns)
    assert max(work.values()) / (sum(work.values()) / 8) < 2, work


def test_cache_aware_and_prefix_hash_are_names_of_prefix() -> None:
    assert POLICIES["cache_aware"] is POLICIES["prefix_hash"] is POLICIES["prefix"]


def test_least_loaded_counts_tokens_before_requests() -> None:
    given = [candidate("a", tokens=9, requests=1), candidate("b", tokens=8, requests=5)]
    assert ask("least_loaded", given) == ["b", "a"]


def test_round_robin_takes_turns_whatever_the_load() -> None:
    given, fleet = [candidate("b", tokens=999), candidate("a", depth=999), candidate("c")], Fleet()
    taken = [fleet.take(POLICIES["round_robin"], given, Need()) for _ in range(6)]
    assert taken == ["a", "b", "c", "a", "b", "c"]


def test_whoever_comes_back_to_the_round_does_not_get_what_it_missed() -> None:
    given, fleet = [candidate("a"), candidate("b"), candidate("c")], Fleet()
    for _ in range(10):
        fleet.take(POLICIES["round_robin"], given[:2], Need())
    taken = [fleet.take(POLICIES["round_robin"], given, Need()) for _ in range(6)]
    assert Counter(taken) == {"a": 2, "b": 2, "c": 2}


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


def test_consistent_hash_moves_a_key_to_a_new_worker_once() -> None:
    old = [candidate(name) for name in "abc"]
    moved: Counter[str] = Counter()
    for number in range(200):
        key, before = f"user{number}", ""
        for share in (0.0, 0.1, 0.4, 0.7, 1.0):
            now = ask("consistent_hash", [*old, candidate("d", share=share)], key=key)[0]
            moved[key] += now != before
            before = now
    assert set(moved.values()) == {1, 2}
    assert 20 < sum(count == 2 for count in moved.values()) < 90, "its part of the keys, in the end"


def test_consistent_hash_without_a_key_takes_the_least_loaded() -> None:
    assert ask("consistent_hash", [candidate("a", tokens=1), candidate("b")]) == ["b", "a"]

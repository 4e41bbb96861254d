"""Roster: who may join, and the sentence that names who has not."""

from __future__ import annotations

import msgspec
import pytest

from kvplane.bootstrap.joining import PROTOCOL, Hello
from kvplane.bootstrap.roster import KEPT_LIVES, Roster

FACTS = {"tp": "4", "pp": "2"}


def hello(rank: int = 1, life: str = "a", **changes: object) -> Hello:
    members = {
        "protocol": PROTOCOL, "node_rank": rank, "nnodes": 4, "generation": life,
        "nonce": b"n" * 32, "facts": dict(FACTS),
    }  # fmt: skip
    return Hello(**members | changes)  # type: ignore[arg-type]


@pytest.fixture
def roster() -> Roster:
    return Roster(4, FACTS, 100.0)


def enter(roster: Roster, rank: int, life: str, now: float) -> None:
    assert roster.refusal(hello(rank, life)) is None
    roster.joined(hello(rank, life), f"10.0.0.{rank}:5", now)


def test_a_late_node_is_named_with_the_time_it_did_not_come() -> None:
    """A late node is named."""
    roster = Roster(2, {}, 100.0)
    assert roster.missing(130.4) == "node 1 of 2 has not joined within 30 s"
    assert not roster.complete()


def test_all_who_are_missing_are_named_in_one_sentence(roster: Roster) -> None:
    assert roster.missing(105.0) == "nodes 1, 2, 3 of 4 have not joined within 5 s"
    enter(roster, 2, "a", 106.0)
    enter(roster, 1, "a", 107.0)
    roster.lost(2, "closed", 110.0)
    want = "node 3 of 4 has not joined within 22 s; node 2 of 4 was lost 12 s ago: closed"
    assert roster.missing(122.0) == want
    enter(roster, 2, "b", 123.0)
    enter(roster, 3, "a", 123.0)
    assert (roster.missing(124.0), roster.complete()) == ("", True)


def test_an_instance_of_one_node_misses_nobody() -> None:
    roster = Roster(1, {}, 0.0)
    assert (roster.complete(), roster.missing(9.0)) == (True, "")
    no = roster.refusal(hello(1, nnodes=1))
    assert no is not None and no.reason == "node_rank 1: there is one node"
    with pytest.raises(ValueError, match="nnodes 0: must be 1 or more"):
        Roster(0, {}, 0.0)


def test_a_node_goes_through_its_states(roster: Roster) -> None:
    assert (roster.states()[1].state, roster.states()[1].lives) == ("absent", 0)
    enter(roster, 1, "a", 101.0)
    state = roster.states()[1]
    assert (state.state, state.since, state.generation, state.address, state.lives) == (
        "joined", 101.0, "a", "10.0.0.1:5", 1,
    )  # fmt: skip
    roster.lost(1, "silent for 5.0 s", 105.0)
    state = roster.states()[1]
    assert (state.state, state.since, state.why) == ("lost", 105.0, "silent for 5.0 s")
    enter(roster, 1, "a", 106.0)
    assert (roster.states()[1].lives, roster.states()[1].why) == (1, "")


def test_a_restarted_node_is_let_in_and_its_old_life_never_again(roster: Roster) -> None:
    """FR-TR-11: new accepted, old fenced."""
    enter(roster, 1, "a", 101.0)
    before = roster.joined(hello(1, "b"), "10.0.0.1:6", 102.0)
    assert (before.generation, before.state) == ("a", "joined")
    assert roster.states()[1].lives == 2
    no = roster.refusal(hello(1, "a"))
    assert no is not None
    assert (no.kind, no.final) == ("replaced", True)
    assert no.reason == "node 1 of 4: generation a was replaced by b"
    assert roster.refusal(hello(2, "a")) is None  # a life is one node's


def test_the_memory_of_old_lives_is_bounded(roster: Roster) -> None:
    for i in range(KEPT_LIVES + 10):
        enter(roster, 1, f"life {i}", 101.0 + i)
    assert roster.refusal(hello(1, "life 0")) is None
    assert roster.refusal(hello(1, f"life {KEPT_LIVES}")) is not None


@pytest.mark.parametrize(("changes", "kind", "reason"), [
    ({"protocol": "kvplane-rendezvous-9"}, "protocol",
     f"protocol 'kvplane-rendezvous-9': must be {PROTOCOL}"),
    ({"nnodes": 2}, "nnodes", "nnodes: 2 there, 4 at node 0"),
    ({"node_rank": 4}, "rank", "node_rank 4: must be 1 to 3"),
    ({"node_rank": 0}, "rank", "node_rank 0: must be 1 to 3"),
    ({"node_rank": -1}, "rank", "node_rank -1: must be 1 to 3"),
    ({"generation": ""}, "garbage", "generation: must be 1 to 256 characters"),
    ({"generation": "x" * 257}, "garbage", "generation: must be 1 to 256 characters"),
    ({"facts": {"tp": "2", "dtype": "f16"}}, "facts",
     "dtype: f16 there, (absent) at node 0; pp: (absent) there, 2 at node 0; "
     "tp: 2 there, 4 at node 0"),
    ({"facts": {str(i): "" for i in range(65)}}, "facts", "facts: 65, must be at most 64"),
    ({"facts": {"tp": "x" * 257}}, "facts", "fact tp: must be at most 256 characters"),
])  # fmt: skip
def test_who_does_not_belong_is_told_why(
    roster: Roster, changes: dict[str, object], kind: str, reason: str
) -> None:
    no = roster.refusal(msgspec.structs.replace(hello(), **changes))
    assert no is not None
    assert (no.kind, no.reason) == (kind, reason)

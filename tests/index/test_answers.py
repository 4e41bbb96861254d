"""What people and programs are told: how far to believe it, and why not further."""

from __future__ import annotations

import json

from kvplane.index import View, answers, chain
from kvplane.index.lines import Lines
from kvplane.index.roster import Roster
from kvplane.vocabulary import (
    Cleared,
    ClearReason,
    Epoch,
    Group,
    GroupKind,
    Knowledge,
    Known,
    Namespace,
    Pod,
    Role,
    Stored,
    Tier,
    Worker,
    WorkerUp,
)

A, B, ONE = Worker(Pod("a")), Worker(Pod("b")), Epoch(1)
SMALL, BIG = (chain(range(256), Namespace("m", size)) for size in (16, 64))


def ups(**sizes: int | None) -> list[WorkerUp]:
    return [
        WorkerUp(Pod(pod), f"http://{pod}", Role.BOTH, events=("tcp://x:1",), block_size=size)
        for pod, size in sizes.items()
    ]


def fleet(**sizes: int | None) -> answers.Fleet:
    return answers.fleet_of(ups(**sizes))


def view_of(state: Knowledge = Knowledge.EXACT, reason: str = "live") -> View:
    view = View()
    view.apply(Stored(A, ONE, Tier.GPU, None, SMALL.blocks, 16))
    view.apply(Known(A, ONE, state, reason, 1.0, "i"))
    return view


def test_a_store_that_is_away_makes_exact_partial_and_tells_its_age() -> None:
    view = view_of()
    assert answers.trust(view, {}, A, 0.9) == (Knowledge.EXACT, "live")
    told = answers.trust(view, {}, A, 7.4)
    assert told == (Knowledge.PARTIAL, "the index store does not answer since 7 s")
    dark = answers.trust(view_of(Knowledge.DARK, "silent"), {}, A, 7.4)
    assert dark == (Knowledge.DARK, "silent"), "what is worse stays"


def test_dead_ingests_make_a_worker_dark() -> None:
    view = view_of()
    view.living = frozenset()
    state, reason = answers.trust(view, fleet(a=16), A, 0)
    assert state is Knowledge.DARK and "no living ingest" in reason
    shown = answers.worker(view, fleet(a=16), A, 9.0, 0)
    assert (shown["knowledge"], shown["reason"]) == (state, reason)


def test_a_block_size_that_is_not_the_configured_one_is_said_and_ranked_as_it_is() -> None:
    """FR-IX-07: a fleet of mixed sizes, one of them configured wrongly; never a silent zero."""
    view, seen = view_of(), fleet(a=64, b=64)
    view.apply(Stored(B, ONE, Tier.GPU, None, BIG.blocks, 64))
    view.apply(Known(B, ONE, Knowledge.EXACT, "live", 1.0, "i"))
    said = Lines(view).ranking(Roster(ups(a=64, b=64)), {16: SMALL, 64: BIG}, None, 0)
    found = json.loads(said)["workers"]
    assert [(one["worker"], one["depth_blocks"], one["depth_tokens"]) for one in found] == [
        ("a", 16, 256),
        ("b", 4, 256),
    ]
    for told in (found[0], answers.worker(view, seen, A, 1.0, 0)):
        assert told["knowledge"] == "exact"
        assert told["reason"] == "live; block size 16 by its events, 64 by configuration"
        assert (told["block_size"], told["configured_block_size"]) == (16, 64)
    for told in (found[1], answers.worker(view, fleet(a=16), A, 1.0, 0)):
        assert told["reason"] == "live" and "configured_block_size" not in told


def test_sizes_are_said_also_where_nothing_else_is() -> None:
    state, reason = answers.trust(view_of(reason=""), fleet(a=64), A, 0)
    assert (state, reason) == (
        Knowledge.EXACT,
        "block size 16 by its events, 64 by configuration",
    )


def test_a_worker_shows_its_groups_its_gaps_and_when_it_was_heard() -> None:
    view = view_of()
    assert "groups" not in answers.worker(view, {}, A, 1.0, 0)
    for group in (Group(3, GroupKind.STATE), Group(1, GroupKind.WINDOW, 128)):
        view.apply(Stored(A, ONE, Tier.GPU, None, (), 16, group))
    view.apply(Cleared(A, ONE, ClearReason.GAP))
    view.note(A, ONE, 5, 100.0)
    shown = answers.worker(view, {}, A, 101.5, 0)
    assert shown["groups"] == [
        {"group": 1, "kind": "window", "tokens": 128},
        {"group": 3, "kind": "state", "tokens": 0},
    ]
    assert (shown["gaps"], shown["last_event_age_s"], shown["sequence"]) == (1, 1.5, 5)

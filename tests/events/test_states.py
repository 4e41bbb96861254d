"""The states of a stream: the table, and what is said in each."""

from __future__ import annotations

import itertools

import pytest

from kvplane.events.states import DARKENS, KNOWLEDGE, NEXT, SAYS, Signal, State, Stream
from kvplane.vocabulary import Knowledge


def stream(state: State, replay: str | None = "tcp://h:2", rank: int | None = None) -> Stream:
    found = Stream("tcp://h:1", replay, rank)
    found.state = state
    return found


@pytest.mark.parametrize(
    ("before", "signal", "after"),
    [
        (State.DARK, Signal.CONNECTED, State.REPLAYING),
        (State.DARK, Signal.LOST, State.DARK),  # it was never believed
        (State.DARK, Signal.HOLE, State.DARK),
        (State.DARK, Signal.ASKED, State.DARK),  # a silent replay that is asked again
        (State.REPLAYING, Signal.WHOLE, State.LIVE),
        (State.REPLAYING, Signal.SHORT, State.PARTIAL),
        (State.REPLAYING, Signal.SILENT, State.DARK),
        (State.LIVE, Signal.ASKED, State.LIVE),  # all is well, as far as we know
        (State.LIVE, Signal.HOLE, State.GAP),
        (State.GAP, Signal.ASKED, State.REPLAYING),
        (State.GAP, Signal.SHORT, State.PARTIAL),  # no replay to ask
        (State.LIVE, Signal.LOST, State.PARTIAL),
        (State.LIVE, Signal.CONNECTED, State.REPLAYING),  # perhaps a new life
        (State.PARTIAL, Signal.HOLE, State.GAP),
        (State.PARTIAL, Signal.WHOLE, State.LIVE),  # the engine dropped its cache
        (State.PARTIAL, Signal.NO_STREAM, State.DARK),
    ],
)
def test_what_a_signal_leads_to(before: State, signal: Signal, after: State) -> None:
    found = stream(before)
    found.hear(signal, "batches 1 to 2")
    assert found.state is after


@pytest.mark.parametrize(("state", "signal"), list(itertools.product(State, DARKENS)), ids=str)
def test_what_darkens_darkens_every_state(state: State, signal: Signal) -> None:
    found = stream(state)
    assert found.hear(signal, "why") and found.state is State.DARK
    assert found.knowledge is Knowledge.DARK


@pytest.mark.parametrize(("state", "signal"), list(itertools.product(State, Signal)), ids=str)
def test_every_state_and_signal_has_a_sentence(state: State, signal: Signal) -> None:
    found = stream(state)
    before = found.reason
    moved = found.hear(signal, "batches 1 to 2")
    assert moved == (signal in NEXT[state])
    assert found.reason and "{" not in found.reason
    assert moved or (found.state, found.reason) == (state, before)


def test_the_tables_are_complete() -> None:
    assert set(NEXT) == set(KNOWLEDGE) == set(State) and set(SAYS) == set(Signal)
    assert [state for state in State if KNOWLEDGE[state] is Knowledge.EXACT] == [State.LIVE]


def test_the_worst_of_what_is_known_is_said() -> None:
    found = stream(State.REPLAYING)
    found.mistaken, found.asleep = "topic of another", True
    facts = {"heard": True, "silent": True, "doubt": "lost", "caveat": "hybrid"}
    said = []
    for undo in ("mistaken", "asleep", "silent", "doubt", "caveat"):
        found.settle(**facts)
        said.append((found.state, found.reason))
        if undo in facts:
            facts[undo] = False if undo == "silent" else ""
        else:
            setattr(found, undo, "")
    found.settle(**facts)
    assert [state for state, _ in said] == [State.DARK] * 3 + [State.PARTIAL] * 2
    assert [reason for _, reason in said[3:]] == ["lost", "hybrid"]
    assert found.state is State.LIVE and found.reason == "stream live, no open gap"


def test_a_stream_without_replay_is_dark_until_something_is_heard() -> None:
    found = stream(State.DARK, replay=None)
    found.settle(heard=False, silent=False, doubt="", caveat="")
    assert (found.state, found.reason[:24]) == (State.DARK, "connected, nothing heard")
    found.settle(heard=True, silent=False, doubt="", caveat="")
    assert found.state is State.LIVE


def test_a_rank_among_several_is_named_where_it_is_dark() -> None:
    found = stream(State.DARK, rank=2)
    found.hear(Signal.NO_STREAM)
    assert found.reason == "rank 2: no stream, not connected to tcp://h:1"
    found.settle(heard=True, silent=False, doubt="", caveat="")
    assert found.reason == "stream live, no open gap"

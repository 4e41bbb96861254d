"""Breaker: when a circuit opens, who may probe it, what closes it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplane.router.breaker import NEXT, Breaker, Breakers, Cause, Outcome, State, Ticket, outcome
from kvplane.router.settings import BreakerSettings
from kvplane.vocabulary import Pod, Worker

SETTINGS = BreakerSettings(faults=3, successes=2, pause_s=10, most_pause_s=30, window_s=60)
OK, NEUTRAL, FAULT = Outcome.SUCCESS, Outcome.NEUTRAL, Outcome.FAULT


def ticket(breaker: Breaker, now: float) -> Ticket:
    found = breaker.admit(now)
    assert found is not None
    return found


def send(breaker: Breaker, what: Outcome, now: float = 0.0, times: int = 1) -> None:
    for _ in range(times):
        breaker.book(ticket(breaker, now), what, now)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker(SETTINGS)
    send(breaker, FAULT, now, 3)
    return breaker


def test_the_table_leads_out_of_every_state_and_knows_every_cause() -> None:
    assert {state for state, _ in NEXT} == set(State)
    assert {cause for _, cause in NEXT} == set(Cause)


@pytest.mark.parametrize(
    ("status", "later", "what"),
    [
        (200, False, OK), (204, False, OK), (400, False, NEUTRAL), (401, False, NEUTRAL),
        (404, False, NEUTRAL), (413, False, NEUTRAL), (422, False, NEUTRAL),
        (429, False, NEUTRAL), (503, True, NEUTRAL), (503, False, FAULT), (500, False, FAULT),
        (502, True, FAULT), (None, False, FAULT),
    ],
)  # fmt: skip
def test_an_answer_is_judged(status: int | None, later: bool, what: Outcome) -> None:
    assert outcome(status, later) is what


def test_faults_in_a_row_open_it() -> None:
    breaker = Breaker(SETTINGS)
    send(breaker, FAULT, times=2)
    assert breaker.state(0) is State.CLOSED
    send(breaker, FAULT)
    assert breaker.state(0) is State.OPEN and breaker.admit(0) is None


@pytest.mark.parametrize("window_s", [1e-300, 1e-12, 1e-3])
def test_a_window_however_short_is_one(window_s: float) -> None:
    breaker = Breaker(BreakerSettings(faults=3, window_s=window_s))
    for now in (1e6, 1e6, 1e6 + 0.1, 1e6 + 0.1):
        send(breaker, FAULT, now)
        send(breaker, OK, now)
    assert breaker.closed, "no window holds three"
    send(breaker, FAULT, 1e6 + 0.2, 3)
    assert not breaker.closed, "in a row"


def test_a_row_of_faults_opens_it_however_well_it_did_before() -> None:
    breaker = Breaker(SETTINGS)
    send(breaker, OK, times=1000)
    send(breaker, FAULT, times=3)
    assert breaker.state(0) is State.OPEN


def test_every_second_answer_a_fault_opens_it_without_any_row() -> None:
    breaker = Breaker(SETTINGS)
    for at in range(3):
        send(breaker, OK, at)
        send(breaker, FAULT, at)
    assert breaker.state(3) is State.OPEN


def test_a_few_faults_among_many_answers_do_not_open_it() -> None:
    breaker = Breaker(SETTINGS)
    for at in range(50):
        send(breaker, FAULT, at / 10)
        send(breaker, OK, at / 10, times=9)
    assert breaker.state(5) is State.CLOSED


def test_faults_older_than_the_window_do_not_count() -> None:
    breaker = Breaker(SETTINGS)
    for at in (0.0, 61.0, 122.0, 183.0):
        send(breaker, OK, at)
        send(breaker, FAULT, at)
    assert breaker.state(183) is State.CLOSED


def test_mistakes_of_callers_never_open_it() -> None:
    breaker = Breaker(SETTINGS)
    send(breaker, NEUTRAL, times=1000)
    assert breaker.state(0) is State.CLOSED


def test_busy_answers_between_faults_do_not_break_the_row() -> None:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        send(breaker, FAULT)
        if breaker.state(0) is State.CLOSED:
            send(breaker, NEUTRAL)
    assert breaker.state(0) is State.OPEN


def test_of_500_waiting_requests_exactly_one_probes() -> None:
    breaker = opened()
    assert breaker.admit(9.9) is None
    admitted = [found for _ in range(500) if (found := breaker.admit(10.0))]
    assert len(admitted) == 1 and admitted[0].probe


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_limit() -> None:
    breaker, now = opened(), 10.0
    pauses = []
    for _ in range(3):
        send(breaker, FAULT, now)
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
    assert pauses == [20, 30, 30]


def test_good_probes_one_at_a_time_close_it() -> None:
    breaker = opened()
    send(breaker, OK, 10.0)
    assert breaker.state(10) is State.PROBING
    send(breaker, OK, 10.0)
    assert breaker.state(10) is State.CLOSED


def test_after_closing_the_pause_is_short_again() -> None:
    breaker = opened()
    send(breaker, FAULT, 10.0)
    send(breaker, OK, 30.0, times=2)
    send(breaker, FAULT, 30.0, times=3)
    assert breaker.wait_s(30.0) == 10


def test_a_neutral_probe_gives_its_place_to_the_next() -> None:
    breaker = opened()
    send(breaker, NEUTRAL, 10.0)
    assert breaker.state(10) is State.PROBING and breaker.admits(10)


def test_a_probe_that_never_reports_gives_its_place_back_and_its_late_word_is_void() -> None:
    breaker = opened()
    lost = ticket(breaker, 10.0)
    assert not breaker.admits(69.0)
    fresh = ticket(breaker, 70.0)
    assert not breaker.book(lost, FAULT, 71.0)
    assert breaker.state(71) is State.PROBING
    assert breaker.book(fresh, FAULT, 71.0)


def test_requests_sent_before_it_opened_do_not_judge_the_probe() -> None:
    breaker = Breaker(SETTINGS)
    early = [ticket(breaker, 0.0) for _ in range(5)]
    for one in early[:3]:
        breaker.book(one, FAULT, 0.0)
    assert not breaker.book(early[3], OK, 10.0)
    assert breaker.state(10) is State.PROBING
    assert not breaker.book(early[4], FAULT, 10.0)
    assert breaker.state(10) is State.PROBING


def test_what_failed_at_the_peer_is_nobodys_here() -> None:
    breaker = Breaker(SETTINGS)
    send(breaker, Outcome.PEER, times=1000)
    assert breaker.state(0) is State.CLOSED
    probed = opened()
    send(probed, Outcome.PEER, 10.0)
    assert probed.state(10) is State.PROBING and probed.admits(10)


def test_where_there_is_reason_to_believe_in_it_it_is_probed_soon() -> None:
    breaker = opened()
    breaker.hasten(0.2)
    assert breaker.wait_s(0.2) == pytest.approx(0.8)
    assert breaker.admit(0.9) is None
    send(breaker, OK, 1.0, times=2)
    assert breaker.state(1.0) is State.CLOSED


def test_a_short_pause_doubles_too_so_that_lies_are_believed_ever_less() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(7):
        breaker.hasten(now)
        pauses.append(breaker.wait_s(now))
        now += pauses[-1]
        send(breaker, FAULT, now)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_a_short_pause_is_never_longer_than_the_plain_one() -> None:
    breaker = Breaker(BreakerSettings(faults=1, pause_s=0.3))
    send(breaker, FAULT)
    breaker.hasten(0.0)
    assert breaker.wait_s(0.0) == pytest.approx(0.3)


def test_hurry_changes_nothing_for_one_that_is_not_open() -> None:
    closed, probing = Breaker(SETTINGS), opened()
    closed.hasten(5.0)
    assert closed.state(5.0) is State.CLOSED
    one = ticket(probing, 10.0)
    probing.hasten(10.0)
    assert not probing.admits(11.0)
    probing.book(one, OK, 11.0)


def test_after_closing_the_short_pause_is_short_again() -> None:
    breaker = opened()
    send(breaker, FAULT, 10.0)
    send(breaker, OK, 30.0, times=2)
    send(breaker, FAULT, 30.0, times=3)
    breaker.hasten(30.0)
    assert breaker.wait_s(30.0) == 1


def test_a_probe_counts_once() -> None:
    breaker = opened()
    probe = ticket(breaker, 10.0)
    breaker.book(probe, OK, 10.0)
    breaker.book(probe, OK, 10.0)
    assert breaker.state(10) is State.PROBING


def test_a_probe_that_began_well_and_broke_did_not_go_well() -> None:
    breaker, now, pauses = opened(), 10.0, list[float]()
    for _ in range(3):  # more than would close it
        probe = ticket(breaker, now)
        assert not breaker.book(probe, OK, now)  # its first byte
        assert breaker.book(probe, FAULT, now + 1)
        pauses.append(breaker.wait_s(now + 1))
        now += 1 + pauses[-1]
    assert pauses == [20, 30, 30]


def test_a_probe_that_broke_says_nothing_of_a_circuit_that_moved_meanwhile() -> None:
    breaker = opened()
    slow = ticket(breaker, 10.0)
    breaker.book(slow, OK, 10.0)
    send(breaker, OK, 11.0)
    assert breaker.closed
    assert not breaker.book(slow, FAULT, 12.0)
    send(breaker, FAULT, 13.0, times=3)
    assert breaker.state(23.0) is State.PROBING and not breaker.book(slow, FAULT, 23.0)


WHAT = ["admit", "ok", "neutral", "peer", "fault", "hasten"]
steps = st.tuples(st.sampled_from(WHAT), st.floats(0, 40))


@given(st.lists(steps, max_size=60))
def test_there_is_never_more_than_one_living_probe_and_never_a_request_while_open(
    script: list[tuple[str, float]],
) -> None:
    breaker, now, out = Breaker(SETTINGS), 0.0, list[Ticket]()
    for what, pause in script:
        now += pause
        if what == "admit":
            state = breaker.state(now)
            found = breaker.admit(now)
            assert not (found and state is State.OPEN)
            out += [found] if found else []
        elif what == "hasten":
            breaker.hasten(now)
        elif out:
            named = {"ok": OK, "neutral": NEUTRAL, "fault": FAULT, "peer": Outcome.PEER}
            breaker.book(out.pop(0), named[what], now)
        assert sum(one.probe and one.life == breaker._life for one in out) <= 1
        assert breaker.wait_s(now) >= 0


# All circuits -----------------------------------------------------------------------------------

P1, P1B, P2 = Worker(Pod("p1")), Worker(Pod("p1"), 1), Worker(Pod("p2"))


def all_of(*open_workers: Worker) -> Breakers:
    breakers = Breakers(SETTINGS)
    for at, worker in enumerate(open_workers):
        send(breakers.of(worker), FAULT, float(at), 3)
    return breakers


def test_workers_have_circuits_of_their_own() -> None:
    breakers = all_of(P1)
    assert not breakers.admits(P1, 0) and breakers.admits(P1B, 0) and breakers.admits(P2, 0)
    assert breakers.states(0) == {P1: State.OPEN}


def test_retry_after_is_the_first_one_to_return() -> None:
    breakers = all_of(P1, P2)
    assert breakers.wait_s([P1, P2], 4.0) == 6.0
    assert breakers.wait_s([P2], 4.0) == 7.0
    assert breakers.wait_s([], 4.0) == 0.0


def test_a_pod_that_left_takes_its_circuits_along() -> None:
    breakers = all_of(P1, P1B, P2)
    breakers.forget(Pod("p1"))
    assert breakers.admits(P1, 3) and breakers.admits(P1B, 3) and not breakers.admits(P2, 3)


def test_while_a_probe_is_under_way_the_wait_is_short() -> None:
    breaker = opened()
    ticket(breaker, 10.0)
    assert breaker.wait_s(10.0) == 1.0


def test_only_those_that_are_not_closed_are_kept_aside() -> None:
    breakers = all_of(P1)
    assert set(breakers.shut) == {P1}
    send(breakers.of(P2), OK, 0.0)
    assert set(breakers.shut) == {P1}
    told: list[tuple[Worker, float]] = []
    breakers.on_closed = lambda worker, now: told.append((worker, now))
    send(breakers.of(P1), OK, 10.0, times=2)
    assert not breakers.shut and told == [(P1, 10.0)]


def test_a_health_check_that_says_well_hastens_the_circuits_of_its_pod_only() -> None:
    breakers = all_of(P1, P1B, P2)
    assert not breakers.well(Pod("p1"), 2.0)
    assert [breakers.admits(one, 2.0) for one in (P1, P1B, P2)] == [True, True, False]
    assert breakers.well(Pod("p9"), 2.0)


def test_a_late_word_about_an_earlier_life_reaches_nobody() -> None:
    breakers = Breakers(SETTINGS)
    old = breakers.of(P1)
    late = [ticket(old, 0.0) for _ in range(3)]
    breakers.forget(Pod("p1"))
    for one in late:
        old.book(one, FAULT, 1.0)
    assert breakers.admits(P1, 1.0) and not breakers.shut
    assert breakers.of(P1).state(1.0) is State.CLOSED


def test_whoever_asks_a_closed_circuit_gets_the_same_leave_until_it_moves() -> None:
    breaker = Breaker(SETTINGS)
    before = ticket(breaker, 0.0)
    assert ticket(breaker, 5.0) is before
    send(breaker, FAULT, 5.0, times=3)
    send(breaker, OK, 15.0, times=2)
    after = ticket(breaker, 15.0)
    assert after is not before and not breaker.book(before, FAULT, 15.0)
    assert ticket(breaker, 15.0) is after


@given(st.lists(st.tuples(st.sampled_from([OK, OK, OK, FAULT, NEUTRAL]), st.floats(0, 9))))
def test_a_success_told_in_fewer_steps_is_the_same_success(
    told: list[tuple[Outcome, float]],
) -> None:
    long, short, now = Breaker(SETTINGS), Breaker(SETTINGS), 0.0
    for what, passed in told:
        now += passed
        one, other = long.admit(now), short.admit(now)
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        long.book(one, what, now)
        if what is OK and now < other.full:
            other.successes += 1
        else:
            short.book(other, what, now)
        assert long.state(now) is short.state(now) and long.admits(now) == short.admits(now)
        assert long.wait_s(now) == short.wait_s(now)


@given(st.lists(st.tuples(st.sampled_from([OK, OK, FAULT, NEUTRAL]), st.floats(0, 20))))
def test_a_circuit_opens_where_a_memory_of_every_answer_says_so(
    told: list[tuple[Outcome, float]],
) -> None:
    """Answers are counted by steps of the window; a step counts as long as its begin is in it."""
    breaker, now = Breaker(SETTINGS), 0.0
    seen: list[tuple[float, Outcome]] = []  # begin of its step
    step, row = float("-inf"), 0
    for what, passed in told:
        now += passed
        if what is not NEUTRAL:
            step = now if now >= step + SETTINGS.window_s / 12 else step
            seen.append((step, what))
            row = row + 1 if what is FAULT else 0
        counted = [one for at, one in seen if at > now - SETTINGS.window_s]
        faults = counted.count(FAULT)
        many = faults >= SETTINGS.faults and faults >= SETTINGS.share * len(counted)
        opens = what is FAULT and (row >= SETTINGS.faults or many)
        assert breaker.book(ticket(breaker, now), what, now) is opens
        if opens:
            return

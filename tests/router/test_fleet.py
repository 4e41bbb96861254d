"""Fleet: who may be selected, and that load comes back to zero."""

from __future__ import annotations

import contextlib
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvplane.router.discovery import Waiting
from kvplane.router.errors import GatewayError
from kvplane.router.fleet import Fleet
from kvplane.router.settings import FleetSettings
from kvplane.router.target import Booking, Lost, Pulse, Target, beat
from kvplane.vocabulary import Generation, Pod, Role, Shape, Stage, Worker, WorkerUp


def up(name: str = "p1", role: Role = Role.PREFILL, **more: object) -> WorkerUp:
    facts = {"model": "tiny", **more}
    return WorkerUp(Pod(name), f"http://{name}:30000", role, **facts)  # type: ignore[arg-type]


def names(targets: tuple[Target, ...]) -> list[str]:
    return [str(target.worker) for target in targets]


def fleet_of(*ups: WorkerUp) -> Fleet:
    fleet = Fleet()
    for worker in ups:
        fleet.up(worker)
    return fleet


# Coming and going -------------------------------------------------------------------------------


def test_every_dp_rank_is_a_target_of_its_own() -> None:
    fleet = fleet_of(up("p1", dp_size=2), up("d1", Role.DECODE))
    assert names(fleet.targets()) == ["d1", "p1", "p1@1"]
    assert names(fleet.targets(Role.PREFILL)) == ["p1", "p1@1"]


def test_targets_come_in_order_of_names_whoever_came_first() -> None:
    assert names(fleet_of(up("p2"), up("p1"), up("p3")).targets()) == ["p1", "p2", "p3"]


def test_a_pod_that_left_is_no_target() -> None:
    fleet = fleet_of(up("p1"))
    fleet.down(Pod("p1"))
    fleet.down(Pod("p1"))
    assert fleet.targets() == () and fleet.target(Worker(Pod("p1"))) is None


def test_new_facts_of_a_living_pod_keep_its_load() -> None:
    fleet = fleet_of(up("p1", model=""))
    fleet.book(Worker(Pod("p1")), 10)
    fleet.up(up("p1", model="tiny", max_tokens=100))
    assert repr(fleet.targets()[0]) == "<p1 prefill tiny healthy 10 tokens in 1>"
    assert fleet.targets()[0].up.max_tokens == 100


def test_a_new_generation_begins_without_load_and_late_releases_do_not_reach_it() -> None:
    fleet = fleet_of(up("p1", generation=Generation("a")))
    old = fleet.book(Worker(Pod("p1")), 10)
    fleet.up(up("p1", generation=Generation("b")))
    old.release()
    assert (fleet.targets()[0].inflight_tokens, fleet.targets()[0].inflight_requests) == (0, 0)


def test_new_lives_of_known_pods_are_told_also_of_those_that_were_away() -> None:
    fleet, told = Fleet(), list[str]()
    fleet.on_restart = told.append
    for life in ("a", "a", "b"):
        fleet.up(up("p1", generation=Generation(life)))
    fleet.up(up("p2", generation=None))
    fleet.down(Pod("p1"))
    fleet.up(up("p1", generation=Generation("b")))
    assert told == ["p1"]
    fleet.down(Pod("p1"))
    fleet.up(up("p1", generation=Generation("c")))
    assert told == ["p1", "p1"]


def test_booking_a_worker_that_left_says_so() -> None:
    with pytest.raises(KeyError, match="left the fleet"):
        Fleet().book(Worker(Pod("p1")), 1)


@pytest.mark.parametrize(
    ("url", "declared", "host"),
    [
        ("http://10.0.0.7:30000", None, "10.0.0.7"),
        ("http://[::1]:30000", None, "::1"),
        ("http://10.0.0.7:30000", "boot", "boot"),
        ("http://0.0.0.0:30000", None, "127.0.0.1"),
        ("http://[::]:30000", None, "::1"),
    ],
)
def test_the_bootstrap_host_is_that_of_the_url_unless_declared(
    url: str, declared: str | None, host: str
) -> None:
    fleet = fleet_of(WorkerUp(Pod("p1"), url, Role.PREFILL, bootstrap_host=declared))
    assert fleet.targets()[0].bootstrap_host == host


# Selecting --------------------------------------------------------------------------------------


def test_only_healthy_targets_that_are_not_drained_are_selectable() -> None:
    fleet = fleet_of(up("p1"), up("p2"), up("p3"))
    fleet.drain(Pod("p1"))
    for _ in range(3):
        fleet.mark_health(Pod("p2"), False, 1.0, "refused")
    assert names(fleet.selectable(Role.PREFILL, "tiny")) == ["p3"]
    fleet.drain(Pod("p1"), False)
    assert names(fleet.selectable(Role.PREFILL, "tiny")) == ["p1", "p3"]


def test_a_prefill_no_decode_can_find_is_not_selectable_and_its_stage_is_told() -> None:
    fleet = fleet_of(up("p1"))
    lost = Lost(Stage.REGISTER, "no bootstrap server at p1:8998: connection refused")
    assert fleet.mark_lost(Pod("p1"), lost) and not fleet.mark_lost(Pod("p1"), lost)
    assert fleet.selectable(Role.PREFILL, "tiny") == ()
    error = fleet.lack(Role.PREFILL, "tiny")
    assert error is not None and (error.status, error.stage) == (503, "register")
    assert "p1 register: no bootstrap server at p1:8998" in error.message
    assert fleet.mark_found(Pod("p1"), Shape(tp=2)) and not fleet.mark_found(Pod("p1"), Shape(tp=2))
    (found,) = fleet.selectable(Role.PREFILL, "tiny")
    assert found.up.shape.tp == 2
    assert not fleet.mark_lost(Pod("p9"), lost) and not fleet.mark_found(Pod("p9"), Shape())


def test_a_worker_that_does_not_serve_yet_is_named_with_its_reason() -> None:
    fleet = fleet_of(up("d1", Role.DECODE))
    reason = "GET /health answered 503: not registered at p1:8998"
    fleet.waiting = lambda: [Waiting(up("p1", model=""), reason, "register")]
    error = fleet.lack(Role.PREFILL, "tiny")
    assert error is not None and error.stage == "register"
    assert error.message == f"no prefill worker of 1 can be used: p1 does not serve yet ({reason})"


def test_a_worker_added_later_is_selectable_at_once() -> None:
    fleet = fleet_of(up("p1"))
    assert names(fleet.selectable(Role.PREFILL, "tiny")) == ["p1"]
    fleet.up(up("p2"))
    assert names(fleet.selectable(Role.PREFILL, "tiny")) == ["p1", "p2"]


def test_a_model_is_served_by_those_that_have_it_or_an_adapter_of_that_name() -> None:
    fleet = fleet_of(up("p1", adapters=("french",)), up("p2", model="other"), up("p3", model=""))
    assert names(fleet.selectable(Role.PREFILL, "tiny")) == ["p1", "p3"]
    assert names(fleet.selectable(Role.PREFILL, "french")) == ["p1", "p3"]
    assert fleet.models() == ("french", "other", "tiny")


@pytest.mark.parametrize(
    ("name", "model", "most"),
    [("tiny", "tiny", 100), ("french", "tiny", 100), ("other", "other", 0), ("huge", "huge", 0)],
)
def test_a_name_leads_to_its_model_and_the_longest_context_of_it(
    name: str, model: str, most: int
) -> None:
    short = up("p1", adapters=("french",), max_tokens=50)
    fleet = fleet_of(short, up("p2", max_tokens=100), up("p3", model="other"))
    assert fleet.asked_for(name) == (model, most)
    fleet.down(Pod("p2"))
    assert fleet.asked_for("tiny") == ("tiny", 50), "looked up again"


def test_an_unknown_model_is_named_with_those_there_are() -> None:
    error = fleet_of(up("p1")).lack(Role.PREFILL, "huge")
    assert error is not None and (error.code, error.status) == ("model_not_found", 404)
    assert str(error) == "model_not_found: no model 'huge' here: tiny"


def test_no_model_is_fine_where_there_is_only_one() -> None:
    assert fleet_of(up("p1")).lack(Role.PREFILL, "") is None
    error = fleet_of(up("p1"), up("p2", model="other")).lack(Role.PREFILL, "")
    assert error is not None and (error.status, error.param) == (400, "model")


@pytest.mark.parametrize(
    ("role", "code"),
    [(Role.PREFILL, "no_prefill_available"), (Role.DECODE, "no_decode_available")],
)
def test_an_empty_fleet_says_which_side_is_missing(role: Role, code: str) -> None:
    error = Fleet().lack(role, "tiny")
    assert error is not None and error.code == code and "registered" in error.message


def test_why_nobody_can_be_used_names_each_worker() -> None:
    fleet = fleet_of(up("p1"), up("p2"))
    fleet.drain(Pod("p1"))
    for _ in range(3):
        fleet.mark_health(Pod("p2"), False, 1.0, "connection refused")
    error = fleet.lack(Role.PREFILL, "tiny")
    assert error is not None and "p1 draining, p2 unhealthy (connection refused)" in error.message


def test_who_serves_is_looked_up_again_whenever_something_changes() -> None:
    fleet = fleet_of(up("p1"), up("d1", Role.DECODE))
    assert [names(side) for side in fleet.sides("tiny")] == [["p1"], ["d1"]]
    fleet.up(up("p2"))
    fleet.drain(Pod("p1"))
    assert [names(side) for side in fleet.sides("tiny")] == [["p2"], ["d1"]]
    fleet.mark_lost(Pod("p2"), Lost(Stage.REGISTER, "x"))
    with pytest.raises(GatewayError, match="no_prefill_available"):
        fleet.sides("tiny")
    fleet.mark_found(Pod("p2"), Shape())
    fleet.down(Pod("d1"))
    with pytest.raises(GatewayError, match="no_decode_available"):
        fleet.sides("tiny")
    fleet.up(up("u1", Role.BOTH))
    assert [names(side) for side in fleet.sides("tiny")] == [["u1"], []]


def test_names_from_clients_do_not_fill_memory() -> None:
    fleet = fleet_of(up("p1"))
    for number in range(3000):
        fleet.selectable(Role.PREFILL, f"name{number}")
        fleet.asked_for(f"name{number}")
        with contextlib.suppress(GatewayError):
            fleet.sides(f"name{number}")
    assert len(fleet._chosen) <= 1024 >= len(fleet._asked)
    assert not fleet._sides


# Health -----------------------------------------------------------------------------------------


def walk(signs: str) -> str:
    """+ well, - not well -> H healthy, U unhealthy after each."""
    pulse, settings = Pulse(), FleetSettings(failures=3, successes=2)
    shown = ""
    for sign in signs:
        beat(pulse, sign == "+", 0.0, "slow", settings)
        shown += "H" if pulse.healthy else "U"
        assert pulse.sound == (pulse.healthy and sign == "+"), "else an answer is told to the fleet"
    return shown


@pytest.mark.parametrize(
    ("signs", "states"),
    [
        ("---", "HHU"),
        ("--+--", "HHHHH"),
        ("---+-++", "HHUUUUH"),
        ("---++", "HHUUH"),
        ("-+-+-+-+", "HHHHHHHH"),
    ],
)
def test_health_changes_only_after_a_row_of_signs(signs: str, states: str) -> None:
    assert walk(signs) == states


@given(st.text(alphabet="+-", max_size=40))
def test_two_changes_of_health_are_never_closer_than_their_rows(signs: str) -> None:
    states = "H" + walk(signs)
    changes = [at for at in range(1, len(states)) if states[at] != states[at - 1]]
    assert all(later - earlier >= 2 for earlier, later in pairwise(changes))


def test_mark_health_says_when_it_changed_and_keeps_the_reason() -> None:
    fleet, told = fleet_of(up("p1")), list[tuple[str, bool]]()
    fleet.on_turn = lambda pod, healthy: told.append((pod, healthy))
    said = [fleet.mark_health(Pod("p1"), False, at, "timeout") for at in (1.0, 2.0, 3.0, 4.0)]
    assert said == [False, False, True, False]
    assert told == [("p1", False)]
    pulse = fleet.targets()[0].pulse
    assert (pulse.reason, pulse.since) == ("timeout", 3.0)
    assert not fleet.mark_health(Pod("gone"), False, 1.0)


# Health by traffic -------------------------------------------------------------------------------


def target_of(fleet: Fleet, name: str) -> Target:
    found = fleet.target(Worker(Pod(name)))
    assert found is not None
    return found


def test_an_answer_outweighs_failed_probes() -> None:
    fleet = fleet_of(up("p1"))
    for at in range(100):
        for _ in range(2):
            assert not fleet.mark_health(Pod("p1"), False, at, "GET /health: no answer in 3 s")
        fleet.answered(target_of(fleet, "p1"), at)
    assert fleet.healthy(Pod("p1"))


def test_health_that_fails_one_of_three_at_random_under_load_changes_nothing() -> None:
    chance = random.Random(3)
    fleet, changes = fleet_of(up("p1"), up("p2")), 0
    for at in range(2000):
        changes += fleet.mark_health(Pod("p1"), chance.random() > 1 / 3, at, "slow")
        fleet.answered(target_of(fleet, "p1"), at)
    assert changes == 0


def test_answers_bring_back_one_that_was_called_unhealthy() -> None:
    fleet = fleet_of(up("p1"))
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 1.0, "slow")
    fleet.answered(target_of(fleet, "p1"), 2.0)
    assert not fleet.healthy(Pod("p1"))
    fleet.answered(target_of(fleet, "p1"), 3.0)
    assert fleet.healthy(Pod("p1"))


def test_one_that_nobody_listens_at_leaves_while_others_serve() -> None:
    fleet = fleet_of(up("p1"), up("p2"), up("d1", Role.DECODE))
    said = [fleet.refused(target_of(fleet, "p1"), at, "no connection") for at in (1.0, 2.0, 3.0)]
    assert said == [False, False, True]
    assert names(fleet.selectable(Role.PREFILL, "tiny")) == ["p2"]


def test_one_that_nobody_listens_at_leaves_where_a_unified_worker_serves_all() -> None:
    fleet = fleet_of(up("p1"), up("d1", Role.DECODE), up("u1", Role.BOTH))
    for at in (1.0, 2.0, 3.0):
        fleet.refused(target_of(fleet, "p1"), at, "no connection")
    prefills, decodes = fleet.sides("tiny")
    assert (names(prefills), decodes) == (["u1"], ())


@pytest.mark.parametrize("last", [up("d1", Role.DECODE), up("p2", model="other")])
def test_traffic_alone_never_takes_the_last_of_its_kind(last: WorkerUp) -> None:
    fleet = fleet_of(up("p1", dp_size=2), last)
    for at in range(100):
        assert not fleet.refused(target_of(fleet, "p1"), at, "no connection")
    assert fleet.healthy(Pod("p1"))


def test_words_about_an_earlier_life_change_nothing_for_this_one() -> None:
    fleet = fleet_of(up("p1", generation=Generation("a")), up("p2"))
    old = target_of(fleet, "p1")
    fleet.up(up("p1", generation=Generation("b")))
    for at in range(5):
        assert not fleet.refused(old, at, "no connection")
    for _ in range(3):
        fleet.mark_health(Pod("p1"), False, 1.0, "slow")
    for at in range(5):
        fleet.answered(old, at)
    assert not fleet.healthy(Pod("p1"))


def test_a_pod_that_is_gone_is_not_healthy() -> None:
    assert not Fleet().healthy(Pod("p1"))


# Taking load gradually ---------------------------------------------------------------------------


def shares(fleet: Fleet, now: float) -> list[float]:
    return [round(target.share(now, fleet.settings), 3) for target in fleet.targets()]


def test_a_worker_that_is_new_takes_load_gradually() -> None:
    fleet = Fleet(FleetSettings(ramp_s=10, ramp_least=0.1))
    fleet.up(up("p1"), 100.0)
    fleet.up(up("p2"), 200.0)
    assert fleet.ramping_until == 210.0
    assert [shares(fleet, now) for now in (200.0, 205.0, 210.0)] == [[1, 0.1], [1, 0.55], [1, 1]]


def test_so_does_one_that_is_healthy_again_or_whose_circuit_closed() -> None:
    fleet = fleet_of(up("p1"), up("p2", dp_size=2))
    for ok in (False, False, False, True, True):
        fleet.mark_health(Pod("p1"), ok, 100.0, "slow")
    assert shares(fleet, 100.0) == [0.1, 1, 1]
    fleet.returned(Worker(Pod("p2"), 1), 105.0)
    assert shares(fleet, 105.0) == [0.55, 1, 0.1]
    fleet.returned(Worker(Pod("gone")), 105.0)


def test_new_facts_of_a_living_pod_do_not_make_it_new() -> None:
    fleet = Fleet()
    fleet.up(up("p1", model=""), 0.0)
    fleet.up(up("p1", model="tiny"), 100.0)
    assert shares(fleet, 100.0) == [1]


# Load -------------------------------------------------------------------------------------------


def test_a_booking_is_given_back_once() -> None:
    fleet = fleet_of(up("p1"))
    booking = fleet.book(Worker(Pod("p1")), 7)
    assert fleet.targets()[0].inflight_tokens == 7
    booking.release()
    booking.release()
    assert (fleet.targets()[0].inflight_tokens, fleet.targets()[0].inflight_requests) == (0, 0)


def test_a_booking_is_given_back_when_its_block_ends_in_an_error() -> None:
    fleet = fleet_of(up("p1"))
    with pytest.raises(RuntimeError), fleet.book(Worker(Pod("p1")), 7):
        raise RuntimeError
    assert fleet.targets()[0].inflight_tokens == 0


class Accounts(RuleBasedStateMachine):
    """Whatever happens, load = the sum of open bookings of this life, never negative."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = fleet_of(up("p1", dp_size=2), up("p2"))
        self.open: list[tuple[Booking, int]] = []
        self.begun: list[Booking] = []
        self.life = 0

    @rule(at=st.integers(0, 20))
    def begin(self, at: int) -> None:
        if at < len(self.open):
            self.open[at][0].began()
            self.begun.append(self.open[at][0])

    @rule(pod=st.sampled_from(["p1", "p2"]), rank=st.integers(0, 1), tokens=st.integers(0, 9999))
    def book(self, pod: str, rank: int, tokens: int) -> None:
        worker = Worker(Pod(pod), rank)
        if self.fleet.target(worker) is not None:
            self.open.append((self.fleet.book(worker, tokens), tokens))

    @rule(at=st.integers(0, 20), again=st.booleans())
    def release(self, at: int, again: bool) -> None:
        if at < len(self.open):
            booking, _ = self.open.pop(at)
            booking.release()
            if again:
                booking.release()

    @rule(pod=st.sampled_from(["p1", "p2"]))
    def restart(self, pod: str) -> None:
        self.life += 1
        self.fleet.up(up(pod, generation=Generation(str(self.life)), dp_size=2))

    @rule(pod=st.sampled_from(["p1", "p2"]))
    def leave_and_return(self, pod: str) -> None:
        self.fleet.down(Pod(pod))
        self.fleet.up(up(pod, generation=Generation("back"), dp_size=2))

    @invariant()
    def load_is_the_sum_of_bookings(self) -> None:
        for target in self.fleet.targets():
            mine = [tokens for booking, tokens in self.open if booking.target is target]
            assert (target.inflight_tokens, target.inflight_requests) == (sum(mine), len(mine))
            waiting = [b for b, _ in self.open if b.target is target and b not in self.begun]
            assert target.waiting_requests == len(waiting)

    def teardown(self) -> None:
        for booking, _ in self.open:
            booking.release()
            assert booking.target.inflight_tokens >= 0
        assert all(target.inflight_tokens == 0 for target in self.fleet.targets())


TestAccounts = Accounts.TestCase

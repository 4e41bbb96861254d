"""Account: load and circuits of one attempt come back, and each fault lies where it belongs."""

from __future__ import annotations

from collections import Counter

import pytest

from kvplane.router.account import Account
from kvplane.router.blame import LegFailed, Side, engine_refused, leg_broke
from kvplane.router.breaker import Breakers, Outcome, State
from kvplane.router.fleet import Fleet
from kvplane.router.legs_errors import LegError, Phase, PoolFull, Refused, Stale, TimedOut
from kvplane.router.settings import BreakerSettings
from kvplane.vocabulary import Pod, Role, Worker, WorkerUp

P1, P2, D1, D2 = (Worker(Pod(name)) for name in ("p1", "p2", "d1", "d2"))
JSON = [(b"content-type", b"application/json")]
FAILED = b'{"error":{"message":"transfer failed"}}'


class Plane:
    """Two prefills, two decodes; `told` counts legs by worker and outcome."""

    def __init__(self, **circuit: float) -> None:
        self.fleet = Fleet()
        self.breakers = Breakers(BreakerSettings(**({"faults": 3} | circuit)))  # type: ignore[arg-type]
        self.breakers.on_closed = self.fleet.returned
        for name in ("p1", "p2", "d1", "d2"):
            role = Role.PREFILL if name[0] == "p" else Role.DECODE
            self.fleet.up(WorkerUp(Pod(name), f"http://{name}:1", role, model="tiny"))
        self.told: Counter[tuple[str, Outcome]] = Counter()
        self.opened: list[str] = []

    def open(self, prefill: Worker | None = P1, decode: Worker = D1, now: float = 0.0) -> Account:
        second, first = self.fleet.target(decode), prefill and self.fleet.target(prefill)
        assert second is not None
        return Account(self.fleet, self.breakers, now, second, 100, first, 100)

    def close(self, account: Account, now: float = 0.0) -> None:
        account.close(
            now,
            lambda side, target, what: self.told.update([(target.name, what)]),
            lambda target: self.opened.append(target.name),
        )
        account.decode.release()
        account.release_prefill()

    def fail(
        self,
        failed: LegFailed,
        prefill: Worker | None = P1,
        decode: Worker = D1,
        silent: bool = False,
    ) -> tuple[Worker, ...]:
        """One attempt that failed; who is left out of the next."""
        account = self.open(prefill, decode)
        account.judge(failed, silent, 0.0)
        self.close(account)
        return account.without

    def states(self) -> dict[str, State]:
        states = self.breakers.states(0.0)
        return {str(worker): state for worker, state in states.items() if state is not State.CLOSED}

    @property
    def load(self) -> int:
        return sum(t.inflight_tokens + t.inflight_requests for t in self.fleet.targets())


def broken(side: Side, kind: type[LegError], phase: Phase = Phase.CONNECT) -> LegFailed:
    return leg_broke(side, "w", kind("h:1", phase, "why"))


def test_load_is_taken_and_given_back_once() -> None:
    plane = Plane()
    account = plane.open()
    assert plane.load == 2 * 101
    account.release_prefill()
    account.release_prefill()
    assert plane.load == 101
    plane.close(account)
    plane.close(account)
    assert plane.load == 0


def test_a_first_byte_is_a_success_at_once_however_long_the_stream_is() -> None:
    plane = Plane(share=1.0)
    for worker in (P1, D1):
        for _ in range(2):
            plane.fail(broken(Side.PREFILL if worker == P1 else Side.DECODE, Refused))
    account = plane.open()
    account.began(1.0)
    for side in Side:
        plane.fail(broken(side, Refused))
        plane.fail(broken(side, Refused))
    assert not plane.states(), "the row of faults began again"
    plane.close(account)
    assert plane.told[("p1", Outcome.SUCCESS)] == plane.told[("d1", Outcome.SUCCESS)] == 1


def test_answers_that_begin_outweigh_health_checks_that_fail() -> None:
    plane = Plane()
    for at in range(10):
        for pod in (P1.pod, D1.pod):
            assert not any(plane.fleet.mark_health(pod, False, at, "slow") for _ in range(2))
        account = plane.open(now=at)
        account.began(at)
        plane.close(account, at)
    assert plane.fleet.healthy(P1.pod) and plane.fleet.healthy(D1.pod)


def test_a_stream_that_breaks_is_a_fault_of_decode_though_it_began() -> None:
    plane = Plane()
    for _ in range(3):
        account = plane.open()
        account.began(1.0)
        account.judge(broken(Side.DECODE, TimedOut, Phase.BODY), False, 2.0)
        plane.close(account, 2.0)
    assert plane.states() == {"d1": State.OPEN} and plane.opened == ["d1"]
    assert plane.told[("p1", Outcome.SUCCESS)] == 3, "what it had to do was done"


def test_a_probe_closes_the_circuit_at_its_first_byte() -> None:
    plane = Plane()
    for _ in range(3):
        plane.fail(broken(Side.PREFILL, Refused), decode=D2)
    assert plane.states() == {"p1": State.OPEN}
    for at in range(3):
        account = plane.open(now=60.0 + at)
        account.began(60.0 + at)  # and goes on for an hour
    assert not plane.states()
    p1 = plane.fleet.target(P1)
    assert p1 is not None and p1.share(62.0, plane.fleet.settings) == 0.1, "then it ramps"


def test_a_circuit_that_closes_is_not_counted_as_one_that_opens() -> None:
    plane = Plane(faults=1, successes=1, pause_s=1)
    plane.fail(broken(Side.PREFILL, Refused))
    account = plane.open(now=2.0)
    account.began(2.0)
    plane.close(account, 2.0)
    assert plane.opened == ["p1"]


@pytest.mark.parametrize("side", list(Side))
def test_a_fault_lies_on_one_side_and_is_a_peer_fault_on_the_other(side: Side) -> None:
    plane = Plane()
    for _ in range(10):
        without = plane.fail(engine_refused(side, "w", 500, JSON, b"{}"))
    mine, other = ("p1", "d1") if side is Side.PREFILL else ("d1", "p1")
    assert plane.states() == {mine: State.OPEN}
    assert (plane.told[(mine, Outcome.FAULT)], plane.told[(other, Outcome.PEER)]) == (10, 10)
    assert [str(worker) for worker in without] == [mine]


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 429])
def test_a_refusal_is_nobodys_fault_and_a_sign_of_life(status: int) -> None:
    plane = Plane()
    for _ in range(20):
        plane.fail(engine_refused(Side.PREFILL, "w", status, JSON, b"{}"))
    assert not plane.states() and plane.told[("p1", Outcome.NEUTRAL)] == 20
    p1 = plane.fleet.target(P1)
    assert p1 is not None and p1.signs == 20


def test_busy_is_neutral_and_the_next_attempt_goes_elsewhere() -> None:
    plane, headers = Plane(), [*JSON, (b"retry-after", b"1")]
    for _ in range(20):
        assert plane.fail(engine_refused(Side.DECODE, "w", 503, headers, b"full")) == (D1,)
    assert not plane.states()
    assert [t.busy_until for t in plane.fleet.targets(Role.DECODE)] == [1.0, float("-inf")]
    assert [target.name for target in plane.fleet.uneasy] == ["d1"], "or nobody would look"
    plane.fail(engine_refused(Side.DECODE, "w", 429, [*JSON, (b"retry-after", b"3600")], b"full"))
    assert plane.fleet.targets(Role.DECODE)[0].busy_until == 30.0


@pytest.mark.parametrize(
    ("told", "later_s"), [("7", 7.0), ("Wed, 21 Oct", None), ("", None), ("\u0967", None)]
)
def test_only_seconds_are_waited_for(told: str, later_s: float | None) -> None:
    failed = engine_refused(Side.DECODE, "w", 429, JSON, b"full")
    failed.cause.retry_after = told
    assert failed.retry_after_s == later_s


def test_a_killed_prefill_is_found_though_only_decodes_complain() -> None:
    """50 transfers of p1 in flight, d1 and d2 say 'transfer failed' for them."""
    plane = Plane()
    accounts = [plane.open(P1, (D1, D2)[number % 2]) for number in range(50)]
    for account in accounts:
        account.judge(engine_refused(Side.DECODE, "d", 500, JSON, FAILED), False, 0.0)
        plane.close(account)
    assert plane.states() == {"p1": State.OPEN}
    assert plane.told[("p1", Outcome.FAULT)] == 49
    assert plane.told[("d1", Outcome.PEER)] + plane.told[("d2", Outcome.PEER)] == 49
    assert plane.told[("d1", Outcome.FAULT)] + plane.told[("d2", Outcome.FAULT)] == 0
    assert plane.load == 0


def test_two_that_only_fail_with_each_other_open_no_circuit_and_both_are_left_out() -> None:
    plane = Plane()
    for _ in range(30):
        assert plane.fail(engine_refused(Side.DECODE, "d1", 500, JSON, FAILED)) == (P1, D1)
    assert not plane.states()
    assert plane.breakers.pairs.apart(0.0) == {(P1, D1)}
    account = plane.open()
    account.began(1.0)
    assert not plane.breakers.pairs.apart(1.0)
    plane.close(account)


def test_where_both_were_silent_the_one_with_failing_health_is_guilty() -> None:
    plane = Plane()
    plane.fleet.mark_health(Pod("d1"), False, 0.0, "GET /health: no answer")
    failed = broken(Side.PREFILL, TimedOut, Phase.SENT)
    assert plane.fail(failed, silent=True) == (D1,)
    assert plane.told[("d1", Outcome.FAULT)] == plane.told[("p1", Outcome.PEER)] == 1


def test_where_both_were_silent_and_nobody_knows_it_is_the_pairs() -> None:
    plane = Plane()
    failed = broken(Side.PREFILL, TimedOut, Phase.SENT)
    assert plane.fail(failed, silent=True) == (P1, D1)
    assert plane.fail(failed, P2, D1, silent=True) == (D1,)
    assert plane.fail(failed, P2, D2, silent=False) == (P2,)


def test_a_unified_worker_is_to_blame_for_its_own_silence() -> None:
    plane = Plane()
    failed = broken(Side.DECODE, TimedOut, Phase.SENT)
    assert plane.fail(failed, prefill=None, silent=True) == (D1,)
    assert plane.told == Counter({("d1", Outcome.FAULT): 1})


def test_a_stale_connection_leaves_nobody_out_and_a_full_pool_its_engine() -> None:
    plane = Plane()
    assert plane.fail(broken(Side.DECODE, Stale, Phase.SENT)) == ()
    assert plane.fail(broken(Side.DECODE, PoolFull)) == (D1,)
    assert not plane.states() and plane.told[("d1", Outcome.FAULT)] == 0


def test_three_refused_connections_take_a_worker_out_by_health() -> None:
    plane = Plane(faults=100)
    for _ in range(3):
        plane.fail(broken(Side.DECODE, Refused))
    assert [t.name for t in plane.fleet.selectable(Role.DECODE, "tiny")] == ["d2"]

"""Sides: what is kept of a fleet that stays as it is says the same as looking at every pair."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvplane.bootstrap import compatible
from kvplane.router.pairing import Pair, misfit, pair
from kvplane.router.policies import Candidate
from kvplane.router.sides import Sides
from kvplane.router.target import Pulse, Target
from kvplane.vocabulary import Pod, Role, Shape, Worker, WorkerUp

facts = st.tuples(
    st.sampled_from(["sglang", "sglang", "vllm"]),
    st.sampled_from(["", "tiny", "other"]),
    st.sampled_from([1, 2, 2, 3]),
    st.sampled_from([None, 16, 64]),
)
some = st.lists(facts, min_size=1, max_size=4)


def targets(role: Role, told: list[tuple[str, str, int, int | None]]) -> tuple[Target, ...]:
    found = []
    for number, (engine, model, tp, page) in enumerate(told):
        name, shape = f"{role}{number}", Shape(tp=tp, page_size=page)
        up = WorkerUp(Pod(name), f"http://{name}:1", role, engine, model, shape=shape)
        found.append(Target(Worker(Pod(name)), up, Pulse()))
    return tuple(found)


@given(some, some)
def test_where_all_fit_all_the_best_of_both_meet(
    ones: list[tuple[str, str, int, int | None]], others: list[tuple[str, str, int, int | None]]
) -> None:
    sides = Sides(targets(Role.PREFILL, ones), targets(Role.DECODE, others))
    fits = [
        not misfit(Candidate(one), Candidate(other), compatible)
        for one in sides.prefills
        for other in sides.decodes
    ]
    assert sides.fit(compatible) is all(fits)
    if sides.fit(compatible):
        best = Pair(sides.firsts[0], sides.seconds[0])
        assert pair(sides.firsts, sides.seconds, compatible) == best


def test_shapes_are_compared_once_for_each_kind() -> None:
    alike = [("sglang", "tiny", 1, 16)] * 50
    sides, asked = Sides(targets(Role.PREFILL, alike), targets(Role.DECODE, alike)), list[Shape]()

    def counted(one: Shape, other: Shape) -> tuple[str, ...]:
        asked.append(one)
        return ()

    assert sides.fit(counted) and sides.fit(counted)
    assert len(asked) == 1

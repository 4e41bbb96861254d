"""Pairing: which two meet, and what is said where none can."""

from __future__ import annotations

from kvplane.router.pairing import NoPair, Pair, pair
from kvplane.router.policies import Candidate
from kvplane.router.target import Pulse, Target
from kvplane.vocabulary import Pod, Role, Shape, Worker, WorkerUp


def of(name: str, role: Role, page: int = 16, **facts: object) -> Candidate:
    up = WorkerUp(Pod(name), f"http://{name}:1", role, shape=Shape(page_size=page), **facts)  # type: ignore[arg-type]
    return Candidate(Target(Worker(Pod(name)), up, Pulse()))


def prefill(name: str, page: int = 16, **facts: object) -> Candidate:
    return of(name, Role.PREFILL, page, **facts)


def decode(name: str, page: int = 16, **facts: object) -> Candidate:
    return of(name, Role.DECODE, page, **facts)


def compatible(one: Shape, other: Shape) -> tuple[str, ...]:
    if one.page_size == other.page_size:
        return ()
    return (f"page_size: {one.page_size} against {other.page_size}",)


def met(prefills: list[Candidate], decodes: list[Candidate]) -> str:
    found = pair(prefills, decodes, compatible)
    if isinstance(found, NoPair):
        return f"{found.code}: {found.reason}"
    return f"{found.prefill.target.worker}+{found.decode.target.worker}"


def test_the_best_of_both_meet() -> None:
    assert met([prefill("p1"), prefill("p2")], [decode("d1"), decode("d2")]) == "p1+d1"


def test_the_best_prefill_takes_the_best_decode_it_fits() -> None:
    assert met([prefill("p1", 32), prefill("p2")], [decode("d1"), decode("d2", 32)]) == "p1+d2"


def test_a_prefill_that_fits_nobody_is_passed_over() -> None:
    assert met([prefill("p1", 64), prefill("p2")], [decode("d1"), decode("d2")]) == "p2+d1"


def test_where_nobody_fits_the_differing_fields_are_named() -> None:
    assert met([prefill("p1", 64)], [decode("d1")]) == (
        "no_compatible_pair: no prefill fits a decode; p1 and d1 differ in page_size: 64 against 16"
    )


def test_engines_of_two_families_do_not_meet() -> None:
    said = met([prefill("p1", engine="sglang")], [decode("d1", engine="vllm")])
    assert said.endswith("engine: sglang against vllm")


def test_two_models_do_not_meet_but_an_unknown_one_may() -> None:
    assert "model: a against b" in met([prefill("p1", model="a")], [decode("d1", model="b")])
    assert met([prefill("p1", model="a")], [decode("d1")]) == "p1+d1"


def test_an_empty_side_is_named() -> None:
    assert met([], [decode("d1")]).startswith("no_prefill_available")
    assert met([prefill("p1")], []).startswith("no_decode_available")


def test_what_was_known_of_the_candidates_comes_along() -> None:
    deep = Candidate(prefill("p1").target, 3, 48)
    found = pair([deep], [decode("d1")], compatible)
    assert isinstance(found, Pair) and found.prefill.depth_tokens == 48

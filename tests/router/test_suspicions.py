"""Suspicions and verdicts: each precondition broken in a constructed view, and named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from msgspec import structs

from kvplane.index import View, chain
from kvplane.router.drift import Compared, compared
from kvplane.router.foretold import Depth, Foretold
from kvplane.router.suspicions import Cause, Scene, Suspicion, explain
from kvplane.router.verdicts import drifted, likeliest, silent
from kvplane.vocabulary import Epoch, Knowledge, Namespace, Pod, Stored, Tier, Worker

P1, P2, P3 = (Worker(Pod(name)) for name in ("p1", "p2", "p3"))
PLAIN = Namespace("tiny", 16)
SALTED = replace(PLAIN, salt="tenant-secret")


def prompt(number: int) -> list[int]:
    return [number * 1000 + at for at in range(100)]


def store(
    view: View, worker: Worker, tokens: Sequence[int], space: Namespace = PLAIN, blocks: int = 6
) -> None:
    hashes = chain(tokens, space).blocks[:blocks]
    view.apply(Stored(worker, Epoch(1), Tier.GPU, None, hashes, space.block_size))


def routed(
    view: View, worker: Worker, number: int, space: Namespace = PLAIN, others: Iterable[Worker] = ()
) -> Foretold:
    """A request as it is routed now."""
    bare = Foretold(worker, Epoch(1), 0, True, space, (prompt(number),), {})
    now = bare.now(view)
    asked = {one: Depth(predicted=now.get(one, 0)) for one in (worker, *others)}
    return structs.replace(bare, depths=asked)


def seen(view: View, told: Foretold, actual: int, **more: object) -> Compared:
    """The same after it was served."""
    later = told.now(view)
    scene = Scene(view, later, **more)  # type: ignore[arg-type]
    one = compared(told.predicted, later.get(told.worker, 0), actual, 0.0)
    return structs.replace(one, suspicions=explain(told, actual, scene))


def named(each: Sequence[Compared]) -> Suspicion:
    return likeliest([one for one in each if not one.right], each)


def test_a_salt_that_the_events_do_not_carry() -> None:
    view = View()
    each = []
    for number in range(4):
        store(view, P1, prompt(number))  # told of without its salt
        told = routed(view, P1, number, SALTED)
        assert told.predicted == 0
        each.append(seen(view, told, 96))
    assert named(each) == Suspicion(Cause.SALT, "no salt")
    said = drifted(P1, each, each)
    assert said.sentence.startswith("salt: index says 0 tokens, p1 found 96; right when ranked")
    assert said.state is Knowledge.PARTIAL and "salt" in said.culprit and said.next_step
    assert "tenant-secret" not in repr(said)


def test_a_salt_that_the_engine_ignores() -> None:
    view = View()
    each = []
    for number in range(4):
        store(view, P1, prompt(number), SALTED)
        each.append(seen(view, routed(view, P1, number), 96, salts=("x", "tenant-secret")))
    assert named(each) == Suspicion(Cause.SALT, "a salt of other requests")
    assert "tenant-secret" not in repr(drifted(P1, each, each))


def test_prompts_of_no_salt_that_others_stored_do_not_hide_the_salt() -> None:
    view = View()
    each = []
    for number in range(3):
        store(view, P1, prompt(number))
        each.append(seen(view, routed(view, P1, number, SALTED), 96))
        each += [seen(view, routed(view, P1, number), 0)] * 3  # claimed for what lies salted
    assert named(each).cause is Cause.SALT


@pytest.mark.parametrize(
    ("asked", "stored", "about"),
    [("sql", "", "the base model"), ("sql", "chat", "adapter chat"), ("", "sql", "adapter sql")],
)
def test_an_adapter_under_another_name(asked: str, stored: str, about: str) -> None:
    view = View()
    each = []
    for number in range(4):
        store(view, P1, prompt(number), replace(PLAIN, adapter=stored))
        told = routed(view, P1, number, replace(PLAIN, adapter=asked))
        each.append(seen(view, told, 96, adapters=("sql", "chat")))
    assert named(each) == Suspicion(Cause.ADAPTER, about)
    assert about in drifted(P1, each, each).sentence


def test_an_engine_that_shares_in_larger_blocks() -> None:
    view = View()
    each = []
    for number, held in enumerate((3, 5, 6, 3, 5)):
        store(view, P1, prompt(number), blocks=held)
        told = routed(view, P1, number)
        each.append(seen(view, told, told.predicted // 32 * 32, declared=32))
    assert named(each) == Suspicion(Cause.BLOCK_SIZE, "32 tokens")
    assert "blocks of 32 tokens" in drifted(P1, each, each).sentence


def test_an_engine_that_shares_in_smaller_blocks() -> None:
    view = View()
    each = []
    for number in range(4):
        store(view, P1, prompt(number), blocks=3)
        each.append(seen(view, routed(view, P1, number), 56))
    assert named(each) == Suspicion(Cause.BLOCK_SIZE, "another size")


def test_what_this_one_serves_appears_at_another() -> None:
    """The endpoints of two workers are swapped."""
    view = View()
    each = []
    for number in range(4):
        told = routed(view, P1, number, others=(P2, P3))  # new: found nothing, stored at p2
        store(view, P2, prompt(number))
        each.append(seen(view, told, 0))
        again = routed(view, P1, number, others=(P2, P3))  # p1 holds it, the index says p2
        each.append(seen(view, again, 96))
    assert [one.right for one in each] == [True, False] * 4
    assert named(each) == Suspicion(Cause.IDENTITY, "p2")
    said = drifted(P1, [one for one in each if not one.right], each)
    assert said.culprit == "event endpoint of p1" and "p2" in said.next_step


def test_another_workers_stream_is_heard_twice() -> None:
    """Both endpoints name one publisher: the index says of p1 what p2 holds."""
    view = View()
    each = []
    for number in range(4):
        for worker in (P1, P2):
            store(view, worker, prompt(number))
            view.note(worker, Epoch(1), number, 0.0)
        each.append(seen(view, routed(view, P1, number, others=(P2, P3)), 0))
    assert named(each) == Suspicion(Cause.IDENTITY, "p2")


def test_a_worker_that_happens_to_hold_as_much_is_no_mixed_up_identity() -> None:
    """A beginning that everybody holds, and an engine that lost it: nothing proves a mix-up."""
    view = View()
    each = []
    for number in range(4):
        for worker in (P1, P2):
            store(view, worker, prompt(number))
            view.note(worker, Epoch(1), worker is P1, 0.0)
        each.append(seen(view, routed(view, P1, number, others=(P2,)), 0))
    assert all(one.over == 96 for one in each)
    assert named(each).cause is Cause.UNKNOWN


def test_what_nothing_explains_is_said_to_be_unknown_with_its_figures() -> None:
    view = View()
    for number in range(4):
        store(view, P1, prompt(number))
    each = [seen(view, routed(view, P1, number), 0) for number in range(4)]
    said = drifted(P1, each, each)
    assert said.cause is Cause.UNKNOWN
    assert "index says 96 tokens, p1 found 0" in said.sentence


def test_one_request_names_no_cause() -> None:
    view = View()
    store(view, P1, prompt(0))
    each = [seen(view, routed(view, P1, 0, SALTED), 96)]
    assert each[0].suspicions and named(each).cause is Cause.UNKNOWN


def test_a_request_that_was_right_raises_no_suspicion() -> None:
    view = View()
    store(view, P1, prompt(0))
    store(view, P1, prompt(0), SALTED)
    assert not seen(
        view, routed(view, P1, 0, others=(P2,)), 96, salts=("tenant-secret",)
    ).suspicions


def test_several_prompts_of_one_request_are_added_up() -> None:
    view = View()
    for number in range(2):
        store(view, P1, prompt(number), blocks=2 + number)
    told = structs.replace(routed(view, P1, 0), prompts=(prompt(0), prompt(1)))
    assert told.now(view) == {P1: 32 + 48}
    assert (told.most, told.tokens) == (192, 200)


def test_a_prompt_held_whole_is_foretold_without_its_last_block() -> None:
    view = View()
    store(view, P1, prompt(0))
    told = structs.replace(routed(view, P1, 0), prompts=(prompt(0)[:96],))
    assert (told.now(view), told.most) == ({P1: 80}, 80)


def test_every_cause_has_its_words() -> None:
    for cause in Cause:
        if cause is Cause.SILENT:
            said = silent(P1, 100, 12.3)
            assert "served 100 requests" in said.sentence and "12 s" in said.sentence
            assert said.state is Knowledge.DARK
            continue
        suspicion = frozenset({Suspicion(cause, "p2")})
        each = [Compared(0.0, 96, 0, 96, 0, suspicion), Compared(0.0, 0, 96, 0, 96, suspicion)]
        said = drifted(P1, each, each)
        assert said.cause is cause and said.named == (cause, said.about)
        assert said.sentence.startswith(f"{cause}: ") and said.culprit and said.next_step

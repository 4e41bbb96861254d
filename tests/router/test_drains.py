"""The last word about a pod holds, over its lives, until another or until it is deleted."""

from __future__ import annotations

import pytest

from kvplane.router import drains
from kvplane.router.drains import Drains
from kvplane.vocabulary import Pod, Role, WorkerUp


def up(name: str, draining: bool = False) -> WorkerUp:
    return WorkerUp(Pod(name), f"http://{name}:1", Role.PREFILL, "kvplane", "m", draining=draining)


@pytest.mark.parametrize("declared", [True, False])
def test_the_last_word_is_stronger_than_what_was_declared(declared: bool) -> None:
    said = Drains()
    assert said.of(up("p", declared)) is declared
    for word in (True, False, True):
        said.say(Pod("p"), word)
        assert said.of(up("p", declared)) is word
    said.forget(Pod("p"))
    assert said.of(up("p", declared)) is declared
    said.forget(Pod("p"))  # twice is as good


def test_who_was_spoken_of_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drains, "MOST", 3)
    said = Drains()
    for name in ("a", "b", "c", "a", "d"):  # a was spoken of again
        said.say(Pod(name), True)
    assert [name for name in "abcd" if said.of(up(name))] == ["a", "c", "d"]

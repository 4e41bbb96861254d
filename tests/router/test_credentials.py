"""Credentials: a worker's own key replaces every other, in pairs and in lines, and only its own."""

from __future__ import annotations

from kvplane.router import Credentials
from kvplane.router.legs_wire import Origin, header_lines
from kvplane.vocabulary import Pod

ONE, TWO = Origin("10.0.0.1", 30000), Origin("10.0.0.2", 30000)
PAIRS = [(b"x-authorization", b"mine"), (b"authorization", b"Bearer client"), (b"x-a", b"1")]


def known() -> Credentials:
    found = Credentials("usual")
    found.learn(Pod("one"), "http://10.0.0.1:30000", "own")
    return found


def test_its_key_is_the_only_one_however_headers_are_written() -> None:
    keys = known()
    pairs = keys.signed(ONE, PAIRS)
    lines = keys.signed(ONE, header_lines(PAIRS))
    assert not isinstance(pairs, bytes) and isinstance(lines, bytes)
    assert list(pairs) == [PAIRS[0], PAIRS[2], (b"authorization", b"Bearer own")]
    assert lines == header_lines(pairs)
    assert keys.signed(ONE, b"") == b"authorization: Bearer own\r\n"


def test_nobody_elses_request_is_touched() -> None:
    keys = known()
    assert keys.signed(TWO, PAIRS) is PAIRS
    assert not Credentials("usual").known
    assert keys and "own" not in repr(keys)


def test_questions_of_ours_bring_its_key_else_the_usual_one() -> None:
    keys = known()
    assert keys.asking("http://10.0.0.1:30000/v1/models") == {"Authorization": "Bearer own"}
    assert keys.asking("http://10.0.0.2:30000/health") == {"Authorization": "Bearer usual"}
    assert Credentials().asking("http://10.0.0.2:30000/health") == {}


def test_a_key_is_changed_and_forgotten_with_its_pod_also_when_it_moved() -> None:
    keys = known()
    keys.learn(Pod("one"), "http://10.0.0.2:30000", "new")
    assert keys.signed(ONE, PAIRS) is PAIRS
    assert keys.signed(TWO, []) == [(b"authorization", b"Bearer new")]
    keys.learn(Pod("one"), "http://10.0.0.2:30000", "")
    assert not keys.known
    known().forget(Pod("nobody"))
